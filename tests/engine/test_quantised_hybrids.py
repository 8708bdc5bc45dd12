"""Hybrids in the formats in which they are published, and their MTP heads, quantised or not."""

from pathlib import Path

import pytest
import torch
from engines import GREEDY, engine_config, prompts
from mtp import PlainHybrid, save_tiny_hybrid
from paged import PROMPT, run_prompt
from quantised import quantise
from tiny_models import DEVICE, VOCAB
from transformers import AutoModelForCausalLM

from outrider.engine.api import NewRequest
from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "scale": 0.1,
}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SMALL = ("in_proj_a", "in_proj_b")  # which nobody quantises, nor both in one
PUBLISHED = {
    "fp8 of blocks": SMALL,  # its head, too
    "gptq": ("attn", "mtp."),  # the MLPs alone
    "awq": (*SMALL, "mtp."),
    "ct 4 bits": SMALL,
    "ct fp8 of rows": (*SMALL, "mtp."),
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen3_next", "fp8 of blocks"),
        ("qwen3_5_text", "gptq"),
        *(
            pytest.param("qwen3_5_text", name, marks=pytest.mark.deep)
            for name in PUBLISHED
            if name != "gptq"
        ),
    ],
)
def test_a_hybrid_computes_what_its_codes_mean(
    architecture: str, name: str, tmp_path: Path
) -> None:
    """Those of the mixture, experts of its head among them, have matrices of their own."""
    torch.manual_seed(0)
    shape = SHAPE | EXPERTS if architecture == "qwen3_next" else SHAPE
    plain = save_tiny_hybrid(tmp_path / "plain", architecture, **shape)
    path = quantise(plain, tmp_path, name, leave=PUBLISHED[name])
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    assert isinstance(network, Decoder)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path / "meant", attn_implementation="eager")
    with torch.inference_mode():
        expected = eager.to(DEVICE)(PROMPT[None]).logits[0]
    torch.testing.assert_close(run_prompt(network).logits, expected, rtol=1e-3, atol=1e-3)

    engine = Engine(engine_config(path, path, k=2))
    assert engine.info.proposer == "mtp"
    [known], head = prompts([9], VOCAB), PlainHybrid(tmp_path / "meant")
    new = NewRequest(request_id="", prompt_token_ids=known, params=GREEDY, returns_drafts=True)
    engine.submit([new])
    known, num_drafts = list(known), 0
    while engine.has_work():
        for output in engine.step():
            if drafts := output.draft_token_ids:
                assert drafts == head.drafts(known, len(drafts))
                num_drafts += len(drafts)
            known += output.token_ids
    assert num_drafts > 20
