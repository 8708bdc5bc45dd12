"""What a worker needs before its first step: kernels, graphs, and as many pages as memory has room
for beside everything else.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import ROUND_CEILING, Context

import torch

from .api import ReportProgress
from .config import ConfigError, EngineConfig
from .gpu_memory import GIB, OutOfDeviceMemoryError, begin_measuring, left_bytes, measured_bytes
from .memory.host_tier import PageCopies
from .models.host_pages import host_pages_of
from .ranks.wire import Op
from .seats import left_for_caches
from .worker import Worker

_TWO_DIGITS_UP = Context(prec=2, rounding=ROUND_CEILING)  # so that what is named fits


def make_ready(worker: Worker, config: EngineConfig, report: ReportProgress) -> tuple[int, int]:
    """Allocate the KV cache, as large as fits if its size is not set; on a GPU compile all kernels
    and capture all graphs.

    Returns the number of pages, and the tokens of the longest sequence.
    """
    is_gpu = worker.device.type == "cuda"
    if is_gpu:
        worker.allocate(1)
        with naming_what_to_lower(config):
            worker.compile(report)
    if config.cache.host_gib:
        report("pinning host memory" if is_gpu else "allocating host memory", 0, 1)
        worker.host_pages = allocate_host_pages(worker, config)
    num_pages = config.cache.num_pages
    if num_pages is None:
        num_pages = measure_pages(worker, config, report)
    report("allocating the KV cache", 0, 1)
    max_model_len = worker.pair.longest_sequence(num_pages, worker.slots, config)
    worker.allocate(num_pages)
    if is_gpu and not config.enforce_eager:
        with naming_what_to_lower(config):
            worker.capture(report)
    return num_pages, max_model_len


def measure_pages(worker: Worker, config: EngineConfig, report: ReportProgress) -> int:
    """How many pages to allocate: as many as the memory has room for.

    On a GPU the dummy page alone must be allocated. The largest step is run over it and all graphs
    are captured, to learn what they take.
    """
    # Every slot at full length, and the dummy page; any more would only cache prefixes.
    pair = worker.pair
    pages_per_seq = -(-pair.max_model_len // pair.page_size)
    most = config.scheduler.max_num_seqs * pages_per_seq + 1
    if worker.device.type == "cpu":
        room_bytes = left_for_caches(config)
        if (state_bytes := worker.state_bytes) >= room_bytes:
            num_seqs = config.scheduler.max_num_seqs
            raise OutOfDeviceMemoryError(
                f"the states of {num_seqs} sequences{' and of prefixes' * pair.caches_prefixes} "
                f"take {state_bytes / GIB:.2f} GiB, and cache.memory_fraction leaves "
                f"{room_bytes / GIB:.2f} GiB for them and the KV cache; lower "
                "scheduler.max_num_seqs, or raise cache.memory_fraction"
            )
        return min(most, worker.budget.most_within(room_bytes - state_bytes))
    report("measuring the largest step", 0, 1)
    step_bytes = largest_step_bytes(worker, config)
    if not config.enforce_eager:
        with naming_what_to_lower(config):
            worker.capture(report)
    num_bytes = left_bytes(
        worker.device,
        config.gpu_memory_utilization,
        step_bytes=step_bytes,
        freed_bytes=worker.budget.num_bytes(1),
    )
    num_pages = worker.fewest_pages(worker.budget.most_within(num_bytes))
    return num_pages if pair.caches_prefixes else min(most, num_pages)


def largest_step_bytes(worker: Worker, config: EngineConfig) -> int:
    """Temporary memory of the largest step that can be scheduled, measured by running it."""
    begin_measuring(worker.device)
    worker.send_to_ranks(Op.MEASURE)
    with naming_what_to_lower(config):
        worker.rehearse()
    worker.send_to_ranks(Op.MEASURED)
    return measured_bytes(worker.device)


def allocate_host_pages(worker: Worker, config: EngineConfig) -> tuple[list[int], PageCopies]:
    """Allocate what `cache.host_gib` says: the pages of each group, and their memory.

    Raises ConfigError if it holds none, or cannot be pinned.
    """
    pair, given, of_all_ranks = worker.pair, config.cache.host_gib, worker.budget_of_all_ranks
    if not pair.caches_prefixes:
        raise ConfigError(
            f"cache.host_gib is {given:g}, but no prefixes are cached that it could keep: set it "
            "to 0"
        )
    states = pair.target if worker.slots.kept_states else None
    state_bytes = pair.target.bytes_per_slot(worker.slots.max_drafts) if states is not None else 0
    pages_per_state = max(1, config.cache.state_interval_tokens // pair.page_size)

    def num_states(num_pages: int) -> int:
        """As many as a prompt that fills the pages leaves, and one more."""
        return 1 + num_pages // pages_per_state if states is not None else 0

    def size(num_pages: int) -> int:
        of_states = num_states(num_pages) * state_bytes * config.target.tensor_parallel
        return of_all_ranks.num_bytes(num_pages) + of_states

    num_bytes = config.cache.host_bytes
    most_pages = of_all_ranks.most_within(num_bytes)
    num_pages = bisect_right(range(1, most_pages + 1), num_bytes, key=size)
    if num_pages < 1:
        least_gib = _TWO_DIGITS_UP.create_decimal_from_float(size(1) / GIB)
        raise ConfigError(
            f"cache.host_gib is {given:g}, which holds no page: set it to {float(least_gib):g} at "
            "least, or to 0"
        )
    counts = worker.budget.of_groups(num_pages)
    counts += [num_states(num_pages)] if states is not None else []
    try:
        own = host_pages_of(worker.device)(
            pair.groups, counts, pair.page_size, worker.device, states, state_bytes
        )
    except RuntimeError as error:
        raise ConfigError(
            f"{given:g} GiB of host memory cannot be pinned ({error}): lower cache.host_gib, or "
            "set it to 0"
        ) from error
    if worker.followers is None:
        return counts, own
    # The others may lack some, but not those of states.
    groups = [*range(len(worker.specs_of_others)), *range(len(pair.groups), len(counts))]
    shared = worker.followers.share_host_pages(
        own, worker.slots, {group: counts[group] for group in groups}, state_bytes, size(num_pages)
    )
    return counts, shared


@contextmanager
def naming_what_to_lower(config: EngineConfig) -> Iterator[None]:
    """Say which settings to lower if a step inside takes more memory than there is."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfDeviceMemoryError(
            f"a step of {config.scheduler.max_num_batched_tokens} rows does not fit beside the "
            f"weights; lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs ({error})"
        ) from None
