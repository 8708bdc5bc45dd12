"""What a command says when it cannot go on."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import typer


def give_up(why: object, status: int) -> NoReturn:
    """Say why in one line, and exit with this status."""
    typer.echo(f"outrider: {why}", err=True)
    raise typer.Exit(status)


def unwritable(file: Path) -> str | None:
    """Why a file could not be written in the end; None if it could. It is not touched."""
    if not file.parent.is_dir():
        return "No such directory"
    if file.is_dir():
        return "Is a directory"
    return None if os.access(file if file.exists() else file.parent, os.W_OK) else "Not writable"


def check_file(file: Path | None) -> None:
    """Give up on a file that could not be written in the end, before anything else is done."""
    if file and (why := unwritable(file)):
        give_up(f"{file}: {why}; name another file", 2)


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
