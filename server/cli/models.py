"""`outrider models`: see, fetch, find and remove models."""

import signal
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..models import builtin, store
from ..models.known_drafts import KNOWN_DRAFTS
from .errors import errors_shown
from .options import ConfigOption, SetOption, settings_or_exit
from .plain_help import PlainCommand, PlainGroup
from .progress import ProgressDisplay
from .signals import be_interrupted_by

models_app = typer.Typer(
    help="List, fetch, locate and remove models.", no_args_is_help=True, cls=PlainGroup
)

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A built-in name, a directory, a GGUF file, or a hub id."),
]
RevisionOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit, for hub ids only.")
]


@models_app.command("list", cls=PlainCommand)
def list_models() -> None:
    """List the built-in models and what is in the store; hub ids are in the hub's own cache."""
    table = Table(box=None, pad_edge=False)
    table.add_column("MODEL", no_wrap=True)
    table.add_column("SIZE", no_wrap=True, justify="right")
    table.add_column("WHAT IT IS")
    with errors_shown():
        stored = store.entries()
    for name in [*builtin.BUILTINS, *sorted(stored.keys() - builtin.BUILTINS.keys())]:
        entry = stored.get(name)
        known = builtin.BUILTINS.get(name)
        table.add_row(
            name,
            f"{entry.size_bytes / 1e6:.0f} MB" if entry else "not fetched",
            known.description if known else f"converted from {stored[name].source}",
        )
    Console().print(table)
    typer.echo(f"\nin {store.home()}")


@models_app.command("drafts", cls=PlainCommand)
def list_drafts() -> None:
    """List known drafts: models and heads. A target gets the first that suits it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("TARGET", no_wrap=True)
    table.add_column("WHAT IT IS", no_wrap=True)
    table.add_column("K", no_wrap=True, justify="right")
    table.add_column("DRAFT", overflow="fold")  # whole, for whoever copies it
    for known in KNOWN_DRAFTS:
        k = str(known.num_speculative_tokens)
        table.add_row(known.family, known.kind, k, known.model)
    Console().print(table)


@models_app.command("fetch", cls=PlainCommand)
def fetch_models(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A built-in name, a GGUF file, or a hub id. [default: the pair of --config]",
        ),
    ] = None,
    revision: RevisionOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Fetch and convert one model, or both models of a config (by default the default pair)."""
    # Only now: the hub's library takes half a second, which no other command need wait for.
    from ..models.pair import prepare_pair
    from ..models.resolve import resolve

    be_interrupted_by(signal.SIGTERM)
    with errors_shown(), ProgressDisplay() as display:
        if model is not None:
            typer.echo(resolve(model, revision, report=display))
            return
        pair = prepare_pair(settings_or_exit(config, assignments), display)
        typer.echo(pair.target)
        if pair.draft not in (None, pair.target):  # an MTP head is in the target's directory
            typer.echo(pair.draft)


@models_app.command("path", cls=PlainCommand)
def show_path(model: ModelArgument, revision: RevisionOption = None) -> None:
    """Print the directory of a model that is on this machine; fetches nothing."""
    from ..models.resolve import find

    with errors_shown():
        typer.echo(find(model, revision))


@models_app.command("remove", cls=PlainCommand)
def remove_model(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that `outrider models list` shows.")
    ],
) -> None:
    """Delete a model from the store. For hub ids use `hf cache rm`."""
    with errors_shown():
        store.remove(name)
    typer.echo(f"removed {name}")
