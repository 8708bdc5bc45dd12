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
from .plain_help import PlainCommand, PlainGroup
from .run_batch import run_batch_command
from .serve import EXAMPLES as SERVE_EXAMPLES
from .serve import serve_command

EXAMPLES = """\
\b
Examples:
  outrider doctor                 what this machine has, and which pair fits
  outrider serve                  the default pair, on any machine
  outrider serve Qwen/Qwen3-8B    another model, with its best known draft
  outrider chat                   talk to it, and see what was drafted
  outrider bench                  how much the drafts gain under load
"""

app = typer.Typer(
    help="Serve a language model over HTTP, sped up by a small draft that guesses its tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    cls=PlainGroup,
    context_settings={"max_content_width": 100},
    epilog=EXAMPLES,
)
_SERVING, _MODELS = "Serve and try", "Models and settings"
for _panel, _name, _command in (
    (_SERVING, "serve", serve_command),
    (_SERVING, "chat", chat_command),
    (_SERVING, "bench", bench_command),
    (_SERVING, "run-batch", run_batch_command),
    (_SERVING, "doctor", doctor_command),
    (_MODELS, "evaluate", evaluate_command),
    (_MODELS, "distill", distill_command),
    (_MODELS, "config", config_command),
):
    _epilog = SERVE_EXAMPLES if _name == "serve" else None
    app.command(_name, cls=PlainCommand, rich_help_panel=_panel, epilog=_epilog)(_command)
app.add_typer(models_app, name="models", rich_help_panel=_MODELS)


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
