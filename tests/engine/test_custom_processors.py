"""Custom logits processors: exact under speculation, and no danger to anyone else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, engine_config, generate, prompts, run, tokens
from tiny_models import DEVICE, VOCAB
from transformers import AutoModelForCausalLM

from outrider.engine.api import InvalidRequestError, NewRequest, ProcessorChoice, SamplingParams
from outrider.engine.config import ConfigError
from outrider.engine.engine import Engine

PROMPTS = prompts([3, 21, 9], VOCAB, seed=4)
SPECS = (
    "no_repeat_ngram = transformers:NoRepeatNGramLogitsProcessor",
    "parity = logits_processors:FavourParity",
    "unban = logits_processors:Unban",
    "fail_on = logits_processors:FailOn",
    "wrong_shape = logits_processors:WrongShape",
    "as_array = logits_processors:AsArray",
    "round_down = logits_processors:RoundDown",
)


def engine_with_processors(target: Path, draft: Path | None = None, **settings: int) -> Engine:
    return Engine(replace(engine_config(target, draft, **settings), logits_processors=SPECS))


def choosing(name: str, **args: object) -> SamplingParams:
    return replace(GREEDY, logits_processors=(ProcessorChoice(name, args),))


@pytest.mark.parametrize("k", [0, 4])
def test_a_processor_of_transformers_works_as_it_is(target: Path, draft: Path, k: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().to(DEVICE)
    truth = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        output = model.generate(ids, max_new_tokens=24, do_sample=False, no_repeat_ngram_size=2)
        truth.append(output[0, len(prompt) :].tolist())
    assert truth != [generate(target, prompt, 24) for prompt in PROMPTS]
    engine = engine_with_processors(target, draft, k=k)
    params = choosing("no_repeat_ngram", ngram_size=2)
    assert [tokens(o) for o in run(engine, PROMPTS, params)] == truth
    assert k == 0 or sum(engine.stats().accepted_per_position) > 0


def test_each_row_has_its_own_prefix(target: Path, draft: Path) -> None:
    params = choosing("parity", bias=50.0)
    plain = run(engine_with_processors(target, k=0), PROMPTS, params)
    engine = engine_with_processors(target, draft)
    for prompt, expected, found in zip(PROMPTS, plain, run(engine, PROMPTS, params), strict=True):
        assert tokens(found) == tokens(expected)
        at = enumerate(tokens(found), start=len(prompt))
        assert all(token_id % 2 == position % 2 for position, token_id in at)
    assert sum(engine.stats().accepted_per_position) > 0


def test_a_processor_lifts_no_ban(target: Path, draft: Path) -> None:
    params = replace(choosing("unban"), allowed_token_ids=(1, 2, 3, 50))
    for output in run(engine_with_processors(target, draft), PROMPTS, params):
        assert set(tokens(output)) <= {1, 2, 3, 50}


def test_a_processor_is_not_called_once_its_request_has_ended(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the step after the last one is on its way already."""
    truth = generate(target, PROMPTS[0], 24)
    last = truth[5]
    assert last not in PROMPTS[0]
    engine = engine_with_processors(target)
    engine.scheduler.lag = 1
    params = replace(choosing("fail_on", token_id=last), stop_token_ids=(last,))
    [outputs] = run(engine, PROMPTS[:1], params)
    assert tokens(outputs) == truth[: truth.index(last) + 1]
    assert outputs[-1].finish_reason == "stop"
    assert "fail_on failed" not in caplog.text


def test_a_processor_that_fails_ends_its_own_request_only(target: Path, draft: Path) -> None:
    truth = [generate(target, prompt, 24) for prompt in PROMPTS]
    met = truth[0][5]
    num_before = truth[0].index(met) + 1
    assert met not in PROMPTS[0]
    names = ("wrong_shape", "as_array", "round_down")
    each = [choosing("fail_on", token_id=met), GREEDY, *map(choosing, names)]
    engine = engine_with_processors(target, draft)
    failed, beside, misshapen, array, rounded = run(engine, [*PROMPTS, *PROMPTS[:2]], each)
    assert tokens(failed) == truth[0][:num_before]
    assert failed[-1].finish_reason == "error"
    assert failed[-1].error == f"logits processor 'fail_on' failed: met {met}"
    assert tokens(beside) == truth[1]
    assert "it returned scores of shape [1, 96] for" in (misshapen[-1].error or "")
    what = f"it returned ndarray; a torch tensor of shape [1, {VOCAB}] is expected"
    assert array[-1].error == f"logits processor 'as_array' failed: {what}"
    assert rounded[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (ProcessorChoice("unheard_of"), "'unheard_of' is not registered"),
        (ProcessorChoice("os:system"), "'os:system' is not registered"),
        (ProcessorChoice("parity", {"colour": 1}), "unexpected keyword argument 'colour'"),
        (ProcessorChoice("no_repeat_ngram", {"ngram_size": -1}), "strictly positive"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(
    target: Path, choice: ProcessorChoice, message: str
) -> None:
    engine = engine_with_processors(target)
    params = replace(GREEDY, logits_processors=(choice,))
    with pytest.raises(InvalidRequestError, match=f"^logits_processors: .*{message}"):
        engine.submit([NewRequest(request_id="0", prompt_token_ids=[1], params=params)])
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("unheard_of", "'unheard_of' is no entry point of outrider"),
        ("x = no_such_module:X", "'x = .*' cannot be loaded: No module named 'no_such_module'"),
        ("x = logits_processors:NoSuch", "cannot be loaded: module .* has no attribute 'NoSuch'"),
        ("x = no module", "cannot be loaded: .*; write `name = module:attribute`"),
    ],
)
def test_an_engine_that_lacks_a_registered_processor_does_not_start(
    target: Path, spec: str, message: str
) -> None:
    config = replace(engine_config(target), logits_processors=(spec,))
    with pytest.raises(ConfigError, match=f"^engine.logits_processors: .*{message}"):
        Engine(config)


def test_installed_entry_points_go_by_their_names(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "rules-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: rules\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[outrider.logits_processors]\nparity = logits_processors:FavourParity\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = Engine(replace(engine_config(target), logits_processors=("parity",)))
    output = tokens(run(engine, PROMPTS[:1], choosing("parity", bias=50.0))[0])
    assert [token_id % 2 for token_id in output[:4]] == [1, 0, 1, 0]
