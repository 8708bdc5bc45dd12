"""Memory of this process's GPU: what a step takes, and what is left."""

import torch

GIB = 2**30


class OutOfDeviceMemoryError(ValueError):
    """The configuration does not fit; the message says what to change."""


def is_full(error: RuntimeError) -> bool:
    """Whether a GPU had no memory: for tensors or, which has no type, for a graph, a kernel or what
    a process needs there at first.

    Ending a capture that ran out of memory may fail with an error of its own.
    """
    causes = error, error.__context__
    is_named = any(isinstance(each, torch.OutOfMemoryError) for each in causes)
    return is_named or "out of memory" in str(error)


def no_room(error: RuntimeError) -> OutOfDeviceMemoryError:
    """What to say of a GPU that was full while models were loaded there."""
    return OutOfDeviceMemoryError(
        "the models do not fit on the GPU, with what sequences keep there: end other programs on "
        'it (nvidia-smi), or take smaller models, fewer bits (target.quantization = "fp8"), more '
        "GPUs (target.tensor_parallel), fewer sequences (scheduler.max_num_seqs) or a smaller KV "
        f"cache (cache.num_pages): {str(error).partition(chr(10))[0]}"
    )


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


def begin_measuring(device: torch.device) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def measured_bytes(device: torch.device) -> int:
    """Temporary memory since `begin_measuring`."""
    peak_bytes = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak_bytes - torch.cuda.memory_reserved(device)
