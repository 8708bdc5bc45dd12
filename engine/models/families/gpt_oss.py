"""gpt-oss: a Llama's layers with sinks and windows, and with experts in MXFP4:

    x += sum over the experts e of a row:  weight_e * down_e((u + 1) * g * sigmoid(alpha * g))
    g = min(gate_e(m), limit),  u = up_e(m) within +-limit,  m = post_attention_layernorm(x)

The weights are a softmax over the logits of the row's experts, the largest of its router.
"""

from outrider.kernels.model.rms_norm import Norm

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint
from ..formats.mxfp4 import read_experts
from ..parts.base import Part
from ..parts.experts import ExpertMLP, ExpertWeights
from .llama import Windowed

_ALPHA, _LIMIT = 1.702, 7.0  # which transformers 5.17 has in its code, not in its configuration


class GptOss(Windowed):
    """Raises UnsupportedModelError if its experts are not in MXFP4, or damaged."""

    model_types = ("gpt_oss",)
    fields = Windowed.fields | {
        "num_experts_per_tok", "num_local_experts", "swiglu_alpha", "swiglu_limit"
    }  # fmt: skip

    def mlp(self, name: str, norm: Norm, layer: int) -> Part:
        config, experts = self.config, f"{name}.experts"
        tensors, blocks = self.tensors, f"{experts}.gate_up_proj_blocks"
        if not isinstance(tensors, Checkpoint) or blocks not in tensors:
            raise UnsupportedModelError("only experts in MXFP4 have a decoder here")
        num_experts, width = config.num_local_experts, config.hidden_size
        inner = config.intermediate_size
        gate_up = (num_experts, 2 * inner, width)
        return ExpertMLP(
            norm=norm,
            router=tensors.linear(width, {f"{name}.router": num_experts}),
            experts=ExpertWeights(
                gate_up=read_experts(tensors, f"{experts}.gate_up_proj", gate_up, interleaved=True),
                down=read_experts(tensors, f"{experts}.down_proj", (num_experts, width, inner)),
                top_k=config.num_experts_per_tok,
                alpha=config.swiglu_alpha or _ALPHA,
                limit=config.swiglu_limit or _LIMIT,
            ),
            chooser=f"{name}.router",
        )
