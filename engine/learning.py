"""Learns what drafts cost, on dummy sequences, before the first requests come."""

import time

from .api import NewRequest, ReportProgress, SamplingParams, ignore_progress
from .engine import Engine
from .scheduling.adaptive_speculation import batch_sizes

LEARNING_S = 3.0  # of every start on a GPU, at most


def learn_costs(engine: Engine, report: ReportProgress = ignore_progress) -> None:
    """Decode dummy sequences with every k in turn, for at most LEARNING_S.

    No sequence may be there. Whatever the prefix cache and the statistics hold is forgotten.
    """
    k = engine.worker.slots.max_drawn
    if engine.sequences.adaptive is None or k == 0:
        return
    engine.start_over(first_ks=range(k + 1))
    start_s = time.perf_counter()
    sizes = batch_sizes(engine.info.max_num_seqs)
    params = SamplingParams(max_tokens=engine.info.max_model_len - 1, ignore_eos=True)
    for done, num_seqs in enumerate(sizes):
        report("measuring what drafts cost", done, len(sizes))
        names = [str(i) for i in range(num_seqs)]
        engine.submit(
            [NewRequest(request_id=name, prompt_token_ids=[0], params=params) for name in names]
        )
        while engine.has_work() and time.perf_counter() < start_s + LEARNING_S:
            if engine.sequences.adaptive.knows(num_seqs):
                break
            engine.step()
        engine.abort(names)
    engine.start_over(known=engine.sequences.adaptive)
    engine.count_warm_up(time.perf_counter() - start_s)
