"""The `outrider` command."""

import importlib.metadata
from typing import Annotated

import typer

from .bench import bench_command
from .chat import chat_command
from .config import config_command
from .distill import distill_command
from .doctor import doctor_command
from .evaluate import evaluate_command
from .models import models_app
from .run_batch import run_batch_command
from .serve import EXAMPLES as SERVE_EXAMPLES
from .serve import serve_command
from .setting_flags import PlainHelp

EXAMPLES = """\
Examples:

  outrider doctor                 what this machine has, and which pair fits

  outrider serve                  the default pair, on any machine

  outrider serve Qwen/Qwen3-8B    another model, with the best known draft for it

  outrider chat                   talk to it, and see what was drafted

  outrider bench                  how much the drafts gain under load
"""

app = typer.Typer(
    help="Serve a language model over HTTP, sped up by a small draft that guesses its tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=EXAMPLES,
)
_SERVING, _MODELS = "Serve and try", "Models and settings"
app.command("serve", cls=PlainHelp, rich_help_panel=_SERVING, epilog=SERVE_EXAMPLES)(serve_command)
app.command("chat", rich_help_panel=_SERVING)(chat_command)
app.command("bench", rich_help_panel=_SERVING)(bench_command)
app.command("run-batch", rich_help_panel=_SERVING)(run_batch_command)
app.command("doctor", rich_help_panel=_SERVING)(doctor_command)
app.command("evaluate", rich_help_panel=_MODELS)(evaluate_command)
app.command("distill", rich_help_panel=_MODELS)(distill_command)
app.add_typer(models_app, name="models", rich_help_panel=_MODELS)
app.command("config", rich_help_panel=_MODELS)(config_command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"outrider {importlib.metadata.version('outrider')}")
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Serve a language model over HTTP, sped up by a small draft that guesses its tokens."""
