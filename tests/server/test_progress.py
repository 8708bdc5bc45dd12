"""Bars on a terminal, lines elsewhere."""

import io

from rich.console import Console

from outrider.server.cli.progress import ProgressDisplay


def shown(terminal: bool) -> str:
    output = io.StringIO()
    with ProgressDisplay(Console(file=output, force_terminal=terminal, width=80)) as progress:
        progress("loading", 0, 3)
        progress("allocating", 2, 3)
        progress("ready", 3, 3)
    return output.getvalue()


def test_without_a_terminal_each_stage_is_a_line() -> None:
    assert shown(terminal=False) == "loading\nallocating\n"


def test_bars_of_past_stages_are_full_at_the_end() -> None:
    *_, last_frame = shown(terminal=True).split("\x1b[1A\x1b[2K")
    assert "allocating" in last_frame
    assert not set("╺╸") & set(last_frame)  # the ends of bars that are not full
