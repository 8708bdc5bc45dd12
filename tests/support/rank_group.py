"""Ranks that share one small model after another: this process, and some forked from it.

They meet once, over gloo, so that a case costs no more than to load a model.
"""

import hashlib
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.config import ModelConfig
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network
from outrider.engine.models.one_prompt import PAGE, num_pages_of, one_prompt
from outrider.engine.models.shares import WHOLE, Share
from outrider.engine.ranks.group import RankGroup, path_of
from outrider.engine.ranks.shared_decoder import SharedDecoder

CPU = torch.device("cpu")
LENGTHS = (21, 1, 5)  # rows of a prompt, of a decode and of a verification
_ROOM = 64


class Passes(NamedTuple):
    logits: Tensor  # [all rows, V]; of other ranks than the first, zeros
    digest: bytes  # of the residual stream behind the last layer, of all rows
    bytes_by_axis: dict[str | None, int]  # of weights


def passes(decoder: Decoder) -> Passes:
    """A prompt, then a decode and a verification behind it."""
    decoder.bind_cache(num_pages_of(_ROOM), PAGE)
    generator = torch.Generator().manual_seed(0)
    first, logits, streams = 0, [], []
    decoder.tap([decoder.num_layers - 1])
    for length in LENGTHS:
        ids = torch.randint(0, len(decoder.embedding), (length,), generator=generator)
        computed = decoder(one_prompt(ids, first, follows=True, max_len=_ROOM))
        logits.append(computed.logits)
        # A follower hands out its residual stream in place of logits.
        streams.append(computed.logits if computed.taps is None else computed.taps[:, 0])
        first += length
    digest = hashlib.sha256(torch.cat(streams).contiguous().numpy().tobytes()).digest()
    by_axis: dict[str | None, int] = {}
    for layer in decoder.linears[:-1]:
        by_axis[layer.axis] = by_axis.get(layer.axis, 0) + layer.weight.num_bytes
    decoder.free_cache()
    return Passes(torch.cat(logits), digest, by_axis)


def load(path: str, share: Share = WHOLE, **options: Any) -> Decoder:
    config = ModelConfig(path=path, dtype="float32", **options)
    decoder = load_network(config, CPU, share=share)
    assert isinstance(decoder, Decoder)
    return decoder


@torch.inference_mode()
def whole(path: Path, **options: Any) -> Passes:
    """The passes of a process that has the whole model."""
    return passes(load(str(path), **options))


class JoinedRanks:
    def __init__(self, connections: dict[int, socket.socket], group: RankGroup) -> None:
        """`connections`: to the process of each other rank."""
        self._connections, self._group = connections, group

    @torch.inference_mode()
    def run(self, path: str, **options: Any) -> Passes:
        """The passes of the first rank. The others must have the same bits of the stream."""
        for connection in self._connections.values():
            connection.sendall(f"{path}\t{options.get('quantization', '')}\n".encode())
        share = Share(0, self._group.size)
        try:
            found = passes(SharedDecoder(load(path, share, **options), self._group))
        except BaseException:  # the others wait for this one: all are of no more use
            for pid in self._connections:
                os.kill(pid, signal.SIGKILL)
            raise
        for connection in self._connections.values():
            assert connection.recv(32) == found.digest
        return found


@contextmanager
def rank_group(size: int) -> Iterator[JoinedRanks]:
    meeting_fd = os.memfd_create("outrider-ranks-of-a-test")
    connections: dict[int, socket.socket] = {}
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _follow(theirs, _joined(rank, size, meeting_fd))
            finally:
                os._exit(0)
        theirs.close()
        ours.settimeout(60)
        connections[pid] = ours
    group = _joined(0, size, meeting_fd)
    try:
        yield JoinedRanks(connections, group)
    finally:
        for pid, connection in connections.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            connection.close()
        group.leave()
        os.close(meeting_fd)


def _joined(rank: int, size: int, meeting_fd: int) -> RankGroup:
    group = RankGroup(rank, size)
    group.join(path_of(meeting_fd), CPU)
    return group


@torch.inference_mode()
def _follow(connection: socket.socket, group: RankGroup) -> None:
    for line in connection.makefile():
        path, quantization = line.rstrip("\n").split("\t")
        decoder = load(path, Share(group.rank, group.size), quantization=quantization or None)
        connection.sendall(passes(SharedDecoder(decoder, group)).digest)
