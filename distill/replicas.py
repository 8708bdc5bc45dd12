"""Training on every device: a replica each, on its own share of the text, gradients summed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from transformers import PreTrainedModel

from outrider.engine.api import ReportProgress
from outrider.engine.models.admission import resolve_dtype
from outrider.engine.models.architectures import load_config
from outrider.engine.models.pretrained import load_pretrained

from .draft import draft_to_train
from .lessons import read
from .recipe import Extent, Recipe
from .rows import TrainingRows
from .text import Conversation, load_shards, shard_path, text_folder
from .train import HeldOut, Trainer, time_step, train
from .train_head import HeadTrainer, kept_states
from .writers import devices_of

EXTENT_FILE = "plan.json"  # in the work folder
_REPORT_STEPS = 10
_POLL_S = 0.2
_HELD_OUT_ONE_OF, _MOST_HELD_OUT = 20, 256  # conversations
_SAVING_S = 30.0  # a checkpoint, at most
_TRAINING_SHARE = 0.95  # of the time that is left: what follows takes some too


def train_draft(
    recipe: Recipe, work: Path, extent: Extent, until_s: float | None, report: ReportProgress
) -> tuple[HeldOut, Extent]:
    """Train on the recipe's text on every device, and save the draft to `work / "draft"`.

    If the extent has no number of steps yet, as many are taken as fit until `until_s`
    (`time.time`), but no more than `recipe.passes` over the text; the extent is saved then.
    Returns how the draft does on held-out text, and the extent.
    """
    devices = devices_of(recipe.device)
    train_replica = partial(_train_replica, recipe, work, extent, until_s, devices)
    if len(devices) == 1:
        return train_replica(0, report)
    (work / "meeting").unlink(missing_ok=True)
    trained: tuple[HeldOut, Extent] = run_replicas(
        _train_in_process, len(devices), (train_replica,), report
    )
    return trained


def run_replicas(
    replica: Callable[..., None], world: int, args: tuple[object, ...], report: ReportProgress
) -> Any:
    """Run `replica(rank, said, *args)` in a process for each rank, until all are done.

    What a replica puts into the queue `said` is progress to report or, as ("done", result), what is
    returned.

    If a replica fails, the others would wait for it on their GPUs for ever. So none runs in this
    process, and all are ended when the first fails. Raises ProcessRaisedException, which has its
    traceback, or ProcessExitedException. On KeyboardInterrupt the first replica gets SIGTERM, and
    time to save its work.
    """
    said: Queue[tuple[Any, ...]] = multiprocessing.get_context("spawn").Queue()
    replicas = start_processes(replica, (said, *args), world, join=False, start_method="spawn")
    result = None
    try:
        is_over = False
        while not is_over:
            is_over = replicas.join(_POLL_S)
            try:
                while True:
                    match said.get(timeout=_POLL_S if is_over else 0):
                        case ("done", result):
                            pass
                        case progress:
                            report(*progress)
            except Empty:
                pass
    except KeyboardInterrupt:
        replicas.processes[0].terminate()
        replicas.processes[0].join(_SAVING_S)
        raise
    finally:
        for process in replicas.processes:
            process.kill()
    return result


def _train_in_process(
    rank: int,
    said: "Queue[tuple[Any, ...]]",
    train_replica: Callable[[int, ReportProgress], tuple[HeldOut, Extent]],
) -> None:
    """One of several replicas: the first of them reports and has the result."""
    os.setsid()  # Ctrl-C must not reach us: the first could not save without the others
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def report(*progress: object) -> None:
        if rank == 0:
            said.put(progress)

    trained = train_replica(rank, report)
    if rank == 0:
        said.put(("done", trained))


def _train_replica(
    recipe: Recipe,
    work: Path,
    extent: Extent,
    until_s: float | None,
    devices: list[str],
    rank: int,
    report: ReportProgress,
) -> tuple[HeldOut, Extent]:
    device, world = torch.device(devices[rank]), len(devices)
    if world > 1:
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", init_method=f"file://{work / 'meeting'}", rank=rank, world_size=world
        )
    text = text_folder(recipe, work)
    conversations = load_shards([shard_path(text, i) for i in range(extent.num_shards)])
    held_out_text, rest = parted(conversations)
    mine = rest[rank::world]

    report("the target reads", 0, len(mine))
    target = _load_target(recipe.target, device)
    read_tokens = recipe.reading_tokens
    kept = kept_states(recipe, target, sum(len(c.token_ids) for c in held_out_text + mine))
    held_out_lessons = read(target, held_out_text, read_tokens, boundaries=kept)
    lessons = read(target, mine, read_tokens, lambda n, m: report("the target reads", n, m), kept)

    def new_trainer() -> Trainer:
        if recipe.kind != "draft":
            trainer: Trainer = HeadTrainer(
                recipe, target, torch.cat([c.token_ids for c in conversations])
            )
        else:
            trainer = Trainer(recipe, draft_to_train(target, recipe, device), target.dtype)
        if world > 1:
            for parameter in trainer.draft.parameters():
                dist.broadcast(parameter.data, src=0)
        return trainer

    rows = TrainingRows(lessons, recipe.row_tokens, recipe.seed)
    rows_per_step = max(1, recipe.batch_tokens // recipe.row_tokens // world)
    num_steps = extent.num_steps
    if num_steps is None:
        assert until_s is not None
        step_s = time_step(new_trainer(), lessons, rows, rows_per_step)
        fitting = int((until_s - time.time()) * _TRAINING_SHARE / step_s)
        most = recipe.passes * rows.num_tokens // (rows_per_step * recipe.row_tokens)
        num_steps = _agreed(max(1, min(fitting, most)), device)
        extent = replace(extent, num_steps=num_steps)
        if rank == 0:
            extent.save(work / EXTENT_FILE)
    trainer = new_trainer()
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.restore(checkpoint)

    def progress(step: int) -> None:
        if step % _REPORT_STEPS == 0 or step == num_steps:
            report("the draft trains", step, num_steps)

    train(
        trainer,
        lessons,
        rows,
        rows_per_step,
        num_steps,
        checkpoint if rank == 0 else None,
        progress,
    )
    held_out = trainer.evaluate(held_out_lessons)
    if rank == 0:
        trainer.save_model(work / "draft")
    if world > 1:
        dist.destroy_process_group()
    return held_out, extent


def parted(conversations: list[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to hold out, and the others.

    They are taken from everywhere, since a shard's kinds of text lie one behind the other.
    """
    every = max(_HELD_OUT_ONE_OF, -(-len(conversations) // _MOST_HELD_OUT))
    rest = [c for i, c in enumerate(conversations) if i % every]
    return conversations[::every], rest


def _agreed(number: int, device: torch.device) -> int:
    """The first replica's number, everywhere."""
    if not dist.is_initialized():
        return number
    shared: Tensor = torch.tensor(number, device=device)
    dist.broadcast(shared, src=0)
    return int(shared)


def _load_target(path: str, device: torch.device) -> PreTrainedModel:
    hf_config = load_config(path)
    dtype = resolve_dtype("auto", hf_config, device)
    model = load_pretrained(Path(path), hf_config, device, dtype=dtype)
    model.eval().requires_grad_(False)
    return model
