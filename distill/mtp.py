"""An MTP head of a hybrid in training: it goes on from the head in its target's checkpoint.

It sees what it will see when served, as in `eagle3.py`: step i gives row t the gold token at
t + i + 1 and, from the second step on, its own output of the step before, at position t + i. The
rows of later steps stand behind those of the first one in one sequence, whose mask lets each see
the first step's rows up to t and its own later ones. So the layer is transformers' own, unchanged.
The formulas are those of `engine/models/heads/mtp.py`.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.engine.models.heads.config import HeadError, mtp_names

from .head import Drafted, HeadModule, config_to_keep, stored_head, tensors_of, write_head
from .recipe import DistillError, Recipe

_PREFIX = "mtp."
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def check_head(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Refuse a target, or a folder to start from, without a head that can be trained further."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    if "linear_attention" not in layer_types:
        raise DistillError(
            f"kind: MTP heads are trained for hybrids (Qwen3.5, Qwen3.6, Qwen3-Next), not for a "
            f"{config.model_type}; make an eagle3 head or a draft"
        )
    folder = Path(recipe.start or recipe.target)
    try:
        mtp_names(folder)
    except HeadError as error:
        raise DistillError(f"kind: {folder} has no head to begin with: {error}") from None
    stored_head(folder, _PREFIX)
    with torch.device("meta"):  # where a head has shapes alone, which must be those of the target
        MtpModule(AutoModelForCausalLM.from_config(copy.deepcopy(config)), folder)


def _with_stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers' layers have them: some files have each expert by itself."""
    experts = "layers.0.mlp.experts"
    num = sum(name.startswith(f"{experts}.") and "gate_proj" in name for name in tensors)
    if not num:
        return tensors

    def each(part: str) -> Tensor:
        return torch.stack([tensors.pop(f"{experts}.{i}.{part}.weight") for i in range(num)])

    gate, up, down = each("gate_proj"), each("up_proj"), each("down_proj")
    return tensors | {
        f"{experts}.gate_up_proj": torch.cat((gate, up), 1),
        f"{experts}.down_proj": down,
    }


class MtpModule(HeadModule):
    """Its parameters are named as in the saved file but for `mtp.`."""

    def __init__(self, target: PreTrainedModel, folder: Path) -> None:
        """`folder` holds the head that it begins as."""
        super().__init__()
        decoder: Any = target.get_decoder()
        of_text = target.config.get_text_config()
        width, index = of_text.hidden_size, of_text.layer_types.index("full_attention")
        self.take_over(target)
        self.boundaries = (of_text.num_hidden_layers,)  # which transformers has behind the norm
        self._folder = folder
        self.fc = nn.Linear(2 * width, width, bias=False, device=self.device)
        for name in _NORMS:
            self.add_module(name, copy.deepcopy(decoder.norm))
        self.layers = nn.ModuleList([copy.deepcopy(decoder.layers[index])])
        try:
            found = _with_stacked_experts(tensors_of(folder, _PREFIX))
            state = {name: t.float().to(self.device) for name, t in found.items()}
            self.load_state_dict(state, assign=True)
        except (RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise DistillError(f"kind: the head in {folder} is another one: {reason}") from None
        self.requires_grad_(True)
        self._rotary = (decoder.rotary_emb,)

    def forward(
        self, states: Tensor, next_ids: Tensor, mask: Tensor, num_drafts: int, rows: slice
    ) -> list[Drafted]:
        of_embedding, of_hidden, norm = (self.get_submodule(name) for name in _NORMS)
        embedding, output = self._of_target
        h, length = states[:, :, 0].float(), states.shape[1]
        of_steps, found = [], []
        for i in range(num_drafts):
            e = F.embedding(next_ids[:, i : i + length], embedding).float()
            of_steps.append(self.fc(torch.cat((of_embedding(e), of_hidden(h)), -1)))
            h = norm(self._last_rows(of_steps, mask))
            found.append(Drafted(F.linear(h[:, rows].to(output.dtype), output)))
        return found

    def _last_rows(self, of_steps: list[Tensor], mask: Tensor) -> Tensor:
        """The layer's output for the last step's rows. Shape: [B, L, hidden] each -> the same."""
        x, length, steps = torch.cat(of_steps, 1), of_steps[0].shape[1], len(of_steps)
        own = torch.eye(length, dtype=torch.bool, device=x.device).expand_as(mask)
        later = torch.cat([own] * steps, -1).unflatten(-1, (steps, length))
        seen = []
        for i in range(steps):
            of_step = later.clone()
            of_step[..., 0, :] = mask
            of_step[..., i + 1 :, :] = False
            seen.append(of_step.flatten(-2))
        positions = torch.cat([torch.arange(length, device=x.device) + i for i in range(steps)])
        rotary_emb = self._rotary[0]
        if hasattr(rotary_emb, "mrope_section"):  # of text: time, height and width are alike
            rotary = rotary_emb(x, positions.expand(3, 1, -1))
        else:
            rotary = rotary_emb(x, positions[None])
        mask = torch.zeros((), device=x.device).masked_fill(~torch.cat(seen, -2), -torch.inf)
        layer: Any = self.layers[0]
        out: Tensor = layer(x, position_embeddings=rotary, attention_mask=mask)
        return out[:, -length:]

    def export(self, target: PreTrainedModel, folder: Path) -> None:
        """Save it with its target's config, under the names in that checkpoint."""
        tensors = {f"{_PREFIX}{name}": t for name, t in self.state_dict().items()}
        write_head(folder, tensors, config_to_keep(self._folder) | {"architectures": ["MtpHead"]})
