"""Rank 0's end: starts the other ranks, has them follow, and ends with them."""

import contextlib
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..api import ReportProgress
from ..config import ConfigError, EngineConfig
from ..lifeline import describe_exit, leave_at_once
from ..memory.host_tier import PageCopies
from ..models.batch_invariance import make_batch_dependent
from ..models.decoder import Decoder
from ..models.network import Network
from ..state.phase import Shape
from ..state.ragged import NONE_NP
from ..state.slots import Slots
from .group import RankGroup, path_of
from .shared_decoder import SharedDecoder
from .shared_host_pages import SharedHostPages
from .wire import Op, receive, send

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-P", "-m", "outrider.engine.ranks.follower")
HUNG_AFTER_S = 20.0  # after so long without a word a follower counts as hung
FIRST_WORD_S = 300.0  # the same before the first: it imports torch, perhaps from a cold disk
_GRACE_S = 3.0  # for the engine to end by itself once it has lost a follower
_NEWS_S = 1.0  # for the news of a lost follower to come, once an exchange with it has failed

# What followers answer; None: one is lost, so that no more will come of it.
Inbox = queue.SimpleQueue[np.ndarray | None]


# No ValueError or RuntimeError, which where it is raised may mean that a file is damaged or a GPU
# full.
class RankLostError(Exception):
    """A follower could not start, has died or hangs; the message says which, and why."""


@contextlib.contextmanager
def lost_ranks_end_the_start() -> Iterator[None]:
    """Raises ConfigError in place of RankLostError: at start, it is for who chose the settings."""
    try:
        yield
    except RankLostError as error:
        raise ConfigError(str(error)) from None


class Followers:
    """The processes of ranks 1 to N - 1. They end with this one, however it ends.

    Once one of them is lost, every call raises. If nothing calls, or a call waits for the lost one
    for ever, this process ends: whoever watches it starts all ranks again.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start them; they load their shares meanwhile."""
        size = config.target.tensor_parallel
        self.group = RankGroup(0, size)
        # The file over which the ranks meet. It has no name, so that it goes with the last of them,
        # however they end. Never closed here: the number must not become another file's.
        self._meeting_fd = os.memfd_create("outrider-ranks")
        self._lost = _Loss()
        self._inbox: Inbox = queue.SimpleQueue()
        self._followers = [
            _Follower(rank, config, self._meeting_fd, self._lost, self._inbox)
            for rank in range(1, size)
        ]
        # For an engine that is dropped in a process which goes on, too.
        self._end = weakref.finalize(self, _end, self._followers, self._lost, self.group)

    def shared(self, networks: Sequence[Network], report: ReportProgress) -> list[SharedDecoder]:
        """The target, and perhaps the draft, of which rank 0 has loaded its shares, once the others
        have theirs.

        Raises RankLostError if one of them could not start.
        """
        report("waiting for the other ranks", 0, 1)
        keep_bits = all([networks[0].batch_invariant, *map(bool, self._answers())])
        report("connecting the ranks", 0, 1)
        # From here on this process may wait for a lost one for ever, first where they meet.
        self._lost.is_final = True
        if self._lost.reason is not None:  # before that: nothing would end this process
            raise RankLostError(self._lost.reason)
        self.send(Op.JOIN, (), np.array([keep_bits]))
        try:
            self.group.join(path_of(self._meeting_fd), networks[0].device)
        except RuntimeError as error:
            raise self.cause_of(error) from error
        if not keep_bits:
            make_batch_dependent(networks[0])
        return [self._shared(number, network) for number, network in enumerate(networks)]

    def _shared(self, number: int, network: Network) -> SharedDecoder:
        def send_with_number(op: Op, shape: Shape, integers_np: np.ndarray) -> None:
            self.send(op, (number, *shape), integers_np)

        assert isinstance(network, Decoder)
        return SharedDecoder(network, self.group, send_with_number, self.cause_of)

    def bind(self, slots: Slots, num_pages: Sequence[int]) -> None:
        """Have them allocate the same slots, and as many pages of each group of layers.

        Raises RankLostError if one of them has no room.
        """
        numbers = [
            slots.max_num_seqs,
            slots.max_model_len,
            slots.max_drafts,
            slots.page_size,
            slots.vocab_size,
            slots.max_drawn,
            len(slots.kept_states),
            *num_pages,
        ]
        self.ask(Op.BIND, np.array(numbers))
        slots.on_pages = lambda entries_np: self.send(Op.PAGES, (), entries_np)

    def share_host_pages(
        self,
        own: PageCopies,
        slots: Slots,
        num_pages: Mapping[int, int],
        state_bytes: int,
        num_bytes: int,
    ) -> SharedHostPages:
        """Have them keep as many pages in host memory, of the groups that they have, too.

        `state_bytes`: of a state of one rank, if the last group is states, else 0; `num_bytes`: of
        all ranks.
        """
        numbers = [slots.page_size, state_bytes, *num_pages.values()]
        self.ask(Op.HOST, np.array(numbers))
        return SharedHostPages(own, self, [*num_pages], num_bytes)

    def watched(self, report: ReportProgress) -> ReportProgress:
        """`report`, which also raises RankLostError once one of them could not start."""

        def check_and_report(stage: str, done: int, total: int) -> None:
            if self._lost.reason is not None:
                raise RankLostError(self._lost.reason)
            report(stage, done, total)

        return check_and_report

    @contextlib.contextmanager
    def compiling(self, most_rows: int, report: ReportProgress) -> Iterator[None]:
        """Inside, this rank compiles by itself; the others afterwards, when all is in the cache."""
        with self.group.apart():
            yield
        report("loading kernels on the other ranks", 0, 1)
        self.ask(Op.COMPILE, np.array([most_rows]))

    def send(self, op: Op, shape: Shape = (), integers_np: np.ndarray = NONE_NP) -> None:
        """Raises RankLostError if one of them is lost."""
        try:
            for follower in self._followers:
                send(follower.connection, op, shape, integers_np)
        except OSError as error:
            raise self.cause_of(error) from error

    def ask(self, op: Op, integers_np: np.ndarray = NONE_NP) -> list[np.ndarray]:
        """Have them do something, and wait for the answers of all, in any order."""
        self.send(op, (), integers_np)
        return self._answers()

    def _answers(self) -> list[np.ndarray]:
        answers: list[np.ndarray] = []
        while len(answers) < len(self._followers):
            answer = self._inbox.get()
            if answer is None:
                raise RankLostError(self._lost.reason)
            answers.append(answer)
        return answers

    def cause_of(self, error: Exception) -> Exception:
        """What to raise for the error of an exchange: that a follower is lost, if one is."""
        self._lost.happened.wait(_NEWS_S)
        return RankLostError(self._lost.reason) if self._lost.reason is not None else error

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    def stop(self) -> None:
        """End them, and leave the group."""
        self._end()


class _Loss:
    """The first loss of a follower."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.happened = threading.Event()
        self.is_wanted = False  # we are ending them
        self.is_final = False  # nothing of this process can go on without them
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def note(self, reason: str) -> None:
        with self._lock:
            if self.is_wanted or self.reason is not None:
                return
            self.reason = reason
        self.happened.set()

    def want_end(self) -> None:
        with self._lock:
            self.is_wanted = True

    def note_end(self) -> None:
        self._is_over.set()

    def wait_for_the_end(self) -> None:
        """End this process if a follower is lost, unless it is ending anyway."""
        if not self.is_final or self.reason is None:  # or ended by us
            return
        if not self._is_over.wait(_GRACE_S):
            log.critical("the engine ends: %s", self.reason)
            leave_at_once(self.reason)


class _Follower:
    """One of them, with a thread that hears it."""

    def __init__(
        self, rank: int, config: EngineConfig, meeting_fd: int, lost: _Loss, inbox: Inbox
    ) -> None:
        self.rank = rank
        self._lost, self._inbox = lost, inbox
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                (*_COMMAND, str(theirs.fileno())),
                stdin=subprocess.PIPE,  # never closed: its end shows the child that we died
                start_new_session=True,
                pass_fds=(theirs.fileno(), meeting_fd),
            )
        assert self.process.stdin is not None
        self.process.stdin.write(_line(rank, config, meeting_fd))
        self.process.stdin.flush()
        threading.Thread(target=self._hear, name=f"rank {rank}", daemon=True).start()

    def _hear(self) -> None:
        silence_s = FIRST_WORD_S
        self.connection.settimeout(silence_s)
        try:
            receive(self.connection)  # that it lives
            silence_s = HUNG_AFTER_S
            self.connection.settimeout(silence_s)
            reason = self._listen()
        except TimeoutError:
            reason = f"it has not been heard for {silence_s:g} s"
            self.process.kill()
        except (EOFError, OSError):
            reason = describe_exit(self.process.wait())
        self._lost.note(f"rank {self.rank} of the target: {reason}")
        self._inbox.put(None)
        self._lost.wait_for_the_end()

    def _listen(self) -> str:
        while True:
            frame = receive(self.connection)
            if frame.op == Op.FAILED:
                return bytes(frame.integers_np.tolist()).decode()
            if frame.op == Op.ANSWER:
                self._inbox.put(frame.integers_np)


def _line(rank: int, config: EngineConfig, meeting_fd: int) -> bytes:
    """What a follower must know: no vocabularies, for rank 0 translates."""
    draft = config.loaded_draft
    config = replace(config, draft=draft and replace(draft, vocabulary=None), token_table=None)
    return pickle.dumps((rank, meeting_fd, config)).hex().encode() + b"\n"


def _end(followers: list[_Follower], lost: _Loss, group: RankGroup) -> None:
    # While they live, or what this rank has launched may wait for them for ever. If one is lost it
    # may do so anyway: then this process ends meanwhile.
    group.finish()
    lost.want_end()
    for follower in followers:
        follower.process.kill()
    for follower in followers:
        follower.process.wait()
        follower.connection.close()
    try:
        group.leave()
    except Exception:  # less than what made them end, which is on its way
        log.exception("the ranks could not leave each other")
    finally:
        lost.note_end()  # until then, this process ends if a lost rank keeps it waiting
