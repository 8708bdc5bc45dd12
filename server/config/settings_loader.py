"""Where settings come from: flags over `--set` over environment over file over defaults."""

import difflib
import importlib.resources
import itertools
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .settings import Settings

ENV_PREFIX = "OUTRIDER_"


class SettingsError(ValueError):
    """Settings that cannot be used; the message says which, where they are, and what is allowed."""


_Given = tuple[str, tuple[object, str]]  # a key, its value, and where that is from


def load_settings(
    config: Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> Settings:
    """Merge all sources; later ones override earlier ones: file, environment, `--set`, flags.

    `config` is a file, or the name of one in configs/ without its suffix. `assignments` are
    `section.key=value` texts. `flags` map `section.key` to a value, where None means not given;
    errors name it by `flag_names`, if given.
    Raises SettingsError.
    """
    given = dict(
        itertools.chain(
            () if config is None else _from_file(config),
            _from_environment(os.environ if environ is None else environ),
            _from_assignments(assignments),
            _from_flags(flags or {}, flag_names or {}),
        )
    )
    sections: dict[str, dict[str, object]] = {}
    for key, (value, _) in given.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    try:
        return Settings.model_validate(sections)
    except ValidationError as error:
        raise SettingsError(_describe(error, given)) from None


def setting_keys() -> dict[str, FieldInfo]:
    """Every valid `section.key`, in the order of the settings classes."""
    return {
        f"{section}.{name}": field
        for section, settings in Settings()
        for name, field in type(settings).model_fields.items()
    }


def shipped_configs() -> dict[str, Traversable]:
    """The files of configs/, by name without suffix; they are part of the package."""
    files = importlib.resources.files("outrider.configs").iterdir()
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def _shipped(name: str) -> Traversable:
    ours = shipped_configs()
    if name not in ours:
        raise SettingsError(
            f"there is no config file {name}, and none of the bundled configs is called "
            f"that; they are {', '.join(sorted(ours))}"
        )
    return ours[name]


def _from_file(path: Path) -> Iterator[_Given]:
    is_name = not path.exists() and path.name == str(path) and path.suffix != ".toml"
    try:
        file = _shipped(path.name) if is_name else path
        content = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"cannot read config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {path} is not valid TOML: {error}") from None
    for section, values in content.items():
        if section not in Settings.model_fields:
            if not isinstance(values, dict):
                _check_key(section, str(path))
            raise SettingsError(f"{path}: {_unknown(section, Settings.model_fields, 'section')}")
        if not isinstance(values, dict):
            raise SettingsError(
                f"{path}: `{section}` is a section: write [{section}] and its keys below it"
            )
        for name, value in values.items():
            _check_key(f"{section}.{name}", str(path))
            yield f"{section}.{name}", (value, str(path))


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for variable, text in environ.items():
        # Only names with a `__` are ours: a Kubernetes service called "outrider" puts
        # OUTRIDER_PORT=tcp://... and the like into the environment of every pod around it.
        if variable.startswith(ENV_PREFIX) and "__" in variable:
            key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
            source = f"environment variable {variable}"
            _check_key(key, source)
            if not text and is_list(key):
                continue  # compose files pass variables on that nobody has set
            yield key, (_parse_text(key, text), source)


def _from_assignments(assignments: Sequence[str]) -> Iterator[_Given]:
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        source = f"--set {assignment}"
        if not separator:
            raise SettingsError(f"{source}: expected section.key=value")
        key = key.strip()
        _check_key(key, source)
        yield key, (_parse_text(key, text.strip()), source)


def _from_flags(flags: Mapping[str, object], names: Mapping[str, str]) -> Iterator[_Given]:
    for key, value in flags.items():
        _check_key(key, "flag")
        if value is not None:
            texts = value if isinstance(value, (list, tuple)) else [value]
            shown = [] if isinstance(value, bool) else [", ".join(map(str, texts))]
            yield key, (value, " ".join([names.get(key, key), *shown]))


def _check_key(key: str, source: str) -> None:
    if key not in (valid := setting_keys()):
        raise SettingsError(f"{source}: {_unknown(key, valid, 'key')}")


def _unknown(given: str, valid: Iterable[str], kind: str) -> str:
    if given in Settings.model_fields:
        return f"`{given}` is a section: name one of its keys, as in `{given}.KEY`"
    choices = list(valid)
    # A correct key in a wrong section is as likely as a misspelt one: compare the last part too.
    same_name = [choice for choice in choices if choice.split(".")[-1] == given.split(".")[-1]]
    nearest = same_name or difflib.get_close_matches(given, choices, n=1, cutoff=0.5)
    hint = f"did you mean `{nearest[0]}`?" if nearest else "`outrider config` prints all keys"
    return f"unknown {kind} `{given}`; {hint}"


def _parse_text(key: str, text: str) -> object:
    """A value given as text; pydantic turns plain text into numbers and booleans itself."""
    if type(None) in get_args(setting_keys()[key].annotation) and text.lower() in ("", "none"):
        return None
    if is_list(key):
        if text.startswith("["):
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                return text
        return [item.strip() for item in text.split(",") if item.strip()]
    return text


def is_list(key: str) -> bool:
    """Whether a setting is a list."""
    annotation = setting_keys()[key].annotation
    return any(Ellipsis in get_args(part) for part in (annotation, *get_args(annotation)))


def _describe(error: ValidationError, given: Mapping[str, tuple[object, str]]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"][:2])
        message = _in_words(problem)
        if problem["type"] == "string_pattern_mismatch":
            message = setting_keys()[key].description or message
        if key not in given:
            lines.append(f"{key}: {message}" if key else message)
            continue
        value, source = given[key]
        if "api_keys" in key:
            lines.append(f"`{key}`: {message}")
        elif source.startswith("-") and not source.startswith("--set "):  # it shows the value
            several = "; repeat the flag for several" if is_list(key) else ""
            lines.append(f"{source}: {message}{several}")
        else:
            lines.append(f"{source}: `{key}` is {value!r}: {message}")
    return "\n".join(lines)


def _in_words(problem: ErrorDetails) -> str:
    """What a value must be, as a person would say it."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "less_than_equal":
            return f"at most {context['le']}"
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "greater_than":
            return f"it must be more than {context['gt']}"
        case "int_parsing" | "int_type" | "int_from_float":
            return "it must be a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "it must be a number"
        case "bool_parsing" | "bool_type":
            return "it must be true or false"
        case "literal_error":
            return f"it must be {context['expected']}"
        case "string_type":
            return "it must be text, in quotes"
        case "path_type":
            return "it must be a path, in quotes"
        case "tuple_type":
            return "it must be a list"
        case "string_too_short":
            return "it must not be empty"
    return problem["msg"].removeprefix("Value error, ")
