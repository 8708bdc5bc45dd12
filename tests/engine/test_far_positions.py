"""Long sequences, with stretched RoPE: answers are those of transformers' own code at any position.

Prompts come in chunks, over thousands of pages; answers are verified with drafts.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import VOCAB, Tiny
from transformers import AutoModelForCausalLM

from outrider.engine.engine import Engine
from outrider.engine.memory.device_memory import DeviceMemory
from outrider.engine.memory.pages import DUMMY_PAGE
from outrider.engine.memory.sequence import SequenceMemory

ORIGINAL = 1024  # positions before RoPE was stretched
ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
WINDOW, COMPUTED_PAGES = 64, 20  # at the end of a prompt, of which the window is a part
CASES = [
    ("llama3", 4096, None),
    ("yarn", 131_072, WINDOW),
    *(
        pytest.param(*case, marks=pytest.mark.deep)
        for case in (
            ("default", 4096, None),
            ("yarn", 4096, None),
            ("linear", 131_072, WINDOW),
            ("yarn", 32_768, None),
        )
    ),
]
# Rows sum so many numbers in another order than transformers does.
TOLERANCE = 2e-4


def pass_over(memory: DeviceMemory, sequence: SequenceMemory, num_reusable: int, slot: int) -> int:
    """As `attach_prefix`, of a prompt of which nothing is read any more but its end: all in front
    counts as computed, and behind the window.
    """
    num_pages = num_reusable // memory.page_size - COMPUTED_PAGES
    sequence.pages, sequence.slot = [[], []], slot
    for group in range(2):
        for column in range(num_pages):
            sequence.set_page(group, column, DUMMY_PAGE)
    sequence.num_recorded_pages = num_pages
    sequence.num_shared_tokens = sequence.num_computed_tokens = num_pages * memory.page_size
    return sequence.num_shared_tokens


@torch.inference_mode()
def logprobs_by_transformers(
    path: Path, ids: list[int], num_last: int, window: int | None
) -> torch.Tensor:
    """Of the token after each of the last `num_last`, whose only layer attends to `window`.

    Shape: [num_last, VOCAB]
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    first = 0 if window is None else len(ids) - num_last - window
    positions = torch.arange(first, len(ids))[None]
    logits = model(
        torch.tensor([ids[first:]]),
        position_ids=positions,
        logits_to_keep=num_last,
        use_cache=False,
    ).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compared in float32 on a CPU")
@pytest.mark.parametrize(("rope", "num_tokens", "window"), CASES)
def test_far_positions_are_those_of_transformers(
    rope: str,
    num_tokens: int,
    window: int | None,
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows: dict[str, object] = {}
    if window is not None:
        windows = {"sliding_window": window, "use_sliding_window": True}
        windows["layer_types"] = ["sliding_attention"]
        monkeypatch.setattr(DeviceMemory, "attach_prefix", pass_over)
    path = tiny_model(
        "llama" if window is None else "qwen3",
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=num_tokens,
        rope_parameters=ROPES[rope],
        scale=0.8,  # attention is sharp, so that it depends on positions
        **windows,
    )
    (prompt,) = prompts([num_tokens - GREEDY.max_tokens], VOCAB)
    config = engine_config(
        path, proposer="suffix", page_size=16, num_pages=None, max_num_batched_tokens=1024,
        max_num_seqs=1,
    )  # fmt: skip
    engine = Engine(config)
    assert engine.info.max_model_len == num_tokens
    outputs = run(engine, [prompt], replace(GREEDY, logprobs=3))[0]
    drawn = tokens(outputs)
    expected = logprobs_by_transformers(path, [*prompt, *drawn[:-1]], len(drawn), window)
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    assert len(entries) == len(drawn) == GREEDY.max_tokens
    for entry, row in zip(entries, expected, strict=True):
        ids = [token_id for token_id, _ in entry.top]
        got = torch.tensor([logprob for _, logprob in entry.top])
        torch.testing.assert_close(got, row[ids], rtol=0, atol=TOLERANCE)
        assert float(row.max() - row[ids[0]]) < TOLERANCE
