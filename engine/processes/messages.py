"""What the processes of a server say to each other, encoded with msgspec.

The process that owns the engine speaks with it, and with those that share it (see relay.py).
"""

from typing import Literal

import msgspec

from ..api import EngineInfo, EngineState, EngineStats, NewRequest, RequestOutput

# ---- server -> engine


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Sequences that are admitted together or turned away together."""

    requests: list[NewRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing further; leave."""


ToEngine = Submit | Abort | Shutdown


# ---- engine -> server


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of start-up: `done` of `total` units of `stage`."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The sequences of one Submit are in the queue."""

    request_ids: list[str]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The sequences of one Submit were turned away; nothing was kept of them."""

    request_ids: list[str]
    reason: Literal["queue_full", "invalid", "unavailable"]
    message: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step produced."""

    outputs: list[RequestOutput]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not come up or cannot go on; it leaves after this."""

    message: str


FromEngine = Loading | Ready | Admitted | Refused | Outputs | Failed


# ---- between the owner of an engine and a process that shares it


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The sharing process wants to hear of the engine."""


class Up(msgspec.Struct, frozen=True, tag=True):
    """The sharing process has come up: it could shut down in order."""


class Status(msgspec.Struct, frozen=True, tag=True):
    """How the engine is; where it is not ready, what was running has ended."""

    state: EngineState
    reason: str | None
    info: EngineInfo | None


ToOwner = Hello | Up | Submit | Abort
FromOwner = Status | Admitted | Refused | Outputs | Shutdown
