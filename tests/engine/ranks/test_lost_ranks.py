"""What happens when a rank dies, hangs or cannot start."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run
from forked_ranks import forked
from tiny_models import DEVICE, VOCAB, Tiny
from two_ranks import follower_of, shared, with_shared_draft

from outrider.engine.config import ConfigError, EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models import pair
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.shares import WHOLE, Share
from outrider.engine.ranks import followers, own_shares
from outrider.engine.ranks.followers import RankLostError
from outrider.engine.ranks.group import RankGroup
from outrider.engine.ranks.wire import Op

PROMPTS = prompts([3, 17, 9, 40], VOCAB)


@pytest.mark.skipif(
    DEVICE.type == "cuda",
    reason="a GPU waits for the lost rank for ever, so that this process would end",
)
def test_a_follower_that_dies_or_hangs_ends_the_step(
    tiny_model: Tiny,
    draft: Path,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followers, "HUNG_AFTER_S", 1.5)
    for number, reason in (
        (signal.SIGKILL, r"rank 1 of the target: killed by signal 9"),
        (signal.SIGSTOP, r"rank 1 of the target: it has not been heard for 1\.5 s"),
    ):
        engine = start(with_shared_draft(engine_config(tiny_model(), draft)))
        assert run(engine, PROMPTS[:1], GREEDY)
        os.kill(follower_of(engine), number)
        with pytest.raises(RankLostError, match=reason):
            run(engine, PROMPTS, GREEDY)
        engine.worker.close()


@pytest.mark.skipif(
    DEVICE.type == "cuda",
    reason="a GPU waits for the lost rank for ever, so that this process would end",
)
def test_a_rank_lost_before_a_copy_to_host_memory_is_no_failure_of_that_memory(
    tiny_model: Tiny, start: Callable[[EngineConfig], Engine], caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(tiny_model(), num_pages=24, proposer="none")
    engine = start(replace(config, cache=replace(config.cache, host_gib=1e-3)))
    first, second = prompts([60, 61], VOCAB)
    run(engine, [first], GREEDY)
    assert engine.stats().host_pages_used == 0  # the second prompt evicts the first
    os.kill(follower_of(engine), signal.SIGKILL)
    assert engine.worker.followers is not None
    assert engine.worker.followers._lost.happened.wait(30)
    with pytest.raises(RankLostError, match="rank 1 of the target: killed by signal 9"):
        run(engine, [second], GREEDY)
    assert [text for text in caplog.messages if "host memory" in text] == []
    engine.worker.close()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what is captured cannot fail in this way")
def test_a_shared_draft_that_fails_ends_the_engine(
    tiny_model: Tiny,
    draft: Path,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ranks are left in its pass: what the first exchanged next would be taken for it."""
    engine = start(with_shared_draft(engine_config(tiny_model(), draft)))
    monkeypatch.setattr(followers, "_NEWS_S", 0.0)
    monkeypatch.setattr(engine.worker.pair.draft, "embedded", Mock(side_effect=MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        run(engine, PROMPTS, GREEDY)


def first_frame_of(follower: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is heard of a process that runs this code, with the socket `s`; None: its loss."""
    code = f"import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); {follower}"
    monkeypatch.setattr(followers, "_COMMAND", (sys.executable, "-c", code))
    meeting_fd, lost, inbox = os.memfd_create("meeting"), followers._Loss(), SimpleQueue[Any]()
    config = EngineConfig(target=ModelConfig(path=""))
    one = followers._Follower(1, config, meeting_fd, lost, inbox)
    answer = inbox.get(timeout=30)
    followers._end([one], lost, RankGroup(0, 2))
    os.close(meeting_fd)
    return answer, lost.reason


def test_a_follower_may_start_slowly_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first word it imports torch, from a cold disk perhaps."""
    monkeypatch.setattr(followers, "HUNG_AFTER_S", 0.2)
    words = [(int(op).to_bytes(8, "little") + bytes(16)) for op in (Op.ALIVE, Op.ANSWER)]
    speaks = f"time.sleep(0.5); s.sendall({words[0]!r} + {words[1]!r}); time.sleep(60)"
    answer, reason = first_frame_of(speaks, monkeypatch)
    assert answer is not None
    assert reason is None
    monkeypatch.setattr(followers, "FIRST_WORD_S", 0.1)
    answer, reason = first_frame_of("time.sleep(60)", monkeypatch)
    assert answer is None
    assert reason == "rank 1 of the target: it has not been heard for 0.1 s"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="forks this process")
def test_a_follower_that_dies_where_ranks_meet_ends_the_engine(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first would wait for it for half an hour."""
    path = tiny_model()

    def die(group: RankGroup, *_: Any) -> None:
        os._exit(9)

    def start() -> None:
        monkeypatch.setattr(followers, "_GRACE_S", 0.2)
        join = RankGroup.join
        monkeypatch.setattr(
            RankGroup, "join", lambda group, *args: (die if group.rank else join)(group, *args)
        )
        with forked():
            Engine(shared(engine_config(path)))

    assert exit_code_of(start) == 1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="forks this process")
def test_a_process_goes_on_while_its_group_takes_long_to_end(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model()

    def start_and_close() -> None:
        monkeypatch.setattr(followers, "_GRACE_S", 0.1)
        with forked():
            engine = Engine(shared(engine_config(path)))
        leave = RankGroup.leave
        monkeypatch.setattr(RankGroup, "leave", lambda group: (time.sleep(1), leave(group)))
        engine.worker.close()

    assert exit_code_of(start_and_close) == 0


def exit_code_of(run_it: Callable[[], None]) -> int | None:
    """Of a process forked from this one; None if it hangs."""
    pid = os.fork()
    if pid == 0:
        try:
            run_it()
            os._exit(0)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="its ranks are forked from what is changed here")
def test_a_follower_that_cannot_load_says_why_once(
    tiny_model: Tiny,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    load = pair.load_network

    def refused(*args: Any, share: Share = WHOLE, **options: Any) -> Any:
        if share.rank == 1:
            raise UnsupportedModelError("its share is damaged")
        return load(*args, share=share, **options)

    monkeypatch.setattr(pair, "load_network", refused)
    with pytest.raises(ConfigError, match=r"^rank 1 of the target: its share is damaged$"):
        start(engine_config(tiny_model()))
    assert "damaged" not in "".join(capfd.readouterr())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="its ranks are forked from what is changed here")
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("bind", torch.OutOfMemoryError("Tried to allocate 20.00 MiB")),
        ("allocate_host", RuntimeError("CUDA error: out of memory\nand much more")),
    ],
)
def test_a_follower_without_room_for_pages_keeps_the_engine_from_starting(
    what: str,
    error: Exception,
    tiny_model: Tiny,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would say that it is ready, and die at the first request."""
    monkeypatch.setattr(own_shares.OwnShares, what, Mock(side_effect=error))
    config = engine_config(tiny_model(), num_pages=24)
    config = replace(config, cache=replace(config.cache, host_gib=1e-3))
    reason = "^rank 1 of the target: the models do not fit .*nvidia-smi.*(MiB|out of memory)$"
    with pytest.raises(ConfigError, match=reason):
        start(config)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="its ranks are forked from what is changed here")
def test_a_follower_that_cannot_load_is_not_waited_for_behind_another(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them may load for minutes."""
    waiting_fd, is_waiting_fd = os.pipe()

    def load(config: EngineConfig, *, rank: int) -> Any:
        if rank == 2:
            os.read(waiting_fd, 1)
            raise UnsupportedModelError("its share is damaged")
        Event().wait()

    def report(stage: str, *_: int) -> None:
        if stage == "waiting for the other ranks":
            os.write(is_waiting_fd, b".")

    monkeypatch.setattr(own_shares, "load_shares", load)
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 96}
    config = shared(engine_config(tiny_model(hidden_size=48, **sizes)), 3)
    with forked(), pytest.raises(ConfigError, match=r"^rank 2 of the target: its share is dam"):
        Engine(config, report)
    os.close(waiting_fd)
    os.close(is_waiting_fd)
