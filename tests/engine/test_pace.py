"""The next step is planned as late as the device allows."""

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from engines import GREEDY, engine_config, lagging
from in_process import QueueChannel
from tiny_models import Quick

from outrider.engine.api import NewRequest
from outrider.engine.pace import Pace
from outrider.engine.plan import Plan
from outrider.engine.processes.messages import Abort


def plan(num_seqs: int, num_drafts: int = 0, num_new_tokens: int = 1) -> Any:
    share = SimpleNamespace(num_new_tokens=num_new_tokens, num_made=num_drafts)
    return SimpleNamespace(scheduled=[share] * num_seqs)


def test_a_step_waits_until_it_must_be_launched() -> None:
    pace = Pace()
    for step_s in (0.010, 0.011, 0.012, 0.010, 0.013, 0.010, 0.012, 0.011):
        assert pace.spare_s(plan(4, 3), 0.0) == 0.0  # too little is known yet
        pace.observe(plan(4, 3), step_s, launch_s=0.001)
    # Of the shortest: launching takes 1 ms, and half a millisecond is for safety.
    assert pace.spare_s(plan(4, 3), 0.0) == pytest.approx(0.0085)
    assert pace.spare_s(plan(4, 3), 0.005) == pytest.approx(0.0035)
    assert pace.spare_s(plan(4, 3), 0.02) == 0.0


def test_planning_a_step_is_a_part_of_launching_it(quick_model: Quick) -> None:
    path = quick_model(0)
    engine = lagging(engine_config(path, path))
    engine.submit([NewRequest(request_id="0", prompt_token_ids=[1], params=GREEDY)])
    schedule = engine.scheduler.schedule

    def slow() -> Plan:
        time.sleep(0.05)
        return schedule()

    engine.scheduler.schedule = slow  # type: ignore[method-assign]
    engine.step()
    assert engine._in_flight is not None
    assert engine._in_flight.launch_s > 0.05


def test_steps_of_another_kind_teach_nothing() -> None:
    pace = Pace()
    for _ in range(8):
        pace.observe(plan(4, num_new_tokens=500), 0.1, launch_s=0.001)
    assert pace.spare_s(plan(4, num_new_tokens=500), 0.0) > 0.09
    assert pace.spare_s(plan(4), 0.0) == 0.0
    assert pace.spare_s(plan(4, 3), 0.0) == 0.0


def test_who_comes_meanwhile_is_heard() -> None:
    channel = QueueChannel(lambda message: None)
    channel.inbox.put(Abort(["a"]))
    late = threading.Timer(0.05, channel.inbox.put, [Abort(["b"])])
    late.start()
    start_s = time.perf_counter()
    assert [message for _, message in channel.receive(0.5)] == [Abort(["a"]), Abort(["b"])]
    assert time.perf_counter() - start_s > 0.45
    assert channel.receive(0.0) == []
    with pytest.raises(queue.Empty):
        channel.inbox.get_nowait()
