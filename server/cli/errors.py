"""What a command says when it cannot go on."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import typer


def give_up(why: object, status: int) -> NoReturn:
    """Say why in one line, and exit with this status."""
    typer.echo(f"outrider: {why}", err=True)
    raise typer.Exit(status)


def check_folders(*files: Path | None) -> None:
    """Give up on files that could not be written in the end, before anything else is done."""
    for file in files:
        if file and not file.parent.is_dir():
            give_up(f"{file.parent} is no directory; make it first", 2)


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Give up with status 1 on errors that a user can mend."""
    from outrider.distill.recipe import DistillError
    from outrider.engine.processes.client import EngineUnavailableError

    from ..models.store import ModelError

    try:
        yield
    except (ModelError, DistillError, EngineUnavailableError, ValueError, OSError) as error:
        give_up(error, 1)
