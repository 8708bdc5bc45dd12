"""What the processes of a server say to each other, encoded with msgspec.

The engine answers whoever speaks to it: the process that started it, which owns it, and the HTTP
processes beside that one, which share it. Each hears of its own sequences alone.
"""

from typing import Literal

import msgspec

from ..api import EngineInfo, EngineState, EngineStats, NewRequest, RequestOutput

# ---- client -> engine


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Tell me of your steps from now on, and how you are at once. The owner speaks first, and
    hears of loading too.
    """


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Sequences that are admitted together or turned away together."""

    submission_id: int  # of this client's; the answer names it
    requests: list[NewRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """To the engine: finish nothing further; leave. To an HTTP process: finish and leave."""


ToEngine = Hello | Submit | Abort | Shutdown


# ---- engine -> client


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of start-up: `done` of `total` units of `stage`."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The sequences of a Submit are in the queue."""

    submission_id: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The sequences of a Submit were turned away; nothing was kept of them."""

    submission_id: int
    reason: Literal["queue_full", "invalid"]
    message: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step produced for this client, and how the engine is after it."""

    outputs: list[RequestOutput]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not come up or cannot go on; it leaves after this."""

    message: str


FromEngine = Loading | Ready | Admitted | Refused | Outputs | Failed


# ---- between the owner of an engine and a process that shares it


class Up(msgspec.Struct, frozen=True, tag=True):
    """The sharing process has come up: it could shut down in order."""


class Status(msgspec.Struct, frozen=True, tag=True):
    """How the engine is; if it is not ready, what was running has ended."""

    state: EngineState
    reason: str | None
    info: EngineInfo | None
    endpoint: str | None  # where an engine that is ready can be reached
    past_stats: EngineStats  # the counters of the engines before it


FromOwner = Status | Shutdown
