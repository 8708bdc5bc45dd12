"""Reads layers of gpt-oss: a Llama's with sinks, and with experts in MXFP4."""

from outrider.kernels.model.rms_norm import Norm

from .admission import UnsupportedModelError
from .checkpoint import Checkpoint
from .experts import ExpertMLP, ExpertWeights
from .formats.mxfp4 import read_experts
from .llama import LlamaReader

_ALPHA, _LIMIT = 1.702, 7.0  # which transformers 5.17 has in its code, not in its configuration


class GptOssReader(LlamaReader):
    """Reads the parts of a gpt-oss."""

    def mlp(self, name: str, norm: Norm) -> ExpertMLP:
        """Raises UnsupportedModelError if its experts are not in MXFP4, or damaged."""
        config, experts = self._config, f"{name}.experts"
        checkpoint, blocks = self.checkpoint, f"{experts}.gate_up_proj_blocks"
        if not isinstance(checkpoint, Checkpoint) or blocks not in checkpoint:
            raise UnsupportedModelError("only experts in MXFP4 have a decoder here")
        num_experts, inner = config.num_local_experts, config.intermediate_size
        width = config.hidden_size
        return ExpertMLP(
            norm=norm,
            router=checkpoint.linear(width, **{f"{name}.router": num_experts}),
            experts=ExpertWeights(
                gate_up=read_experts(
                    checkpoint,
                    f"{experts}.gate_up_proj",
                    (num_experts, 2 * inner, width),
                    interleaved=True,
                ),
                down=read_experts(checkpoint, f"{experts}.down_proj", (num_experts, width, inner)),
                top_k=config.num_experts_per_tok,
                alpha=getattr(config, "swiglu_alpha", _ALPHA),
                limit=getattr(config, "swiglu_limit", _LIMIT),
            ),
        )
