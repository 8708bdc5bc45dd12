"""How many sequences run at once, where layers keep a state of each, and how long each may be."""

from dataclasses import replace

import torch

from .config import ConfigError, EngineConfig
from .gpu_memory import GIB, left_bytes
from .host_memory import available_bytes
from .models.pair import ModelPair

_SEATS_SHARE = 0.5  # of the memory beside weights and steps; the KV cache gets the rest
# Of a GPU, for graphs and the largest step, which cannot be measured before there are seats. As
# counted from shapes: 3 GiB with Qwen3.6, whose vocabulary is large. Each token id takes a logit in
# 1536 rows of a step and in 1024 that graphs share, and copies in 16 and in 32 bits of 544 rows.
_STEP_BYTES, _STEP_BYTES_PER_TOKEN_ID = GIB, 8_400


def seated(
    config: EngineConfig, pair: ModelPair, device: torch.device, max_drafts: int
) -> EngineConfig:
    """The same with fewer sequences at once, if it may have fewer and their states need it.

    A hybrid keeps a state of each sequence, and as many of prefixes. Those of 256 sequences take 90
    GiB with Qwen3.6-27B, whose weights take 51. A head's windows come on top: 80 MiB a sequence
    with some. Raises OutOfDeviceMemoryError if the weights leave nothing.
    """
    scheduler = config.scheduler
    bytes_per_seq = pair.target.bytes_per_slot(max_drafts) * (1 + pair.caches_prefixes)
    if not scheduler.may_lower_seqs or bytes_per_seq == 0:
        return config
    specs = [group.spec for group in pair.groups]
    bytes_per_seq += sum(spec.bytes_per_token * (spec.window or 0) for spec in specs)
    if device.type == "cpu":
        taken_bytes = config.speculation.answers_bytes  # later
    else:
        taken_bytes = _STEP_BYTES + _STEP_BYTES_PER_TOKEN_ID * pair.vocab_size
    room_bytes = _left_beside_weights(config, device) - taken_bytes
    most = max(1, int(_SEATS_SHARE * room_bytes) // bytes_per_seq)
    num_seqs = min(scheduler.max_num_seqs, most)
    return replace(config, scheduler=replace(scheduler, max_num_seqs=num_seqs))


def longest_in_slots(config: EngineConfig, pair: ModelPair, device: torch.device) -> int:
    """Tokens of a sequence that slots need room for: those of a model with a million positions
    would take a gigabyte, also where the KV cache never holds so many.

    What is set stays as it is: it is refused later if the cache does not hold it.
    """
    bytes_per_token = pair.groups[0].spec.bytes_per_token
    if config.max_model_len is not None or bytes_per_token == 0:
        return pair.max_model_len
    if config.cache.num_pages is not None:
        most = (config.cache.num_pages - 1) * pair.page_size  # one page is a dummy
    else:
        most = _left_beside_weights(config, device) // bytes_per_token
    return min(pair.max_model_len, max(1, most))


def check_seats(config: EngineConfig, pair: ModelPair, longest: int, max_drafts: int) -> None:
    """Refuse more sequences at once than the memory of a CPU has room for, before any of it is
    taken: each has room for `longest` tokens, the pages of these, and what layers keep of it.

    Raises ConfigError saying how many fit.
    """
    num_seqs, of_tokens = config.scheduler.max_num_seqs, longest + 2 * (max_drafts + 1)
    of_pages = len(pair.groups) * -(-of_tokens // pair.page_size)
    of_states = pair.target.bytes_per_slot(max_drafts) * (1 + pair.caches_prefixes)
    bytes_per_seq = 4 * (of_tokens + of_pages) + of_states  # ids of 32 bits
    most = available_bytes() // (bytes_per_seq * config.target.tensor_parallel)
    if num_seqs > most:
        raise ConfigError(
            f"scheduler.max_num_seqs is {num_seqs}, but the machine has room for what {most} "
            "sequences keep beside their KV cache: set it to fewer, or leave it out"
        )


def _left_beside_weights(config: EngineConfig, device: torch.device) -> int:
    """Bytes that states, steps and KV cache may take together."""
    if device.type == "cpu":
        return left_for_caches(config)
    return left_bytes(device, config.gpu_memory_utilization, step_bytes=0, freed_bytes=0)


def left_for_caches(config: EngineConfig) -> int:
    """Bytes that states and KV cache of each rank may take on a CPU, once the models are loaded."""
    # Ranks share the memory of one machine.
    share = config.cache.memory_fraction / config.target.tensor_parallel
    # What is asked of the host is not written to yet, so it counts as free.
    return int((available_bytes() - config.cache.host_bytes) * share)
