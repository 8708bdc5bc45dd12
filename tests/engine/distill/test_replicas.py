"""Replicas in processes of their own: what they say, and that none waits for one that failed."""

import signal
from pathlib import Path

import pytest
from replicas_for_tests import one_fails, save_in_the_end, talk
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from outrider.distill.replicas import run_replicas
from outrider.engine.api import ignore_progress

pytestmark = pytest.mark.slow  # processes that load torch


def test_the_first_replica_reports_and_has_the_result() -> None:
    reported: list[tuple[str, int, int]] = []
    result = run_replicas(talk, 2, ("it trains",), lambda *progress: reported.append(progress))
    assert result == "a draft"
    assert reported == [("it trains", 0, 3), ("it trains", 1, 3), ("it trains", 2, 3)]


def test_a_replica_that_fails_ends_all_and_is_reported() -> None:
    with pytest.raises(ProcessRaisedException, match="out of luck"):
        run_replicas(one_fails, 2, ("raises",), ignore_progress)


@pytest.mark.deep  # as a run without any does in test_run.py
def test_the_first_replica_saves_its_work_when_the_run_is_interrupted(tmp_path: Path) -> None:
    def interrupt(*progress: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_replicas(save_in_the_end, 2, (tmp_path / "checkpoint",), interrupt)
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.sweep  # torch sees its end as that of one that fails
def test_a_replica_that_is_gone_ends_all() -> None:
    with pytest.raises(ProcessExitedException, match="exit code 3"):
        run_replicas(one_fails, 2, ("exits",), ignore_progress)
