"""How ranks part, and what is said if a GPU or a follower fails: with stand-ins for both."""

import gc
import logging
import weakref
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from outrider.engine.api import ignore_progress
from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.ranks import followers
from outrider.engine.ranks import group as group_module
from outrider.engine.ranks.followers import Followers, RankLostError
from outrider.engine.ranks.group import RankGroup
from outrider.engine.ranks.wire import Op


class Peers:
    """In place of memory that GPUs share."""


def joined_on_gpus(monkeypatch: pytest.MonkeyPatch, calls: Mock) -> RankGroup:
    """The first of two ranks; what it calls of CUDA and NCCL is noted."""
    monkeypatch.setattr(torch.cuda, "synchronize", calls.synchronize)
    monkeypatch.setattr(group_module, "_abort", calls.abort)
    group = RankGroup(0, 2)
    group._has_joined = group._on_gpu = True
    group.is_apart = False
    return group


@pytest.mark.parametrize("lost", ["", "rank 1 of the target: killed by signal 9"])
def test_a_rank_waits_for_its_gpu_before_anything_is_freed(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may wait for a lost rank for ever. Here a thread can end the process meanwhile; where
    memory of peers is freed it could not.
    """
    calls, loss = Mock(), followers._Loss()
    group = joined_on_gpus(monkeypatch, calls)
    group._peers = Mock()
    calls.synchronize.side_effect = lambda: calls.waited(group._peers is not None)
    if lost:
        loss.note(lost)
    followers._end([calls.follower], loss, group)
    assert [name for name, *_ in calls.mock_calls] == [
        "synchronize",
        "waited",
        "follower.process.kill",
        "follower.process.wait",
        "follower.connection.close",
        "abort",
    ]
    calls.waited.assert_called_once_with(True)
    assert group._peers is None
    assert loss._is_over.is_set()


@pytest.mark.parametrize("works", [True, False])
def test_memory_of_peers_is_not_freed_once_the_gpu_has_failed(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free it would abort the process, and nobody would read why."""
    calls = Mock()
    peers: Any = Peers()
    group = joined_on_gpus(monkeypatch, calls)
    if not works:
        calls.synchronize.side_effect = RuntimeError("an illegal memory access")
    found = weakref.ref(peers)
    group._peers = peers
    del peers
    group.finish()
    group.leave()
    gc.collect()
    assert (found() is None) == works


def test_an_error_while_ranks_part_does_not_hide_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group, loss = Mock(), followers._Loss()
    group.leave.side_effect = RuntimeError("NCCL has failed")
    with caplog.at_level(logging.ERROR):
        followers._end([], loss, group)
    assert "NCCL has failed" in caplog.text
    assert loss._is_over.is_set()


def test_a_process_that_waits_for_a_lost_rank_says_why_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own loop cannot, so the server would only see an exit code."""
    left, loss = Mock(), followers._Loss()
    monkeypatch.setattr(followers, "leave_at_once", left)
    monkeypatch.setattr(followers, "_GRACE_S", 0.0)
    loss.is_final = True
    loss.note("rank 1 of the target: killed by signal 9")
    loss.wait_for_the_end()
    left.assert_called_once_with("rank 1 of the target: killed by signal 9")


def starting(monkeypatch: pytest.MonkeyPatch) -> Followers:
    """Of a rank whose others have loaded their shares, and are about to be asked to join."""
    monkeypatch.setattr(followers, "_Follower", Mock())
    ranks = Followers(EngineConfig(target=ModelConfig(path="", tensor_parallel=2)))
    monkeypatch.setattr(ranks, "_answers", lambda: [np.ones(1)])
    monkeypatch.setattr(ranks, "group", Mock())
    return ranks


def test_a_follower_that_dies_before_ranks_meet_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ends this process when one is lost has looked already, and left it to go on."""
    ranks = starting(monkeypatch)
    ranks._lost.note("rank 1 of the target: killed by signal 9")
    with pytest.raises(RankLostError, match="killed by signal 9"):
        ranks.shared([Mock()], ignore_progress)
    ranks.group.join.assert_not_called()  # type: ignore[attr-defined]


def test_a_follower_that_dies_when_ranks_meet_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, seen = starting(monkeypatch), []
    monkeypatch.setattr(ranks, "send", lambda op, *_: seen.append((op, ranks._lost.is_final)))
    monkeypatch.setattr(ranks, "_shared", Mock())
    ranks.shared([Mock()], ignore_progress)
    assert seen == [(Op.JOIN, True)]


def test_a_gpu_that_fails_on_memory_of_peers_can_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that it does later fails as well, so the ranks cannot go on over NCCL."""
    group = RankGroup(0, 2)
    failed = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(group, "gather", Mock(side_effect=failed))
    with pytest.raises(RuntimeError, match=r"illegal memory access.*NCCL_P2P_DISABLE=1"):
        group._why_not(Mock(side_effect=failed), torch.device("cpu"))
