"""The help of all commands as click lays it out: typer's tables cut long names of options off."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _write_help(command: Any, ctx: Any, formatter: Any) -> None:
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        name, text = parameter.get_help_record(ctx)
        if parameter.param_type_name == "argument":
            panels["Arguments"].append((parameter.metavar, text))
        else:
            panels.setdefault(_panel(parameter, "Options"), []).append((name, text))
    for name, each in getattr(command, "commands", {}).items():
        text = each.get_short_help_str(limit=100)
        panels.setdefault(_panel(each, "Commands"), []).append((name, text))
    for panel, entries in panels.items():
        if entries:
            with formatter.section(panel):
                formatter.write_dl(entries)
    command.format_epilog(ctx, formatter)


def _panel(shown: Any, default: str) -> str:
    panel = getattr(shown, "rich_help_panel", None)
    return panel if isinstance(panel, str) else default


class PlainCommand(TyperCommand):
    format_help = _write_help


class PlainGroup(TyperGroup):
    format_help = _write_help
