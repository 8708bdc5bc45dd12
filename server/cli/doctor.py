"""`outrider doctor`: what this machine has, what it lacks, and what to do about it."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .options import ConfigOption, SetOption, missing_model, settings_or_exit

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[bold red]missing[/]"}


def doctor_command(
    config: ConfigOption = None,
    assignments: SetOption = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not try to reach the hub.")
    ] = False,
) -> None:
    """Check this machine: what it has, what is missing, which pair fits, what to do.

    Exits with status 1 if the server cannot run on this machine as it is.
    """
    settings = settings_or_exit(config, assignments)
    from outrider.engine.config import CacheConfig

    from ..diagnosis import machine, network, weights  # bring in torch

    target = settings.target
    configured = target.model if "model" in target.model_fields_set else None
    hub = network.hub(offline=offline)
    findings = {
        "system": machine.system(),
        "Python": machine.python(),
        "torch": machine.torch_build(),
        "GPU": machine.gpu(target.device, target.tensor_parallel or 1),
        "compiler": machine.compiler(),
        "processor": machine.processor(),
        "memory": machine.memory(CacheConfig(**settings.cache.model_dump())),
        "disk": machine.disk(),
        "port": network.port(settings.server),
        "clients": network.clients(settings.server),
        "hub": hub,
        "models": machine.models(),
        "pair": machine.pair(
            has_hub=hub.state == "ok",
            configured=configured,
            counted=weights.counted(settings, has_hub=hub.state == "ok") if configured else "",
            num_ranks=target.tensor_parallel or (1 if ":" in target.device else None),
            shares_draft=settings.draft.tensor_parallel > 1,
            utilization=settings.engine.gpu_memory_utilization,
        ),
    }
    if missing := missing_model(settings):
        findings["pair"] = machine.Finding("bad", missing, "Name one that is there.")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, found in findings.items():
        text = escape(found.text)
        if found.remedy:
            text += f"\n[bold]{escape(found.remedy)}[/]"
        table.add_row(_MARKS[found.state], name, text)
    Console(highlight=False).print(table)
    if any(found.state == "bad" for found in findings.values()):
        typer.echo("\nThe server cannot run here yet: see what is missing above.")
        raise typer.Exit(1)
    typer.echo("\nReady: `outrider serve` starts the server.")
