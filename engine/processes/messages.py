"""The messages between the processes of a server, encoded with msgspec.

The engine answers every process that writes to it: the one that started and owns it, and the HTTP
processes that share it. Each hears only about its own sequences.
"""

from typing import Literal

import msgspec

from ..api import EngineInfo, EngineState, EngineStats, NewRequest, RequestOutput

# ---- client -> engine


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Asks for reports of steps from now on, and at once of the engine's state. The owner
    sends this first, and also hears about the progress of loading.
    """


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Sequences that are admitted or turned away together."""

    submission_id: int  # chosen by the client; the answer repeats it
    requests: list[NewRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The engine exits at once; an HTTP process finishes its requests first."""


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
    """The sequences of a Submit were turned away."""

    submission_id: int
    reason: Literal["queue_full", "invalid"]
    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """What one step produced for this client, and the engine's statistics after it."""

    outputs: list[RequestOutput]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or cannot go on; it exits after this message."""

    message: str


FromEngine = Loading | Ready | Admitted | Refused | StepOutputs | Failed


# ---- between the owner of an engine and a process that shares it


class Up(msgspec.Struct, frozen=True, tag=True):
    """The sharing process is ready: from now on it can shut down in order."""


class EngineStatus(msgspec.Struct, frozen=True, tag=True):
    """The state of the engine; if it is not ready, all its sequences have ended."""

    state: EngineState
    reason: str | None
    info: EngineInfo | None
    endpoint: str | None  # where the engine can be reached, if it is ready
    past_stats: EngineStats  # the counters of earlier engines


FromOwner = EngineStatus | Shutdown
