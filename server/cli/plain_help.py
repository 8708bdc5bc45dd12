"""The help of all commands: every option in full, however long; a table would cut names off."""

import inspect
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

MAX_WIDTH = 100


class PlainCommand(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help(self, ctx, usage="[OPTIONS]"))


class PlainGroup(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help(self, ctx, usage="[OPTIONS] COMMAND"))


def _help(command: Any, ctx: Any, *, usage: str) -> str:
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    panels: dict[str, list[str]] = defaultdict(list)
    # Arguments and options that no panel has, then those of panels, in the order of the command.
    for parameter in sorted(command.get_params(ctx), key=lambda each: _panel(each) != "Options"):
        if parameter.param_type_name == "argument":
            usage += f" {_names(parameter)}"
        panels[_panel(parameter)] += _entry(_names(parameter), _text(parameter), width)
    commands = getattr(command, "commands", {})
    for name, each in commands.items():
        panel = _panel(each, "Commands")
        panels[panel] += _entry(name, (each.help or "").split("\n\n")[0], width)
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    text = "\n\n".join(textwrap.fill(each, width, break_on_hyphens=False) for each in paragraphs)
    lines = [f"Usage: {ctx.command_path} {usage}", "", text]
    for panel, entries in panels.items():
        lines += ["", f"{panel}:", *entries]
    if command.epilog:
        lines += ["", command.epilog.replace("\n\n", "\n").strip()]
    return "\n".join(lines) + "\n"


def _panel(shown: Any, default: str = "Options") -> str:
    panel = getattr(shown, "rich_help_panel", None)
    return panel if isinstance(panel, str) else default


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar.strip("[]")
        return name if parameter.required else f"[{name}]"
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def _text(parameter: Any) -> str:
    """What an option is for, and what holds without it."""
    notes = []
    if parameter.required:
        notes.append("[required]")
    # What is not set by default says so in its help.
    elif parameter.show_default and type(parameter.default) in (str, int, float):
        notes.append(f"[default: {parameter.default}]")
    if parameter.envvar:
        notes.append(f"[in the environment: {parameter.envvar}]")
    return " ".join([parameter.help or "", *notes])


def _entry(name: str, text: str, width: int) -> Iterator[str]:
    yield f"  {name}"
    wrapped = textwrap.wrap(text, width - 6, break_on_hyphens=False, break_long_words=False)
    yield from (f"      {line}" for line in wrapped)
