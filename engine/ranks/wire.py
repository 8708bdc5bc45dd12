"""What rank 0 and a follower send each other on the host: integers, in frames."""

import socket
from enum import IntEnum, auto
from typing import NamedTuple

import numpy as np

from ..state.phase import Shape
from ..state.ragged import NONE_NP


class Op(IntEnum):
    """What a frame is for."""

    # To a follower
    JOIN = auto()  # meet the other ranks [1]: whether they are batch-invariant
    BIND = auto()  # allocate, and answer then: see `Followers.bind`
    PAGES = auto()  # write changed pages into the block tables [3, entries]
    # Of a network, whose number comes in front of the shape: 0, the target, or 1, its draft
    COPY_STATES = auto()  # from slots to others [copies, 2], one after the other
    TAP = auto()  # hand out the states behind these layers, as rank 0 alone does [layers]
    RUN = auto()  # run its phase, of this shape
    CAPTURE = auto()  # capture it
    # Of all
    COMPILE = auto()  # compile all kernels, and answer then: see `OwnShares.compile`
    MEASURE = auto()  # from now on, note how much memory a step takes
    MEASURED = auto()  # that was the largest step
    HOST = auto()  # the same in host memory: see `Followers.share_host_pages`
    SAVE = auto()  # copy pages of its group `shape` there [2, pages], from and to
    LOAD = auto()  # begin to copy them back [2, pages], from and to
    LOADED = auto()  # further steps read what came back; answer bytes of why a copy failed, or none
    ROOM = auto()  # answer how many bytes are left for pages
    # From a follower
    ALIVE = auto()  # now and then, whatever it is doing
    ANSWER = auto()
    FAILED = auto()  # bytes of the reason


class Frame(NamedTuple):
    op: Op
    shape: Shape
    integers_np: np.ndarray  # int64


def send(
    connection: socket.socket, op: Op, shape: Shape = (), integers_np: np.ndarray = NONE_NP
) -> None:
    """Raises OSError if the other end has gone."""
    head_np = np.array((op, len(shape), integers_np.size), dtype=np.int64)
    body_np = np.concatenate((head_np, np.array(shape, dtype=np.int64), integers_np.ravel()))
    connection.sendall(body_np.astype(np.int64, copy=False).tobytes())


def receive(connection: socket.socket) -> Frame:
    """Waits for the next frame. Raises EOFError if the other end has gone."""
    op, num_dims, size = _read(connection, 3).tolist()
    body_np = _read(connection, num_dims + size)
    return Frame(Op(op), tuple(body_np[:num_dims].tolist()), body_np[num_dims:])


def _read(connection: socket.socket, num: int) -> np.ndarray:
    data_np = np.empty(num, dtype=np.int64)
    view = data_np.view(np.uint8).data
    while view:
        num_bytes = connection.recv_into(view)
        if num_bytes == 0:
            raise EOFError("the other end has gone")
        view = view[num_bytes:]
    return data_np
