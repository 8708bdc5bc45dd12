"""The unmodified Hugging Face model, for every checkpoint whose structure we do not know.

transformers calls our attention through its AttentionInterface. We register no mask function, so
models get no mask, and our attention decides what each row sees. The batch cannot be passed by
keyword, because some models drop keywords that they do not know. So each model registers its own
name in the interface, and that function knows the model's current batch.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from outrider.kernels.model.rope import store

from ..config import ModelConfig
from ..progress import ReportCounts, counted
from .admission import UnsupportedModelError
from .attention import ForwardBatch, PagedAttention
from .network import Network, Pass
from .pretrained import load_pretrained
from .weights import Dense, Linear

# Must not contain "flash", "sdpa", "flex", "paged|" or "/", which mean something to transformers.
_NAME = "outrider_{}"
_numbers = count()
_TINY = 4  # tokens of a pass before there are pages


class HuggingFaceModel(Network):
    """A causal LM of transformers: its own code around our attention."""

    def __init__(
        self,
        config: ModelConfig,
        hf_config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        report: ReportCounts,
        *,
        rounds: bool,
    ) -> None:
        """Load the model onto a device; on a CPU, `rounds` allows rounding to 8 bits.

        Raises UnsupportedModelError if the model would silently compute wrong results.
        """
        self._attention_of: dict[nn.Module, PagedAttention] = {}
        self._batch: ForwardBatch | None = None  # None during the dry run
        self._num_calls = 0
        name = _NAME.format(next(_numbers))
        AttentionInterface.register(name, _weak(self._attend))
        with _weights_counted(report), _own_attention_explained(name):
            model = load_pretrained(
                Path(config.path),
                hf_config,
                device,
                dtype=dtype,
                attn_implementation=name,
                trust_remote_code=config.trust_remote_code,
            )
        self.model: Any = model.eval().requires_grad_(False)
        self.dtype, self.device = self.model.dtype, self.model.device
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self._dry_run()
        if device.type == "cpu":
            pack_linears(self.model, rounds=rounds)
            self._run_tiny()
            unpack_read(self.model)
        layer = self.model.get_output_embeddings()
        if isinstance(layer, PackedLinear):
            self.output_layer = layer.linear
        elif isinstance(layer, nn.Linear):
            self.output_layer = Linear(Dense(layer.weight), layer.bias)

    @property
    def attentions(self) -> list[PagedAttention]:
        return list(self._attention_of.values())

    @property
    def input_embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().get_parameter("weight")
        return weight

    @property
    def num_layers(self) -> int:
        return len(self._attention_of)

    @property
    def weight_bytes(self) -> int:
        num_bytes = sum(int(parameter.nbytes) for parameter in self.model.parameters())
        is_tied: bool = self.model.config.get_text_config().tie_word_embeddings
        return num_bytes - (0 if is_tied else self.input_embedding.nbytes)

    def tap(self, layers: Sequence[int]) -> None:
        last = len(self.attentions) - 1
        if last in layers:
            raise ValueError(
                f"cannot tap layer {last}, the last: transformers hands out its states normalised"
            )
        super().tap(layers)
        if not layers:
            return
        taps = self._run_tiny()
        if taps is None or taps.shape != (_TINY, len(layers), self.input_embedding.shape[1]):
            super().tap(())
            raise ValueError("its layers hand out several states of a token, or none")

    @property
    def products_are_batch_invariant(self) -> bool:
        """True if all layers are packed, and so have no parameters left; experts never are."""
        return not any(
            parameter.ndim > 1
            for module in self.model.modules()
            if not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        )

    def __call__(self, batch: ForwardBatch) -> Pass:
        self._batch = batch
        input_ids = self.own_ids(batch.input_ids)
        logits, taps = self._run(input_ids, batch.rows.positions, batch.logits_rows)
        place = self.place_of_logits(len(logits))
        return Pass(self.widened(logits) if place is None else place.copy_(logits), taps)

    def _run(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        output = self.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_rows,
            output_hidden_states=bool(self.tapped_layers),
        )
        taps = None
        if self.tapped_layers:
            # The last of these states are normalised; those of the last layer itself are not there.
            states, last = output.hidden_states, len(output.hidden_states) - 1
            taps = torch.stack([states[min(i + 1, last)][0] for i in self.tapped_layers], 1)
        return output.logits[0], taps

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_ids: Tensor | None = None,
        **unknown: object,
    ) -> tuple[Tensor, None]:
        """Write this layer's new KV to its pages, then attend over them.

        Shape:
            query: [1, num_heads, T, head_dim]; key: [1, num_kv_heads, T, head_dim]
            value: [1, num_kv_heads, T, value_dim]
            returns: [1, T, num_heads, value_dim], None
        """
        if self._batch is None:
            self._num_calls += 1
            if module not in self._attention_of:  # what was decided of one stays
                # An argument that we ignored would silently make the output wrong.
                dropped = sorted(k for k, given in unknown.items() if given not in (None, False))
                if dropped:
                    reason = f"its attention passes {', '.join(dropped)}, unknown"
                    raise UnsupportedModelError(reason)
                if attention_mask is not None:
                    raise UnsupportedModelError("it builds an attention mask of its own")
                self._attention_of[module] = PagedAttention(
                    num_heads=query.shape[1],
                    num_kv_heads=key.shape[1],
                    head_dim=key.shape[3],
                    value_dim=value.shape[3],
                    scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
                    window=sliding_window,
                    softcap=softcap,
                    sinks=s_aux,
                )
            return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
        attention = self._attention_of[module]
        keys, values = attention.bound_pages
        places = self._batch.places(attention)
        store(keys, places, key[0].transpose(0, 1), attention.k_scale)
        store(values, places, value[0].transpose(0, 1), attention.v_scale)
        attended = attention(query[0].transpose(0, 1), self._batch)
        return attended[None].contiguous(), None  # as transformers' own: some models view it

    @torch.inference_mode()
    def _run_tiny(self) -> Tensor | None:
        self._batch = None  # it needs no pages
        positions = torch.arange(_TINY, device=self.device)
        return self._run(torch.zeros_like(positions), positions, positions[-1:])[1]

    def _dry_run(self) -> None:
        """Run one tiny forward: every layer must call our attention once, with known arguments."""
        model = self.model
        if not model.is_backend_compatible():
            raise UnsupportedModelError("it does not dispatch its attention to a backend")
        if model._is_stateful:
            raise UnsupportedModelError("it keeps recurrent state, which cannot be rolled back")
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise UnsupportedModelError("its forward takes no logits_to_keep")
        self._run_tiny()
        text_config = model.config.get_text_config()
        for part in (text_config, *self._attention_of):
            if not getattr(part, "is_causal", True):
                raise UnsupportedModelError("its tokens attend to those behind them, too")
        num_layers = text_config.num_hidden_layers
        if not len(self._attention_of) == self._num_calls == num_layers:
            raise UnsupportedModelError(
                f"of its {num_layers} layers, {len(self._attention_of)} called our attention, "
                f"{self._num_calls} times in all"
            )


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method, but keeps no model alive: transformers never drops what it registered."""
    own = weakref.WeakMethod(method)

    def call(*args: Any, **options: Any) -> Any:
        bound = own()
        assert bound is not None, "only the model's own layers call it"
        return bound(*args, **options)

    return call


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU, with a packed weight."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.is_read = False  # whether the model's own code reads the weight or bias itself

    @property
    def weight(self) -> Tensor:
        """The whole matrix, which takes long to unpack. Shape: [N, K]."""
        self.is_read = True
        return self.linear.weight.dequantised()

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return y


@torch.inference_mode()
def pack_linears(model: nn.Module, *, rounds: bool = False) -> None:
    """Replace each plain linear layer by what `packed` makes of it, if it makes anything."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # A subclass may have another forward.
            if type(child) is not nn.Linear:
                continue
            plain = Linear(Dense(child.weight), child.bias)
            fast = plain.packed(rounds=rounds)
            if fast is not plain:
                setattr(parent, name, PackedLinear(fast))


@torch.inference_mode()
def unpack_read(model: nn.Module) -> None:
    """Make those packed layers plain again whose weight a pass has read."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not (isinstance(child, PackedLinear) and child.is_read):
                continue
            matrix = child.weight
            num_out, num_in = matrix.shape
            plain = nn.Linear(num_in, num_out, bias=False, device="meta")
            plain.weight = nn.Parameter(matrix.contiguous(), requires_grad=False)
            if child.bias is not None:
                plain.bias = nn.Parameter(child.bias, requires_grad=False)
            setattr(parent, name, plain)


@contextmanager
def _own_attention_explained(name: str) -> Iterator[None]:
    """Of models that look for their attention in a table of their own."""
    try:
        yield
    except KeyError as error:
        if error.args != (name,):
            raise
        raise UnsupportedModelError("it does not dispatch its attention to a backend") from None


@contextmanager
def _weights_counted(report: ReportCounts) -> Iterator[None]:
    """Have transformers report loaded weights to `report` instead of drawing a progress bar."""

    def hook(make_bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return counted(args[0], report) if args else make_bar(*args, **kwargs)

    transformers_logging.disable_progress_bar()
    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
