"""Loads a model directory as a network on its device."""

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig

from ..api import ReportProgress, ignore_progress
from ..config import ModelConfig
from .admission import (
    FinalRefusalError,
    UnsupportedModelError,
    check_config,
    check_masks,
    checked_starts,
    failures_explained,
    keeps_state,
    max_positions,
    resolve_dtype,
)
from .architectures import load_config
from .batch_invariance import make_batch_invariant
from .checkpoint import EMBEDDING, OUTPUT_LAYER, Checkpoint, Read
from .compiled_decoder import CompiledDecoder, can_compile
from .decoder import Decoder
from .families import FAMILIES, why_unknown
from .formats import refused_format, take_format
from .formats.fp8 import rounding
from .gguf_checkpoint import open_checkpoint
from .hugging_face import HuggingFaceModel
from .network import Network
from .proof import CHECKED_LENGTHS, Original, why_different
from .shares import WHOLE, Share
from .unread import warn_of_unread
from .weight_files import holds_gguf
from .weights import Dense, Layer, Tiles

log = logging.getLogger(__name__)

# A file beside a draft model's config, with the ids of the tokens that it proposes. On a CPU the
# output layer takes most of a small draft's pass, and a quarter of its rows covers all but the
# rarest tokens.
DRAFTED_TOKENS = "draft_tokens.json"


def load_network(
    config: ModelConfig,
    device: torch.device,
    report: ReportProgress = ignore_progress,
    *,
    is_draft: bool = False,
    batch_invariant: bool | None = False,
    cache_dtype: torch.dtype | None = None,
    share: Share = WHOLE,
    max_model_len: int | None = None,
) -> Network:
    """Load a model directory onto a device.

    On a CPU, a draft whose dtype is "auto" gets 8-bit weights if they are faster. With
    `batch_invariant` the bits of a row do not depend on the batch, and a model that cannot promise
    this is refused; None: only if it can promise it at little cost. `cache_dtype` is that of keys
    and values; None: the model's own. Of a model that ranks share, only `share` is read and
    compared with transformers' code, and its blocks add no other's. `max_model_len` is that of the
    longest sequence to compute, if it is known. Raises UnsupportedModelError saying why a model is
    refused.
    """
    role: Literal["target", "draft"] = "draft" if is_draft else "target"
    report(f"loading the {role}", 0, 0)
    if not (Path(config.path) / "config.json").is_file():
        raise UnsupportedModelError(f"{config.path} is no model directory: it has no config.json")
    hf_config = load_config(config.path, trust_remote_code=config.trust_remote_code)
    try:
        check_config(hf_config)
        if (family := FAMILIES.get(hf_config.model_type)) is not None:
            family.check_fixed(hf_config)
        if max_model_len is not None and max_model_len > (longest := max_positions(hf_config)):
            raise UnsupportedModelError(
                f"engine.max_model_len is {max_model_len}, but it has positions for {longest} "
                "tokens: set it to that at most, or leave it out"
            )
        if is_draft and keeps_state(hf_config):
            raise UnsupportedModelError(
                "as a draft model it would go back over rejected drafts, and the state of its "
                "linear attention cannot; take another draft"
            )
        dtype = resolve_dtype(config.dtype, hf_config, device)
        quantised = quantised_format(config, hf_config)
        loader = _Loader(
            config, hf_config, dtype, device, report, role, batch_invariant, cache_dtype, share
        )
        decoder, reason = loader.own_decoder(quantised)
        if decoder is not None:
            return decoder
        loader.check_needs_no_decoder(quantised, reason)
        level = logging.WARNING if hf_config.model_type in FAMILIES else logging.INFO
        log.log(level, "%s runs as transformers has it, which is slower: %s", config.path, reason)
        try:
            return loader.whole_model()
        except UnsupportedModelError as error:
            if hf_config.model_type not in FAMILIES or str(error) == reason:
                raise
            raise UnsupportedModelError(f"{error}; nor by our own decoder: {reason}") from error
    except UnsupportedModelError as reason:
        raise UnsupportedModelError(
            f"{config.path} ({hf_config.model_type}) cannot be served: {reason}"
        ) from None


def quantised_format(config: ModelConfig, hf_config: PreTrainedConfig) -> tuple[str, Read] | None:
    """Name and reader of the checkpoint's quantised format, if it has one.

    Removes the format from the configuration, which is then that of the plain model. Raises
    UnsupportedModelError.
    """
    if config.quantization not in (None, "fp8"):
        raise UnsupportedModelError(f"quantization is {config.quantization!r}; it may be fp8")
    quantised = take_format(hf_config, Path(config.path))
    if quantised is not None and config.quantization is not None:
        raise UnsupportedModelError(
            f"its weights are quantised already ({quantised[0]}); leave quantization out"
        )
    return quantised


def rounds_weights(config: ModelConfig, is_draft: bool) -> bool:
    """Whether a CPU may round the weights: only a draft's, as output is exact with any draft."""
    return is_draft and config.dtype == "auto"


@dataclass(frozen=True, slots=True)
class _Loader:
    config: ModelConfig
    hf_config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    report: ReportProgress
    role: Literal["target", "draft"]
    batch_invariant: bool | None
    cache_dtype: torch.dtype | None
    share: Share

    @property
    def is_draft(self) -> bool:
        return self.role == "draft"

    def check_needs_no_decoder(self, quantised: tuple[str, Read] | None, reason: str) -> None:
        """Refuse what our own decoder alone can do; `reason` says why it does not run.

        Raises UnsupportedModelError.
        """
        if quantised is not None:
            raise refused_format(f"{quantised[0]}: {reason}")
        if keeps_state(self.hf_config):
            raise UnsupportedModelError(
                f"only our own decoder keeps the state of its linear attention, and {reason}"
            )
        if self.config.quantization is not None:
            raise UnsupportedModelError(
                f"quantization is set, but its weights stay plain: {reason}"
            )
        if self.batch_invariant and self.device.type == "cuda":
            raise UnsupportedModelError(
                f"engine.batch_invariant is on, but on a GPU only our own decoder keeps it, and "
                f"this model runs as transformers has it ({reason}); leave it out"
            )
        if self.share.size > 1:
            raise UnsupportedModelError(
                f"{self.role}.tensor_parallel is {self.share.size}, but only our own decoder is "
                f"shared, and this model runs as transformers has it ({reason}); leave it out"
            )

    def _read(self, quantised: tuple[str, Read] | None) -> Read | None:
        """What reads its quantised layers, or rounds plain ones; None: they are as they are."""
        if self.config.quantization is None:
            return quantised[1] if quantised else None
        if self.is_draft:  # its layers are small: rounding inputs costs too much
            return rounding(rounds_inputs=False)
        return rounding(rounds_inputs=True, leaves_out=(OUTPUT_LAYER, EMBEDDING))

    def own_decoder(self, quantised: tuple[str, Read] | None) -> tuple[Decoder | None, str]:
        """Our decoder, if it knows this structure and computes what transformers does; or None, and
        why not.
        """
        if reason := why_unknown(self.hf_config, quantised[0] if quantised else None):
            return None, reason
        folder = Path(self.config.path)
        try:
            family = FAMILIES[self.hf_config.model_type]
            of_share = family.share_of(self.hf_config, self.share.size)
            original = Original(
                family.compared(of_share), self.dtype, self.device, family.last_norm
            )
            if self.config.quantization is not None and holds_gguf(folder):
                return None, "it is a GGUF file, whose weights are rounded already"
            checkpoint = open_checkpoint(
                folder,
                self.dtype,
                self.device,
                partial(self.report, f"loading the {self.role}"),
                read=self._read(quantised),
                share=self.share,
                renamed=family.renamed,
            )
            decoder = family(checkpoint, self.hf_config).decoder()
            if quantised and isinstance(checkpoint, Checkpoint) and not checkpoint.has_quantised:
                return None, "none of its layers is kept in that way"
            original.fill(checkpoint)
            if biases := checkpoint.biases_left_out():
                return None, f"its files have {biases[0]}, which our decoder does not add"
        except FinalRefusalError:
            raise
        except UnsupportedModelError as error:
            return None, str(error)
        except KeyError as error:  # names a tensor
            return None, f"its checkpoint is not as expected: it lacks {error.args[0]}"
        except (FileNotFoundError, SafetensorError, ValueError) as error:
            return None, f"its checkpoint is not as expected: {error}"
        ignored = original.model._keys_to_ignore_on_load_unexpected
        is_cpu = self.device.type == "cpu"
        if not is_cpu:
            self._set_up(decoder)
        starts = checked_starts(self.hf_config, max(CHECKED_LENGTHS))
        # A CPU's layers can only be packed, and proven, once transformers has no view of their
        # weights.
        reason = why_different(
            decoder,
            original,
            starts,
            batch_invariant=is_cpu or decoder.batch_invariant,
            report=partial(self.report, f"comparing the {self.role} with transformers"),
        )
        unread = checkpoint.unread()
        # They hold views of weights, which could not be freed when they are packed.
        del original, checkpoint
        if reason is not None:
            return None, f"our decoder computes {reason} differently"
        text_config = self.hf_config.get_text_config()
        warn_of_unread(self.config.path, unread, text_config, ignored)
        self._translate(decoder)
        if is_cpu:
            decoder = self._packed(decoder)
            self._set_up(decoder)
        return decoder, ""

    def _packed(self, decoder: Decoder) -> Decoder:
        """The decoder in the form that is fastest on a CPU."""
        if self.is_draft and isinstance(decoder.output_layer.weight, Dense):
            drafted = drafted_tokens(Path(self.config.path), decoder.output_layer.weight.shape[0])
            if decoder.token_map is not None:
                common = decoder.token_map.drawn
                drafted = common if drafted is None else drafted[torch.isin(drafted, common)]
            if drafted is not None:
                decoder.draft_only(drafted)
        rounds = rounds_weights(self.config, self.is_draft)
        in_codes = isinstance(decoder.output_layer.weight, Tiles)
        is_tied = self.hf_config.tie_word_embeddings and in_codes
        decoder.change_linears(partial(Layer.packed, rounds=rounds))
        if self.share.size == 1 and can_compile(decoder):
            decoder = CompiledDecoder(decoder, is_tied=is_tied)
        return decoder

    def whole_model(self) -> Network:
        """The model as transformers has it."""
        with failures_explained():
            check_masks(self.hf_config)
            network = HuggingFaceModel(
                self.config,
                self.hf_config,
                self.dtype,
                self.device,
                partial(self.report, f"loading the {self.role}"),
                rounds=rounds_weights(self.config, self.is_draft),
            )
        self._set_up(network)
        self._translate(network)
        return network

    def _translate(self, draft: Network) -> None:
        """Have a draft with a vocabulary of its own read and draw tokens of the target."""
        if self.config.vocabulary is not None:
            draft.take_vocabulary(self.config.vocabulary)

    def _set_up(self, network: Network) -> None:
        """Name a network, and make its rows independent of the batch if that is wanted."""
        wanted, path = self.batch_invariant, self.config.path
        network.name = self.hf_config.model_type
        network.max_positions = max_positions(self.hf_config)
        network.cache_dtype = self.cache_dtype
        if wanted is False:
            return
        try:
            report = partial(self.report, f"checking how the {self.role} rounds")
            make_batch_invariant(network, at_any_cost=wanted is True, report=report)
        except ValueError as reason:
            if wanted:
                raise UnsupportedModelError(
                    f"engine.batch_invariant is on, but {reason}; leave it out"
                ) from None
            log.info("%s: rounding depends on the batch: %s", path, reason)
        except Exception:  # nobody asked for it: a broken check must not keep a model from serving
            if wanted:
                raise
            log.warning(
                "%s: whether rounding depends on the batch was not found out", path, exc_info=True
            )


def drafted_tokens(folder: Path, vocab_size: int) -> Tensor | None:
    """The tokens that a draft model is to propose, if its directory names them: [V'] int64.

    Raises UnsupportedModelError if they are not distinct ids of its vocabulary.
    """
    path = folder / DRAFTED_TOKENS
    if not path.exists():
        return None
    try:
        ids = json.loads(path.read_text())
    except ValueError:
        ids = None
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(i) is int and 0 <= i < vocab_size for i in ids)
        or len(set(ids)) < len(ids)
    ):
        raise UnsupportedModelError(
            f"{DRAFTED_TOKENS} must be a JSON list of distinct token ids, 0 to {vocab_size - 1}; "
            "mend it, or remove it: all tokens are proposed then"
        )
    return torch.tensor(ids)
