"""How much the host does in a step, in calls: beside a small model it is what a step takes."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from engines import engine_config, lagging
from tiny_models import Quick

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.engine import Engine

_PARTS = ("scheduling", "memory", "scoring", "proposers", "plan.py", "request.py")


def calls_of_a_step(engine: Engine) -> Counter[str]:
    """Calls of functions in the host's parts of a step, by name."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename).parts
        if event == "call" and "engine" in path and {*_PARTS}.intersection(path):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return calls


def test_a_plain_step_takes_few_calls_for_each_sequence(quick_model: Quick) -> None:
    path = quick_model(0)
    sources = ("prediction", "suffix", "draft_model")
    engine = lagging(engine_config(path, path, proposer=sources, page_size=64, max_num_seqs=16))
    params = SamplingParams(max_tokens=60, temperature=0.0, num_speculative_tokens=0)
    counts: list[Counter[str]] = []
    for num_seqs in (4, 12):
        ids = range(len(engine.sequences.by_id), num_seqs)
        prompts = [[i % 4, 2, 3] for i in ids]
        engine.submit(
            [
                NewRequest(request_id=str(i), prompt_token_ids=prompt, params=params)
                for i, prompt in zip(ids, prompts, strict=True)
            ]
        )
        for _ in range(4):
            engine.step()
        counts.append(calls_of_a_step(engine))
    few, many = counts
    of_each = {name: (many[name] - few[name]) / 8 for name in many}
    assert of_each["Committer._commit_drawn"] == 1
    assert sum(of_each.values()) <= 27, of_each
