"""`outrider serve`: a model behind HTTP."""

from typing import Annotated

import typer

from .errors import give_up
from .options import (
    ConfigOption,
    DraftOption,
    ModelOrConfigArgument,
    SetOption,
    missing_model,
    names_proposer,
    pair_settings,
)
from .setting_flags import DRAFT, with_setting_flags

EXAMPLES = """\
\b
Examples:
  outrider serve                                the default pair
  outrider serve Qwen/Qwen3-8B                  a hub model and its best draft
  outrider serve ./my-model --draft ./my-draft  directories, or GGUF files
  outrider serve Qwen/Qwen3-8B --no-draft       plain decoding
  outrider serve qwen3-8b-eagle3                a bundled config, or PATH.toml
"""


def _serve(
    model: ModelOrConfigArgument = None,
    draft: DraftOption = None,
    no_draft: Annotated[
        bool,
        typer.Option("--no-draft", help="Decode plainly, without drafts.", rich_help_panel=DRAFT),
    ] = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
    flags: dict[str, object] | None = None,
) -> None:
    """Serve a model over HTTP, sped up by a draft, until Ctrl-C or SIGTERM.

    MODEL is a hub id, a directory, a GGUF file or a built-in name; without it,
    the default pair is served. Without --draft, the best known draft for the
    model is used; the server says which one, and why.

    Every setting has a flag, and all can be set in a config file:
    `outrider config --example` prints them.
    """
    flags = dict(flags or {})
    k = flags["speculation.num_speculative_tokens"]
    asks_for_drafts = draft is not None or k not in (None, "0")
    if no_draft and (asks_for_drafts or names_proposer(assignments, flags)):
        give_up("--no-draft excludes --draft, -k and --proposer", 2)
    if no_draft:
        flags["speculation.proposer"] = "none"
    settings = pair_settings(model, draft, config, assignments, flags)
    if missing := missing_model(settings):  # before libraries are loaded for seconds
        give_up(missing, 1)
    # Only now: it brings in the whole server, which the other commands need not wait for.
    from .serving import serve

    raise typer.Exit(serve(settings))


serve_command = with_setting_flags(_serve, own={"draft.model"})
