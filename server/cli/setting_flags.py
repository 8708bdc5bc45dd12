"""Options of a command for every setting, made from the settings' own descriptions."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..config.flags import SECTIONS, flag_names
from ..config.settings import Settings
from ..config.settings_loader import is_list
from .config import allowed_values

_LONG = {"-k": ("-k", "--num-speculative-tokens")}
TARGET, DRAFT = "Target", "Draft"
_PANELS = {
    "target": TARGET,
    "draft": DRAFT,
    "speculation": "Speculation",
    "engine": "Engine",
    "scheduler": "Scheduler",
    "cache": "KV cache",
    "server": "HTTP server",
}
_METAVARS = {"integer": "N", "number": "NUMBER", "string": "TEXT", "array": "TEXT"}


MAX_CHOICES = 8


def with_setting_flags(command: Callable[..., None], *, own: set[str]) -> Callable[..., None]:
    """The same command with a flag for each setting but `own`, which it has already.

    What is given comes as `flags`, by `section.key`.
    """
    given = inspect.signature(command).parameters.values()
    kept = [parameter for parameter in given if parameter.name != "flags"]
    keys = {key.replace(".", "__"): key for key in flag_names() if key not in own}
    # Once a section: every command of ours imports this.
    schemas = {
        section: type(settings).model_json_schema()["properties"]
        for section, settings in Settings()
    }

    def run(**values: Any) -> None:
        # Typer gives a list that nobody asked for as an empty one.
        flags = {key: values.pop(name) for name, key in keys.items()}
        command(
            **values, flags={key: None if value == [] else value for key, value in flags.items()}
        )

    made = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(key, schemas)
        )
        for name, key in keys.items()
    ]
    by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in kept]
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature([*by_name, *made])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*by_name, *made)}
    return run


def _annotation(key: str, schemas: dict[str, Any]) -> Any:
    section, name = key.split(".")
    schema = schemas[section][name]
    flag = flag_names()[key]
    named = _LONG.get(flag, (flag,))
    kinds = [schema, *schema.get("anyOf", [])]
    kind = next(each["type"] for each in kinds if each.get("type") not in (None, "null"))
    default = schema.get("default")
    # An unset setting's description says what that means.
    shown = f" [default: {default}]"
    if default in (None, "", []):
        shown = ""
    elif isinstance(default, list):
        shown = f" [default: {', '.join(default)}]"
    choices = next((each["enum"] for each in kinds if "enum" in each), None)
    choices = choices or [each["const"] for each in kinds if "const" in each]
    if len(choices) > MAX_CHOICES:  # for one line; the text lists them
        choices = []
    text = schema["description"] + ("" if choices else allowed_values(schema))
    text += " Repeatable." if is_list(key) else ""
    panel = _PANELS[section]
    if kind == "boolean":
        shown = "" if default is None else f" [default: {'on' if default else 'off'}]"
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=text + shown, rich_help_panel=panel)
        return Annotated[bool | None, option]
    metavar = "|".join(choices) or _metavar(name, kind, kinds)
    option = typer.Option(*named, metavar=metavar, help=text + shown, rich_help_panel=panel)
    return Annotated[list[str] | None if is_list(key) else str | None, option]


def _metavar(name: str, kind: str, kinds: list[dict[str, Any]]) -> str:
    if name.endswith("_s"):
        return "SECONDS"
    if any(each.get("format") == "path" for each in kinds):
        return "PATH"
    return _METAVARS[kind]


assert tuple(_PANELS) == SECTIONS
