"""Checks that a pair gives bit-identical answers, for every k and in every batch.

Greedy and seeded `match` requests promise this if the target's rounding does not depend on the
batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.processes.client import EngineClient

from .measure import PLAIN

TOGETHER = "all together"
_NOT_PROMISED = (
    "Nothing promises it here: this target's rounding depends on the batch. With "
    "engine.batch_invariant = true the target is loaded so that it does not, or refused with the "
    "reason."
)
_BROKEN = "This target promises that there is none: please report it."
# (token id, its logprob) of each token
AnswerTokens = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that differs from plain decoding of this request alone."""

    category: str
    number: int  # of the prompt, from 1
    temperature: float
    way: str  # how the answer was requested
    position: int  # in the answer, from 0
    expected: tuple[int, float] | None  # None: the answer should have ended
    got: tuple[int, float] | None

    @property
    def is_of_tokens(self) -> bool:
        """Whether the tokens differ, and not only their logprobs."""
        if self.expected is None or self.got is None:
            return True
        return self.expected[0] != self.got[0]


@dataclass(frozen=True, slots=True)
class Exactness:
    """The result of a check."""

    num_answers: int
    differences: list[Difference]  # at most one for each answer
    is_promised: bool  # that there are none


async def check(
    engine: EngineClient,
    prompts: dict[str, list[list[int]]],
    temperatures: list[float],
    ks: list[int | None],
    max_tokens: int,
    report: Callable[[int, int], None],
) -> Exactness:
    """Every prompt by plain decoding alone, then with every k (None: the engine's own choice),
    then all of them at once; `prompts` are token ids by category. The engine must have started.

    Raises ValueError if the engine gives up on a prompt, and what EngineClient.generate raises.
    """
    assert engine.info is not None
    info, ks = engine.info, [k for k in ks if k != PLAIN]
    answers = partial(_answers, engine, info.max_num_seqs)
    asked = [
        (category, number, ids)
        for category, of_category in prompts.items()
        for number, ids in enumerate(of_category, 1)
    ]
    done, total = 0, len(temperatures) * len(asked) * (len(ks) + 2)
    differences = []
    common = SamplingParams(max_tokens=max_tokens, logprobs=0, verification="match")
    for temperature in temperatures:
        params = partial(replace, common, temperature=temperature)
        truth = []
        for category, number, ids in asked:
            plain = params(seed=number, num_speculative_tokens=0)
            truth += await answers([ids], [plain])
            for k in ks:
                (got,) = await answers([ids], [replace(plain, num_speculative_tokens=k)])
                way = "own k" if k is None else f"k = {k}"
                where = (category, number, temperature, way)
                differences += _difference(where, truth[-1], got)
            done += 1 + len(ks)
            report(done, total)
        together = await answers(
            [ids for _, _, ids in asked], [params(seed=number) for _, number, _ in asked]
        )
        for (category, number, _), expected, got in zip(asked, truth, together, strict=True):
            where = (category, number, temperature, TOGETHER)
            differences += _difference(where, expected, got)
        done += len(asked)
        report(done, total)
    num_compared = total - len(temperatures) * len(asked)
    return Exactness(num_compared, differences, info.batch_invariant)


async def _answers(
    engine: EngineClient, at_once: int, prompts: list[list[int]], params: list[SamplingParams]
) -> list[AnswerTokens]:
    """The answers to requests that are submitted together, so many at a time."""
    answers: list[AnswerTokens] = [[] for _ in prompts]
    requests = [
        NewRequest(request_id=str(i), prompt_token_ids=prompt, params=own)
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]
    for first in range(0, len(requests), at_once):
        async for output in await engine.generate(requests[first : first + at_once]):
            if output.error is not None:
                raise ValueError(f"the engine gave up on a prompt: {output.error}")
            logprobs = [entry.logprob for entry in output.logprobs or ()]
            answers[int(output.request_id)] += zip(output.token_ids, logprobs, strict=True)
    return answers


def _difference(
    where: tuple[str, int, float, str], expected: AnswerTokens, got: AnswerTokens
) -> list[Difference]:
    """The first difference, if there is any."""
    if expected == got:
        return []
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    i = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
    first, other = (answer[i] if i < len(answer) else None for answer in (expected, got))
    return [Difference(*where, i, first, other)]


def describe(exactness: Exactness, text_of: Callable[[int], str]) -> str:
    """The result in words: everything is equal, or the first difference."""
    num_answers, differences = exactness.num_answers, exactness.differences
    if not differences:
        return (
            f"Exact: {num_answers} answers equal those of plain decoding, alone, to the bit: "
            "tokens and logprobs, with every k, and all together."
            + ("" if exactness.is_promised else f" {_NOT_PROMISED}")
        )
    first = min(differences, key=lambda each: not each.is_of_tokens)
    num_texts = sum(each.is_of_tokens for each in differences)

    def token(given: tuple[int, float] | None) -> str:
        if given is None:
            return "the end of the answer"
        return f"token {given[0]} ({text_of(given[0])!r}) with logprob {given[1]!r}"

    return (
        f"Not exact: {num_texts} of {num_answers} answers differ in tokens from plain decoding, "
        f"alone, and {len(differences) - num_texts} more in logprobs only. The first, "
        f"{first.category} prompt {first.number} at temperature {first.temperature:g}, "
        f"{first.way}, token {first.position + 1} of the answer: "
        f"plain decoding gives {token(first.expected)}, this {token(first.got)}. "
        + (_BROKEN if exactness.is_promised else _NOT_PROMISED)
    )
