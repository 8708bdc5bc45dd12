"""The same parameters in transformers' generate, where both define the thing, token for token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from target_distribution import filtered
from tiny_models import DEVICE, VOCAB
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine

PROMPTS = prompts([3, 21, 9, 40], VOCAB, seed=4)
ALLOWED = tuple(range(0, VOCAB, 3))


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().to(DEVICE)


@pytest.fixture(scope="module")
def engines(target: Path, draft: Path) -> list[Engine]:
    configs = (engine_config(target, draft, k=4), engine_config(target, proposer="suffix", k=3))
    return [Engine(replace(config, eos_token_ids=(5,))) for config in configs]


def generate(
    model: PreTrainedModel, prompt: list[int], processors: list[LogitsProcessor], **options: object
) -> list[int]:
    given = torch.tensor([prompt], device=DEVICE)
    ids = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
        pad_token_id=0,
        **options,
    )
    return [int(token) for token in ids[0, len(prompt) :]]


def plain(model: PreTrainedModel) -> list[list[int]]:
    return [generate(model, prompt, [], eos_token_id=None) for prompt in PROMPTS]


# Parameters, and what transformers has for them; made for a prompt's length and the plain outputs.
Both = tuple[SamplingParams, list[LogitsProcessor]]
Case = Callable[[int, list[list[int]]], Both]


def repetition(length: int, outputs: list[list[int]]) -> Both:
    return replace(GREEDY, repetition_penalty=1.7), [RepetitionPenaltyLogitsProcessor(1.7)]


def rewarded_repetition(length: int, outputs: list[list[int]]) -> Both:
    return replace(GREEDY, repetition_penalty=0.6), [RepetitionPenaltyLogitsProcessor(0.6)]


def bias(length: int, outputs: list[list[int]]) -> Both:
    values = {outputs[0][0]: -6.0, outputs[1][3]: -4.0, 11: 1.5, 30: 2.5}
    given = [[[token], value] for token, value in values.items()]
    return replace(GREEDY, logit_bias=values), [SequenceBiasLogitsProcessor(given)]


def bad_words(length: int, outputs: list[list[int]]) -> Both:
    words = [output[i : i + n] for output in outputs for i, n in ((2, 2), (7, 3), (12, 1))]
    params = replace(GREEDY, bad_words=tuple(map(tuple, words)))
    return params, [NoBadWordsLogitsProcessor(words, eos_token_id=None)]


def allowed(length: int, outputs: list[list[int]]) -> Both:
    return replace(GREEDY, allowed_token_ids=ALLOWED), [
        PrefixConstrainedLogitsProcessor(lambda batch, ids: list(ALLOWED), num_beams=1)
    ]


def suppressed(length: int, outputs: list[list[int]]) -> Both:
    banned = sorted({token for output in outputs for token in output[:5]})
    params = replace(GREEDY, bad_words=tuple((token,) for token in banned))
    return params, [SuppressTokensLogitsProcessor(banned, device=DEVICE)]


def min_tokens(length: int, outputs: list[list[int]]) -> Both:
    stops = sorted({output[i] for output in outputs for i in (1, 6)})
    params = replace(GREEDY, min_tokens=9, stop_token_ids=tuple(stops), ignore_eos=True)
    ends = sorted({*stops, 5})  # ours holds eos back too, also where it does not end the output
    return params, [MinNewTokensLengthLogitsProcessor(length, 9, ends, device=str(DEVICE))]


def together(length: int, outputs: list[list[int]]) -> Both:
    stops = (outputs[0][2], outputs[3][4])
    params = replace(
        GREEDY,
        allowed_token_ids=tuple(range(1, VOCAB)),
        bad_words=tuple((token,) for token in outputs[2][:4]),
        min_tokens=6,
        stop_token_ids=stops,
        ignore_eos=True,
        logit_bias={17: 1.0},
        repetition_penalty=1.3,
    )
    # In our order.
    return params, [
        SuppressTokensLogitsProcessor([0], device=DEVICE),
        SuppressTokensLogitsProcessor(outputs[2][:4], device=DEVICE),
        MinNewTokensLengthLogitsProcessor(length, 6, [*stops, 5], device=str(DEVICE)),
        SequenceBiasLogitsProcessor([[[17], 1.0]]),
        RepetitionPenaltyLogitsProcessor(1.3),
    ]


CASES: list[Case] = [
    repetition, rewarded_repetition, bias, bad_words, allowed, suppressed, min_tokens, together,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_greedy_output_is_that_of_generate(
    engines: list[Engine], model: PreTrainedModel, case: Case
) -> None:
    unedited = plain(model)
    expected = []
    for prompt in PROMPTS:
        params, processors = case(len(prompt), unedited)
        stops = list(params.stop_token_ids) or None
        expected.append(generate(model, prompt, processors, eos_token_id=stops))
    assert expected != unedited
    params = replace(params, ignore_eos=True)
    for engine in engines:
        assert [tokens(o) for o in run(engine, PROMPTS, params)] == expected
    assert sum(engines[0].stats().accepted_per_position) > 0


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.7}, []),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.4, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
            [TopKLogitsWarper(12), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
        ),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "all"],
)
def test_the_filters_that_samples_are_held_to_are_those_of_transformers(
    params: dict[str, float], warpers: list[LogitsProcessor]
) -> None:
    logits = 3 * torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
    scores = TemperatureLogitsWarper(float(params.get("temperature", 1.0)))(None, logits)
    for warper in warpers:
        scores = warper(None, scores)
    ours = [filtered(row, SamplingParams(max_tokens=1, **params)) for row in logits]  # type: ignore[arg-type]
    torch.testing.assert_close(torch.stack(ours).float(), scores.softmax(-1))
