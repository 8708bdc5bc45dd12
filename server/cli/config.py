"""`outrider config`: the effective settings, or a commented sample of all of them."""

import json
import textwrap
from typing import Annotated, Any

import typer

from ..config.settings import Settings
from .options import ConfigOption, SetOption, settings_or_exit


def config_command(
    config: ConfigOption = None,
    assignments: SetOption = None,
    example: Annotated[
        bool,
        typer.Option("--example", help="Print every setting with its description and default."),
    ] = False,
) -> None:
    """Print the effective settings as TOML."""
    if example:
        typer.echo(to_toml(Settings(), described=True), nl=False)
    else:
        typer.echo(to_toml(settings_or_exit(config, assignments)), nl=False)


def to_toml(settings: Settings, *, described: bool = False) -> str:
    """Settings as a TOML file that loads to the same settings, but without API keys.

    Unset keys appear as comments, since TOML has no null.
    """
    parts = []
    for section_name, section in settings:
        lines = [f"[{section_name}]"]
        if described:
            lines = [f"# {(type(section).__doc__ or '').strip()}", *lines]
        schemas = type(section).model_json_schema()["properties"]
        for name, value in section.model_dump(mode="json").items():
            if described:
                lines += _comment(schemas[name])
            if value is None:
                lines.append(f"# {name} is unset")
            elif value and name.endswith("api_keys"):  # masked, they would load as keys
                lines.append(f"# {name} is set, and not shown")
            else:
                lines.append(f"{name} = {_to_toml(value)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _to_toml(value: object) -> str:
    """A scalar or list, written as JSON, which TOML can read except for the DEL character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _comment(schema: dict[str, Any]) -> list[str]:
    text = f"{schema['description']}{allowed_values(schema)}"
    return ["", *(f"# {line}" for line in textwrap.wrap(text, 98, break_on_hyphens=False))]


def allowed_values(schema: dict[str, Any]) -> str:
    """The allowed values of a setting in words, from its JSON schema; "" if its type says all."""
    schema = {
        key: value for part in schema.get("anyOf", []) for key, value in part.items()
    } | schema
    if "enum" in schema:
        return f" One of: {', '.join(schema['enum'])}."
    low = schema.get("minimum", f"more than {schema.get('exclusiveMinimum')}")
    if "maximum" in schema:
        return f" From {low} to {schema['maximum']}."
    return f" At least {low}." if "minimum" in schema else ""
