"""What heads in training have in common, however they draft; and the folders of trained heads."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.models.weight_files import (
    Stored,
    WeightFileError,
    name_in_text,
    stored_tensors,
)

from .recipe import DistillError

_FLOATS = ("BF16", "F16", "F32")


class Drafted(NamedTuple):
    """What a head says of a draft behind A rows."""

    logits: Tensor  # [B, A, V'], over the drafted tokens
    before: Tensor | None = None  # [B, A, V'], those among whose likeliest a selector chooses
    confidence: Tensor | None = None  # [B, A], a logit of the chance that the draft is accepted


class HeadModule(nn.Module, ABC):
    """The trainable parameters, named as in the saved file; float32."""

    device: torch.device
    boundaries: tuple[int, ...]  # of the target, whose states it reads
    num_drafts: int | None = None  # at once; None: the recipe's, in turn
    stride = 1  # drafts are learnt behind each of so many rows
    decay = 0.8  # of the weight of each further draft

    def take_over(self, target: PreTrainedModel, target_ids: Tensor | None = None) -> None:
        """Read embedding and output layer of the target, to which they belong.

        Shape: target_ids [V'], the target's id of each drafted token; None: of all tokens.
        """
        embedding: Tensor = target.get_input_embeddings().get_parameter("weight")
        if target_ids is None:
            target_ids = torch.arange(len(embedding))
        self.device = target.device
        self.register_buffer("target_ids", target_ids.to(self.device), persistent=False)
        # In a tuple, because they are no parameters of the head.
        output: Tensor = target.get_output_embeddings().get_parameter("weight")
        self._of_target = (embedding, output)

    @abstractmethod
    def forward(
        self, states: Tensor, next_ids: Tensor, mask: Tensor, num_drafts: int, rows: slice
    ) -> list[Drafted]:
        """Each of the drafts behind A of the rows, following the text's own tokens.

        Shape:
            states: [B, L, m, hidden], of the target
            next_ids: [B, L + num_drafts - 1], the token after each row, and those after the last
            mask: [B, 1, L, L] bool, which rows of the target a row may attend to
            rows: A of L
        """

    @abstractmethod
    def export(self, target: PreTrainedModel, folder: Path) -> None:
        """Write a folder that serves as a draft."""


def states_of(
    target: PreTrainedModel, token_ids: Tensor, mask: Tensor | None, boundaries: tuple[int, ...]
) -> Tensor:
    """The target's hidden states. Shape: [B, L] -> [B, L, m, hidden]."""
    with torch.no_grad():
        hidden = target.get_decoder()(
            input_ids=token_ids.long(),
            attention_mask=mask,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
    return torch.stack([hidden[b] for b in boundaries], 2)


def stored_head(
    folder: Path, prefix: str = "", integers: Collection[str] = ()
) -> dict[str, Stored]:
    """The tensors of the head in a folder, without the prefix of their names.

    Raises DistillError if a file is damaged, or a tensor quantised.
    """
    try:
        stored = stored_tensors(folder)
    except WeightFileError as error:
        raise DistillError(f"kind: {folder} has no head to begin with: {error}") from None
    by_name = {name_in_text(name): each for name, each in stored.items()}
    of_head = {n.removeprefix(prefix): each for n, each in by_name.items() if n.startswith(prefix)}
    for name, each in of_head.items():
        if each.dtype not in _FLOATS and name not in integers:
            raise DistillError(
                f"kind: in {folder}, {prefix}{name} is quantised ({each.dtype}); begin with a head "
                "in 16 bits: --start DIR takes that of another copy"
            )
    return of_head


def tensors_of(
    folder: Path, prefix: str = "", names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """What `stored_head` found, as it is stored; of these names alone, if some are given."""
    found = {}
    for name, stored in stored_tensors(folder).items():
        own = name_in_text(name)
        if own.startswith(prefix) and (names is None or own.removeprefix(prefix) in names):
            with safe_open(stored.path, "pt") as file:
                found[own.removeprefix(prefix)] = file.get_tensor(name)
    return found


def write_head(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write a head's folder, its numbers in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: (t.detach().bfloat16() if t.is_floating_point() else t).cpu()
        for name, t in tensors.items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2)
    (folder / "config.json").write_text(f"{written}\n")


def config_to_keep(folder: Path) -> dict[str, Any]:
    """The config of a head that is trained further, without what will not hold for the new one."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return {
        k: v for k, v in config.items() if k not in ("auto_map", "dtype", "quantization_config")
    }
