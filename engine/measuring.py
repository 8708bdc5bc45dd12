"""How many KV cache pages fit in memory beside everything else that the engine holds."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .api import ReportProgress
from .config import EngineConfig
from .host_memory import available_bytes
from .worker import Worker

GIB = 2**30


class OutOfDeviceMemoryError(ValueError):
    """The configuration does not fit; the message says what to change."""


def left_bytes(
    device: torch.device, utilization: float, *, step_bytes: int, freed_bytes: int
) -> int:
    """Bytes that may still be allocated on a GPU, with `step_bytes` kept back for a step.

    Bounded by this process's share of the GPU and by what other processes leave free.
    `freed_bytes` are allocated now but will be freed first. Raises OutOfDeviceMemoryError.
    """
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    free_bytes += freed_bytes
    # Not total - free: another process may be loading its model at this moment.
    kept_bytes = torch.cuda.memory_reserved(device) - freed_bytes
    allowed_bytes = int(utilization * total_bytes)
    bytes_left = min(allowed_bytes - kept_bytes, free_bytes) - step_bytes
    if bytes_left > 0:
        return bytes_left
    raise OutOfDeviceMemoryError(
        f"no memory is left for the KV cache: engine.gpu_memory_utilization allows "
        f"{allowed_bytes / GIB:.2f} GiB, of which weights, state and graphs take "
        f"{kept_bytes / GIB:.2f} and the largest step {step_bytes / GIB:.2f}; "
        f"{free_bytes / GIB:.2f} GiB are free. Raise gpu_memory_utilization, lower "
        "scheduler.max_num_batched_tokens or scheduler.max_num_seqs, or take smaller models"
    )


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
        room_bytes = int(available_bytes() * config.cache.memory_fraction)
        if (state_bytes := worker.state_bytes) >= room_bytes:
            num_seqs = config.scheduler.max_num_seqs
            raise OutOfDeviceMemoryError(
                f"the states of {num_seqs} sequences take {state_bytes / GIB:.2f} GiB, and "
                f"cache.memory_fraction leaves {room_bytes / GIB:.2f} GiB for them and the KV "
                "cache; lower scheduler.max_num_seqs, or raise cache.memory_fraction"
            )
        return min(most, worker.budget.most_within(room_bytes - state_bytes))
    report("measuring the largest step", 0, 1)
    step_bytes = largest_step_bytes(worker, config)
    if not config.enforce_eager:
        worker.capture(report)
    num_bytes = left_bytes(
        worker.device,
        config.gpu_memory_utilization,
        step_bytes=step_bytes,
        freed_bytes=worker.budget.num_bytes(1),
    )
    num_pages = worker.budget.most_within(num_bytes)
    return num_pages if pair.caches_prefixes else min(most, num_pages)


def largest_step_bytes(worker: Worker, config: EngineConfig) -> int:
    """Temporary memory of the largest step that can be scheduled, measured by running it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(worker.device)
    with naming_what_to_lower(config):
        worker.rehearse()
    peak_bytes = torch.cuda.max_memory_reserved(worker.device)
    torch.cuda.empty_cache()
    return peak_bytes - torch.cuda.memory_reserved(worker.device)


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
