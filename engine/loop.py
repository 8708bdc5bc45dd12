"""The engine: five calls a step."""

from collections.abc import Callable

from outrider.engine.api import EngineInfo, EngineStats, NewRequest, RequestOutput
from outrider.engine.config import EngineConfig

Progress = Callable[[str, int, int], None]  # (stage, done, total)


class Engine:
    """A draft/target pair on one device, decoding many sequences at once. Not thread-safe."""

    info: EngineInfo

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        raise NotImplementedError

    def submit(self, requests: list[NewRequest]) -> None:
        """Queue sequences, all or none. Raises QueueFullError or InvalidRequestError."""
        raise NotImplementedError

    def abort(self, request_ids: list[str]) -> None:
        """Drop sequences and free their pages now. Unknown ids are ignored; no output follows."""
        raise NotImplementedError

    def has_work(self) -> bool:
        raise NotImplementedError

    def step(self) -> list[RequestOutput]:
        """Run one step of the batch."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Account for every page; raises RuntimeError on a leak. Cheap; run when idle."""
        raise NotImplementedError
