"""Shows the progress of long work: as bars on a terminal, otherwise as plain lines."""

import sys
from collections.abc import Callable
from functools import partial
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
        console = console or Console(file=sys.stderr)  # the present one, before redirections
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._say = say or partial(console.print, highlight=False, markup=False)
        self._stages: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._stages:
            for task in self._bars.task_ids:  # when a stage begins, those before it have ended
                self._bars.update(task, total=1, completed=1)
            if done == total > 0:
                return
            if self._bars.disable:
                self._say(stage)
            self._bars.start()
            self._stages[stage] = self._bars.add_task(stage, total=None)
        self._bars.update(self._stages[stage], completed=done, total=total or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
