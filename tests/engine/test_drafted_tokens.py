"""Draft models that propose some tokens alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import engine_config, prompts, run, tokens
from paged import run_prompt
from tiny_models import DEVICE, save_tiny_model

from outrider.engine.api import SamplingParams
from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.loading import DRAFTED_TOKENS, load_network

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU a draft has its whole head")
DRAFTED = [3, 1, 17, 40, 59]
VOCAB = 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", vocab_size=VOCAB)


def logits(path: Path, dtype: str, *, is_draft: bool) -> torch.Tensor:
    config = ModelConfig(path=str(path), dtype=dtype)
    network = load_network(config, DEVICE, is_draft=is_draft)
    assert network.vocab_size == VOCAB
    found: torch.Tensor = run_prompt(network, torch.arange(9) * 7).logits
    return found


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_no_other_token_has_a_chance(model: Path, dtype: str) -> None:
    whole = logits(model, dtype, is_draft=True)
    target = logits(model, dtype, is_draft=False)
    (model / DRAFTED_TOKENS).write_text(json.dumps(DRAFTED))
    some = logits(model, dtype, is_draft=True)
    torch.testing.assert_close(some[:, DRAFTED], whole[:, DRAFTED])
    others = [i for i in range(VOCAB) if i not in DRAFTED]
    assert (some[:, others] == -torch.inf).all()
    assert torch.equal(logits(model, dtype, is_draft=False), target)  # nor is it cut


def test_answers_are_still_the_target_s(model: Path, tmp_path: Path) -> None:
    draft = save_tiny_model(tmp_path / "draft", vocab_size=VOCAB)
    given = prompts((3, 15, 30), VOCAB)
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.9, seed=5, verification="match"),
        SamplingParams(max_tokens=20, temperature=0.9, top_p=0.8, seed=6, verification="match"),
    ]
    truth = list(map(tokens, run(Engine(engine_config(model)), given, params)))
    (draft / DRAFTED_TOKENS).write_text(json.dumps(list(range(0, VOCAB, 2))))
    engine = Engine(engine_config(model, draft, k=3))
    assert list(map(tokens, run(engine, given, params))) == truth
    assert sum(engine.stats().accepted_per_position) > 0


@pytest.mark.parametrize("content", ["[1, 1]", "[64]", "[-1]", "[]", '{"a": 1}', "[1.0]", "[", "7"])
def test_a_list_that_is_none_is_refused(model: Path, content: str) -> None:
    (model / DRAFTED_TOKENS).write_text(content)
    config = replace(engine_config(model, model), target=ModelConfig(path=str(model)))
    with pytest.raises(UnsupportedModelError, match=r"draft_tokens\.json must be .* ids, 0 to 63"):
        Engine(config)
