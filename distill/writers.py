"""Runs writers, each in a process of its own, which share the shards among them."""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path

import torch

from outrider.engine.api import ReportProgress

from .recipe import Extent, Recipe
from .text import Writer, num_tokens_of, shard_path

_POLL_S = 0.5
_SHARE_OF_MEMORY = 0.9  # of a GPU, for all its writers
_MOST_WRITERS = 6
_LEAST_MEMORY_A_WRITER = 8  # times the weights, of which each writer has its own copy


class Ledger:
    """Hands out shards to writers in several processes, until there is enough text or time is
    up.
    """

    def __init__(
        self, folder: Path, num_tokens: int | None, until_s: float | None, *, shared: bool
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = folder
        self._num_tokens, self._until_s = num_tokens, until_s
        # A lock between processes starts another process: not needed for a single writer.
        self._lock = spawn.RLock() if shared else threading.RLock()
        self._next = spawn.RawValue("q", 0)
        self._has_started = spawn.RawValue("b", 0)
        self._written = spawn.RawValue("q", 0)  # tokens

    @property
    def num_written(self) -> int:
        return int(self._written.value)

    def claim(self, shard_s: float) -> int | None:
        """The number of a shard to write; `shard_s` is how long the last one took."""
        with self._lock:
            # Shards of an earlier run count, in order: the text is the same as without a break.
            while (path := shard_path(self._folder, self._next.value)).exists():
                self.count(num_tokens_of(path))
                self._next.value += 1
            enough = self._num_tokens is not None and self.num_written >= self._num_tokens
            late = self._until_s is not None and time.time() + shard_s > self._until_s
            if enough or (late and self._next.value > 0):
                return None
            self._next.value += 1
            return int(self._next.value) - 1

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Wrap a writer's start: the others wait for the kernels that the first one compiles."""
        with contextlib.ExitStack() as first:
            first.enter_context(self._lock)
            if self._has_started.value:
                first.close()
            yield
            self._has_started.value = 1

    def count(self, num_tokens: int) -> None:
        with self._lock:
            self._written.value += num_tokens


def write_text(
    recipe: Recipe,
    folder: Path,
    num_tokens: int | None,
    until_s: float | None,
    report: ReportProgress,
) -> Extent:
    """Write shards until there are `num_tokens`, or until `time.time` reaches `until_s`."""
    devices = devices_of(recipe.device)
    per_device = recipe.writers_per_device or num_writers(recipe.target, devices[0])
    writers = devices * per_device
    ledger = Ledger(folder, num_tokens, until_s, shared=len(writers) > 1)
    stage = "the target writes"
    report(stage, 0, num_tokens or 0)
    if len(writers) == 1:
        write_shards(recipe, folder, writers[0], ledger, 0.5)
    else:
        share = _SHARE_OF_MEMORY / per_device
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            len(writers), spawn, initializer=_begin, initargs=(ledger,)
        ) as pool:
            try:
                futures = [
                    pool.submit(_write_shards_of_pool, recipe, folder, device, share)
                    for device in writers
                ]
                while wait(futures, _POLL_S).not_done:
                    report(stage, min(ledger.num_written, (num_tokens or 1) - 1), num_tokens or 0)
                for future in futures:
                    future.result()
            except KeyboardInterrupt:
                # The pool would wait until they have written all.
                for writer in multiprocessing.active_children():
                    writer.kill()
                raise
    report(stage, num_tokens or 1, num_tokens or 1)
    return Extent(_num_shards(folder, num_tokens))


def num_writers(target: str, device: str) -> int:
    """How many processes share a device. On a GPU, a step of a small target takes less time than
    its bookkeeping, which each process does on its own core.
    """
    if not device.startswith("cuda"):
        return 1
    weights_bytes = sum(file.stat().st_size for file in Path(target).glob("*.safetensors"))
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    fitting = device_bytes // max(1, _LEAST_MEMORY_A_WRITER * weights_bytes)
    return max(1, min(_MOST_WRITERS, fitting))


def _num_shards(folder: Path, num_tokens: int | None) -> int:
    """How many shards, in order and without a gap, make up `num_tokens`: the same for every run."""
    num_shards = total = 0
    while (path := shard_path(folder, num_shards)).exists():
        if num_tokens is not None and total >= num_tokens:
            break
        total += num_tokens_of(path)
        num_shards += 1
    return num_shards


def write_shards(
    recipe: Recipe, folder: Path, device: str, ledger: Ledger, share_of_memory: float
) -> None:
    """Write the shards that the ledger hands out."""
    with ledger.first_alone():
        writer = Writer(recipe, device, share_of_memory)
    shard_s = 0.0
    while (shard := ledger.claim(shard_s)) is not None:
        start_s = time.time()
        ledger.count(writer.write(shard, shard_path(folder, shard)))
        shard_s = time.time() - start_s


_ledger: Ledger | None = None  # in a process of the pool: it can only be passed at its start


def _begin(ledger: Ledger) -> None:
    global _ledger
    _ledger = ledger
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Else a writer whose parent is killed would write on, beside those of the next run."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _write_shards_of_pool(recipe: Recipe, folder: Path, device: str, share: float) -> None:
    assert _ledger is not None
    write_shards(recipe, folder, device, _ledger, share)


def devices_of(device: str) -> list[str]:
    """`cuda` is every visible GPU; anything else is itself."""
    if device == "cuda":
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return [device]
