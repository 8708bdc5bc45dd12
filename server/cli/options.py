"""Options that several commands have, and the settings that come of them."""

import contextlib
import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..config.flags import flag_names
from ..config.model_names import looks_like_path
from ..config.settings import Settings
from ..config.settings_loader import SettingsError, load_settings, shipped_configs
from ..models.builtin import BUILTINS
from .errors import give_up

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE|NAME",
        help="TOML file of settings, or the name of a bundled config, such as `qwen3-8b-eagle3`.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; repeatable."),
]
ModelOrConfigArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A hub id, a directory, a GGUF file or a built-in name; or a config, as for --config.",
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="A smaller model of the same family, a head, or mtp. [default: the best known]",
        rich_help_panel="Draft",
    ),
]
# Of commands that ask a running server:
UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", show_default=True, help="URL of the server.")
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", envvar="OUTRIDER_API_KEY", help="Bearer key, if the server asks for one."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Model to ask. [default: the first one that is served]"),
]


def finite(given: str) -> float:
    """A number from 0 on that JSON has. Ranges of typer's let infinity pass, and older ones NaN."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(given)) < math.inf:
            return value
    raise typer.BadParameter(f"{given} is no number from 0 on.")


def missing_model(settings: Settings) -> str | None:
    """Says that a model is named by a path at which nothing is; None if neither model is."""
    for each in (settings.target.model, settings.draft.model):
        if each and looks_like_path(each) and not Path(each).expanduser().exists():
            return f"{each!r} does not exist (looked at {Path(each).expanduser().absolute()})"
    return None


def pair_settings(
    model: str | None,
    draft: str | None,
    config: Path | None,
    assignments: Sequence[str] | None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of a command that takes MODEL, --draft, --config and --set.

    MODEL may itself be a config file: a path that ends in .toml, or the name of one of ours. A
    draft that is named is used, whatever proposer the file has; with one that is named as well and
    has no model, it is refused. `flags` are those of settings, by `section.key`.
    """
    flags = dict(flags or {})
    named: dict[str, object] = {"draft.model": draft}
    if draft is not None and not names_proposer(assignments, flags):
        named["speculation.proposer"] = "auto"
    if config is None and model is not None and _is_config(model):
        config = Path(model)
    elif model is not None and (nearest := _nearest_config(model)):
        give_up(f"no model or config {model!r}; did you mean the config {nearest!r}?", 2)
    elif model is not None and flags.get("target.model"):
        give_up("MODEL and --model name the same thing: give one of them", 2)
    else:
        named["target.model"] = model
    given = named | {key: value for key, value in flags.items() if value is not None}
    settings = settings_or_exit(config, assignments, given, flag_names() if flags else None)
    proposer = settings.speculation.proposer
    if draft is not None and {"auto", "draft_model"}.isdisjoint(proposer):
        give_up(
            f"--draft is of no use if speculation.proposer is {', '.join(proposer)}: add "
            "draft_model to it, or leave it out",
            2,
        )
    _check_source_settings(settings, flags)
    return settings


def _check_source_settings(settings: Settings, flags: Mapping[str, object]) -> None:
    """Refuse settings of a source of drafts that is not there: those of the command, and all of
    them if nothing says that the config's own source was turned off, as with --no-draft.
    """
    proposer = settings.speculation.proposer
    of_draft = "tensor_parallel", "revision", "dtype", "quantization", "head_layers"
    for source, called, is_own, keys in (
        (
            "draft_model",
            "a draft model",
            settings.draft.model is not None,
            (
                "speculation.num_speculative_tokens",
                *(f"draft.{name}" for name in (*of_draft, "attention_window")),
            ),
        ),
        (
            "suffix",
            "the source suffix",
            proposer == ("none",),
            ("speculation.suffix_min_tokens", "speculation.suffix_answers_mib"),
        ),
    ):
        for key in keys if {"auto", source}.isdisjoint(proposer) else ():
            section, name = key.split(".")
            part = getattr(settings, section)
            given, default = getattr(part, name), type(part).model_fields[name].default
            is_flag = flags.get(key) is not None
            if given not in (None, 0, default) and (is_flag or not is_own):
                shown = f"{flag_names()[key]} {given}" if is_flag else f"{key} = {given}"
                give_up(
                    f"{shown} is for {called} alone, and speculation.proposer is "
                    f"{', '.join(proposer)}: leave it out, or set --proposer auto",
                    2,
                )


def names_proposer(assignments: Sequence[str] | None, flags: Mapping[str, object]) -> bool:
    """Whether a command says by which sources to draft."""
    return flags.get("speculation.proposer") is not None or any(
        assignment.partition("=")[0].strip() == "speculation.proposer"
        for assignment in assignments or ()
    )


def _is_config(model: str) -> bool:
    return Path(model).suffix in (".toml", ".yaml", ".yml") or (
        model in shipped_configs() and not Path(model).exists()
    )


def _nearest_config(model: str) -> str | None:
    """The config whose name was misspelt, if `model` is close to one and can be nothing else."""
    if "/" in model or model in BUILTINS or Path(model).exists():
        return None
    return next(iter(difflib.get_close_matches(model, shipped_configs(), n=1, cutoff=0.8)), None)


def settings_or_exit(
    config: Path | None,
    assignments: Sequence[str] | None,
    flags: Mapping[str, object] | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> Settings:
    """Load the settings of a command; if they are wrong, say why and exit with status 2."""
    try:
        return load_settings(config, assignments or (), flags, flag_names=flag_names)
    except SettingsError as error:
        give_up(error, 2)
