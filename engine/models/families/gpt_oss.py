"""gpt-oss: a Llama's layers with sinks and windows, and with experts in MXFP4:

    x += sum over the experts e of a row:  weight_e * down_e((u + 1) * g * sigmoid(alpha * g))
    g = min(gate_e(m), limit),  u = up_e(m) within +-limit,  m = post_attention_layernorm(x)

The weights are a softmax over the logits of the row's experts, the largest of its router.
"""

from typing import Any

from outrider.kernels.model.expert_matrix import MXFP4_GROUP, Glu
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.routing import Router

from ..checkpoint import Checkpoint
from ..formats.mxfp4 import read_mxfp4
from ..parts.base import Part
from ..parts.experts import ExpertMLP
from .llama import Windowed

_ALPHA, _LIMIT = 1.702, 7.0  # which transformers 5.17 has in its code, not in its configuration


class GptOss(Windowed):
    """Raises UnsupportedModelError if its experts are damaged."""

    model_types = ("gpt_oss",)
    only_format = "mxfp4"
    fields = Windowed.fields | {
        "num_experts_per_tok", "num_local_experts", "swiglu_alpha", "swiglu_limit"
    }  # fmt: skip

    @classmethod
    def cut_by(cls, config: Any, size: int) -> list[str]:
        cut, inner = super().cut_by(config, size), config.intermediate_size
        if inner % (MXFP4_GROUP * size):  # numbers of a group share a scale
            cut.append(f"intermediate_size {inner} in groups of {MXFP4_GROUP}")
        return cut

    @classmethod
    def share_of(cls, config: Any, size: int) -> Any:
        """Experts are as wide as kernels take them: a rank's range is filled up with zeros."""
        share = super().share_of(config, size)
        if size > 1:
            share.intermediate_size += -share.intermediate_size % (2 * MXFP4_GROUP)
        return share

    def mlp(self, name: str, norm: Norm | None, layer: int, **options: Any) -> Part:
        config, experts = self.config, f"{name}.experts"
        tensors = self.tensors
        assert isinstance(tensors, Checkpoint), "files in MXFP4 are no GGUF files"
        num_experts, top_k = config.num_local_experts, config.num_experts_per_tok
        width, inner = config.hidden_size, config.intermediate_size
        gate_up, down = (num_experts, 2 * inner, width), (num_experts, width, inner)
        return ExpertMLP(
            norm=norm,
            router_layer=tensors.linear(width, {f"{name}.router": num_experts}),
            first=read_mxfp4(tensors, f"{experts}.gate_up_proj", gate_up, top_k, gated=True),
            down=read_mxfp4(tensors, f"{experts}.down_proj", down, top_k),
            activation=Glu(config.swiglu_alpha or _ALPHA, config.swiglu_limit or _LIMIT, 1.0),
            router=Router(top_k),
            chooser=f"{name}.router",
        )
