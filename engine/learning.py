"""Learns what steps cost, on dummy sequences, before the first requests come."""

import random
import time
from collections.abc import Iterator

from .api import NewRequest, ReportProgress, SamplingParams, ignore_progress
from .engine import Engine
from .state.phase import padded_sizes

LEARNING_S = 3.0  # of every start on a GPU, at most
_MOST_STEPS = 8  # of one size and k: more than it takes to know them


def learn_costs(engine: Engine, report: ReportProgress = ignore_progress) -> None:
    """Decode dummy sequences in batches of all sizes with every k, for at most LEARNING_S.

    No sequence may be there. Whatever the prefix cache and the statistics hold is forgotten.
    """
    if engine.sequences.adaptive is None:
        return
    engine.start_over(is_learning=True)
    adaptive = engine.sequences.adaptive
    start_s = time.perf_counter()
    end_s = start_s + LEARNING_S
    batches = list(_batches(engine.info.max_num_seqs, engine.worker.slots.max_drawn))
    for done, (num_seqs, k) in enumerate(batches):
        if time.perf_counter() > end_s:
            break
        report("measuring what steps cost", done, len(batches))
        dummies = _dummies(engine, num_seqs, k)
        engine.submit(dummies)
        num_steps = 0
        while engine.has_work() and not adaptive.price.knows(num_seqs, num_seqs * (k + 1)):
            if num_steps == _MOST_STEPS or time.perf_counter() > end_s:
                break
            engine.step()
            num_steps += 1
        engine.abort([dummy.request_id for dummy in dummies])
    engine.start_over(price=adaptive.price)
    engine.count_warm_up(time.perf_counter() - start_s)


def _batches(most: int, max_k: int) -> Iterator[tuple[int, int]]:
    """(sequences, k), in an order in which each is compared with what came before."""
    few_first = list(dict.fromkeys((0, max_k, 1, *range(max_k))))
    for k in few_first[: max_k + 1]:
        for num_seqs in padded_sizes(most):
            yield num_seqs, k


def _dummies(engine: Engine, num_seqs: int, k: int) -> list[NewRequest]:
    """Their tokens differ, as others' do: experts that nobody wakes cost nothing."""
    vocab_size, rng = engine.info.vocab_size, random.Random(0)
    return [
        NewRequest(
            request_id=str(i),
            prompt_token_ids=[rng.randrange(vocab_size)],
            params=SamplingParams(
                max_tokens=engine.info.max_model_len - 1,
                ignore_eos=True,
                num_speculative_tokens=k,
                seed=i,
            ),
            sources=("draft_model",) if k else (),
        )
        for i in range(num_seqs)
    ]
