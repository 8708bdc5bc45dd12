"""Kernels are compiled before there are requests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import engine_config
from tiny_models import DEVICE

from outrider.engine.engine import Engine


@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_warming_up_touches_no_sequence(tiny_model: Callable[..., Path], proposer: str) -> None:
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, target, k=2, proposer=proposer, max_num_seqs=2))
    state = engine.worker.slots.state
    state.token_ids.random_(90)
    state.num_tokens.random_(9)
    before = [field[:2].clone() for field in (state.token_ids, state.num_tokens)]
    model = engine.worker.pair.target
    logits = torch.zeros(2 * 3, model.vocab_size, dtype=model.dtype, device=DEVICE)
    with torch.inference_mode():
        for warm_up in [
            *engine.worker.proposer.warm_ups(),
            *engine.worker.verifier.warm_ups(logits),
        ]:
            warm_up()
    assert torch.equal(before[0], state.token_ids[:2])
    assert torch.equal(before[1], state.num_tokens[:2])
