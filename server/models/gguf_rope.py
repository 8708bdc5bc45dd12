"""The stretched RoPE of Llama 3.1 to 3.3, of which a GGUF file keeps only the factors."""

from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.models.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"  # [head_dim / 2]; frequencies are divided by them
_STRETCHES = (8.0, 32.0)  # of Llama 3.1 and 3.3, and of Llama 3.2


def llama3_rope(file: GgufFile) -> dict[str, Any] | None:
    """The RoPE parameters of a Llama that give the file's factors; None if no published ones do."""
    if file.metadata.get("general.architecture") != "llama" or ROPE_FACTORS not in file.entries:
        return None
    (factors,) = file.read(ROPE_FACTORS).dequantised()
    parameters = {
        "rope_theta": file.metadata.get("llama.rope.freq_base", 10000.0),
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    def frequencies(stretch: float) -> torch.Tensor:
        config = LlamaConfig(
            head_dim=2 * len(factors), rope_parameters=parameters | {"factor": stretch}
        )
        inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        return inv_freq

    for stretch in _STRETCHES:
        if torch.allclose(frequencies(1.0) / frequencies(stretch), factors, rtol=1e-4):
            return parameters | {"factor": stretch}
    return None
