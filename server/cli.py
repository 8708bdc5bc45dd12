"""The `outrider` command."""

import typer

from outrider.server.cli_config import config_command
from outrider.server.cli_models import models_app

app = typer.Typer(
    help="A standalone speculative decoding server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("config")(config_command)
app.add_typer(models_app, name="models")
