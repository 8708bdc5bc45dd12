"""How many pages the KV cache gets."""

import psutil
import torch

from outrider.engine.config import CacheConfig


def choose_num_pages(
    config: CacheConfig, bytes_per_token: int, max_useful_pages: int, device: torch.device
) -> int:
    """Pages to allocate: as configured, else what fits the configured share of free memory.

    Call it once the weights are loaded. `max_useful_pages` is what all seats at full length take.
    """
    if config.num_pages is not None:
        return config.num_pages
    budget_bytes = int(free_memory_bytes(device) * config.memory_fraction)
    return min(max_useful_pages, budget_bytes // (bytes_per_token * config.page_size_tokens))


def free_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
