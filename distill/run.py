"""A whole distillation: the target writes, the draft trains, and a model directory appears."""

import contextlib
import errno
import fcntl
import json
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from outrider.engine.api import ReportProgress
from outrider.engine.models.admission import check_config, max_positions
from outrider.engine.models.architectures import load_config

from . import dflash, eagle3, mtp
from .card import write_card
from .draft import load_start
from .prompts import frame, load_tokenizer, user_turns
from .recipe import DistillError, Extent, Recipe, Size, TrainingBudget, damage_named
from .replicas import EXTENT_FILE, train_draft
from .text import longest_conversation, text_folder
from .train import HeldOut
from .whole_file import whole_file
from .writers import write_text

_VERSION = 3  # of what is kept: what another version left unfinished, this one cannot go on with
_WRITING_SHARE = 0.5  # of a budget of time: with less text, the draft would learn it by heart
_TARGET_FILES = ("LICENSE", "NOTICE", "generation_config.json")


def distill(recipe: Recipe, report: ReportProgress) -> HeldOut:
    """Make the draft of a recipe in `recipe.out`, completely or not at all.

    Work in progress is kept beside it, also on Ctrl-C and SIGTERM (KeyboardInterrupt); running the
    same recipe again continues from there. Raises DistillError.
    """
    out = Path(recipe.out).absolute()
    work = out.with_name(f".{out.name}.distilling")
    budget = TrainingBudget.parse(recipe.budget)
    Size.parse(recipe.size)
    _check(recipe, out)
    with _ended_as_by_ctrl_c(), _disk_errors_shown(out), _alone(work):
        extent_path = work / EXTENT_FILE
        _keep(
            asdict(recipe) | {"version": _VERSION},
            work / "recipe.json",
            f"{work} holds an unfinished run",
            "repeat that one to go on with it, or remove the folder",
            # Of a recipe whose text is not complete, all the rest may still be mended.
            all_but=() if extent_path.exists() else asdict(recipe).keys() - recipe.of_text().keys(),
        )
        with _clock(work / "spent.json") as start_s:
            if extent_path.exists():
                with damage_named(extent_path):
                    extent = Extent(**json.loads(extent_path.read_text()))
            else:
                until_s = start_s + budget.seconds * _WRITING_SHARE if budget.seconds else None
                num_tokens = -(-budget.tokens // recipe.passes) if budget.tokens else None
                text = text_folder(recipe, work)
                with _alone(text) if recipe.text else contextlib.nullcontext():
                    what = f"text: {text} holds text"
                    settings = recipe.of_text() | {"version": _VERSION}
                    _keep(settings, text / "text.json", what, "name another folder")
                    extent = write_text(recipe, text, num_tokens, until_s, report)
                extent.save(extent_path)
            if extent.num_steps is None and budget.tokens:
                num_steps = max(1, budget.tokens // recipe.batch_tokens)
                extent = replace(extent, num_steps=num_steps)
            until_s = start_s + budget.seconds if budget.seconds else None
            held_out, extent = train_draft(recipe, work, extent, until_s, report)
        _finish(recipe, extent, work / "draft", held_out)
        (work / "draft").rename(out)
        shutil.rmtree(work)
    return held_out


def _check(recipe: Recipe, out: Path) -> None:
    """Refuse what cannot succeed, before anything is written."""
    target = Path(recipe.target)
    if not (target / "config.json").is_file():
        raise DistillError(f"{target} is no model directory: it has no config.json")
    if recipe.kind == "eagle3" and recipe.start is not None:
        raise DistillError("start: a head begins from its target; leave it out")
    if recipe.head_steps < 1 or recipe.row_tokens <= 2 * recipe.head_steps:
        raise DistillError(f"head_steps is {recipe.head_steps}; it is 1 at least, and fits a row")
    if recipe.start is not None and not (Path(recipe.start) / "config.json").is_file():
        raise DistillError(f"start: {recipe.start} is no model directory: it has no config.json")
    if not 0 <= recipe.raw_share <= 1:
        raise DistillError(f"raw_share is {recipe.raw_share}; it is a share, from 0 to 1")
    if recipe.prompts is not None:
        user_turns(recipe.prompts)
    if out.exists():
        raise DistillError(f"{out} exists already; name a directory that does not, or remove it")
    if not out.parent.is_dir():
        raise DistillError(f"{out.parent} is no directory; make it first")
    if recipe.device.startswith("cuda") and not torch.cuda.is_available():
        raise DistillError("device is cuda, but torch finds no GPU here; leave it out for the CPU")
    _check_models(recipe)


def _check_models(recipe: Recipe) -> None:
    try:
        config = load_config(recipe.target)
    except (OSError, ValueError, KeyError) as error:
        raise DistillError(f"cannot read the config of {recipe.target}: {error}") from error
    check_config(config)
    framed = frame(load_tokenizer(recipe.target), recipe.target)
    longest, room = longest_conversation(recipe, framed), max_positions(config)
    if longest > room:
        raise DistillError(
            f"{recipe.target} has positions for {room} tokens, and conversations take up to "
            f"{longest}; in a recipe, lower max_prompt_tokens or max_answer_tokens"
        )
    match recipe.kind:
        case "eagle3":
            eagle3.check_target(config)
        case "mtp":
            mtp.check_head(recipe, config)
        case "dflash":
            dflash.check_head(recipe, config)
        case "draft" if recipe.start is not None:
            load_start(recipe.start, config, torch.device("cpu"))


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make a folder, and lock it against a second run."""
    try:
        folder.mkdir(exist_ok=True)
    except (FileNotFoundError, NotADirectoryError):
        raise DistillError(f"{folder.parent} is no directory; make it first") from None
    except FileExistsError:
        raise DistillError(f"{folder} is no directory; name another, or remove it") from None
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DistillError(f"another run is at work in {folder}") from None
        yield


def _keep(
    now: dict[str, Any], path: Path, what: str, advice: str, all_but: Collection[str] = ()
) -> None:
    """Write down the settings of what lies beside `path`; refuse if they were others before."""
    with damage_named(path):
        before = dict(json.loads(path.read_text())) if path.exists() else now
    if "version" in now:
        before.setdefault("version", 1)
    differing = [
        f"{name} was {was!r}"
        for name, was in before.items()
        if name not in all_but and now.get(name) != was
    ]
    if differing:
        raise DistillError(f"{what} of another recipe ({', '.join(differing)}); {advice}")
    with whole_file(path) as scratch:
        scratch.write_text(json.dumps(now, indent=2) + "\n")


@contextlib.contextmanager
def _clock(path: Path) -> Iterator[float]:
    """When the work would have begun had there been no breaks; `path` keeps the seconds it took."""
    with damage_named(path):
        start_s = time.time() - (json.loads(path.read_text()) if path.exists() else 0.0)
    try:
        yield start_s
    finally:
        with whole_file(path) as scratch:
            scratch.write_text(json.dumps(time.time() - start_s))


def _finish(recipe: Recipe, extent: Extent, folder: Path, held_out: HeldOut) -> None:
    """Add what belongs beside the weights: tokenizer, licence, card."""
    load_tokenizer(recipe.target).save_pretrained(folder)
    for name in _TARGET_FILES:
        if (Path(recipe.target) / name).exists():
            shutil.copyfile(Path(recipe.target) / name, folder / name)
    write_card(recipe, extent, held_out, folder)


@contextlib.contextmanager
def _disk_errors_shown(out: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # safetensors and torch.save have their own error types: only the message shows it,
        # if need be that of the error behind theirs.
        words = "".join(traceback.format_exception(error))
        if "No space left on device" in words or "Disk quota exceeded" in words:
            free_mb = shutil.disk_usage(out.parent).free // 10**6
            raise DistillError(
                f"the disk of {out.parent} has no room left ({free_mb} MB free); make some and "
                "run the same command again: it goes on from the last checkpoint"
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DistillError(f"cannot write beside {out}: {error.strerror}") from error
        raise
