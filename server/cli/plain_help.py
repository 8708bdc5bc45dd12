"""The help of all commands as click lays it out: typer's tables cut long names of options off."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(TyperCommand, self).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(self, ctx, formatter)


class PlainGroup(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(TyperGroup, self).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(self, ctx, formatter)


def _write_panels(command: Any, ctx: Any, formatter: Any) -> None:
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


def _panel(shown: Any, default: str) -> str:
    panel = getattr(shown, "rich_help_panel", None)
    return panel if isinstance(panel, str) else default
