"""What a command says when it cannot go on."""

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """Report errors that a user can mend in one line each, and exit with status 1."""
    from outrider.distill.recipe import DistillError
    from outrider.engine.processes.client import EngineUnavailableError

    from ..models.store import ModelError

    try:
        yield
    except (ModelError, DistillError, EngineUnavailableError, ValueError, OSError) as error:
        typer.echo(f"outrider: {error}", err=True)
        raise typer.Exit(1) from None
