"""Shows the progress of long work: as bars on a terminal, otherwise as plain lines."""

import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressDisplay:
    """A ReportProgress that shows one bar, or without a terminal one line, for each stage.

    `say` writes the lines; by default they are printed.
    """

    def __init__(
        self, console: Console | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self._console = console or Console(file=sys.stderr)  # the present one, before redirections
        self._say = say or partial(self._console.print, highlight=False, markup=False)
        self._bars: Progress | None = None
        self._stages: dict[str, TaskID | None] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._stages:
            self._end_stages()
            if done == total > 0:
                return
            self._stages[stage] = self._begin(stage)
        task = self._stages[stage]
        if self._bars is not None and task is not None:
            self._bars.update(task, completed=done, total=total or None)

    def _begin(self, stage: str) -> TaskID | None:
        if not self._console.is_terminal:
            self._say(stage)
            return None
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console)
            self._bars.start()
        return self._bars.add_task(stage, total=None)

    def _end_stages(self) -> None:
        """Fill all bars: when a stage begins, those before it have ended."""
        if self._bars is not None:
            for task in self._bars.task_ids:
                self._bars.update(task, total=1, completed=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
