"""The `outrider` command."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .config import ConfigOption, SetOption, config_command, settings_or_exit
from .distill import distill_command
from .evaluate import evaluate_command
from .models import models_app

app = typer.Typer(
    help="A standalone speculative decoding server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("config")(config_command)
app.command("distill")(distill_command)
app.command("evaluate")(evaluate_command)
app.add_typer(models_app, name="models")

LogLevel = Literal["critical", "error", "warning", "info", "debug"]


@app.command("serve")
def serve_command(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    api_workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that answer HTTP.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in /v1/models and in requests.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Bearer key that clients must send; repeatable. The process list shows it: "
            "--api-key-file and OUTRIDER_SERVER__API_KEYS do not."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of bearer keys that clients must send, one a line.")
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time for running requests to finish at shutdown."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of the GPU's memory, what the engine may take."),
    ] = None,
    enforce_eager: Annotated[
        bool | None,
        typer.Option(
            "--enforce-eager", help="Capture no CUDA graphs: start sooner, decode slower."
        ),
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Least severe log lines.")] = None,
    assignments: SetOption = None,
) -> None:
    """Serve a draft/target pair over HTTP until Ctrl-C or SIGTERM."""
    flags: dict[str, object] = {
        "server.host": host,
        "server.port": port,
        "server.api_workers": api_workers,
        "server.served_model_name": served_model_name,
        "server.api_keys": api_key or None,
        "server.api_key_file": api_key_file,
        "server.shutdown_timeout_s": shutdown_timeout,
        "engine.gpu_memory_utilization": gpu_memory_utilization,
        "engine.enforce_eager": enforce_eager,
        "server.log_level": log_level,
    }
    settings = settings_or_exit(config, assignments, flags)
    # Only now: it brings in the whole server, which the other commands need not wait for.
    from ..http.serving import serve

    raise typer.Exit(serve(settings))
