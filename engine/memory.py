"""How many pages fit beside everything else that the engine keeps in memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import psutil
import torch

from .api import EngineInfo, NewRequest, ReportProgress, RequestOutput, SamplingParams
from .config import EngineConfig
from .models.pair import ModelPair
from .scheduling.scheduler import MAX_PROMPT_LOGITS
from .state.phase import padded_sizes
from .validation import MAX_LOGPROBS

GIB = 2**30
_SHORT_PROMPTS = (3, 7, 15)  # tokens; with a draft, rows that attention takes in different blocks


class Engine(Protocol):
    """What is rehearsed of an engine."""

    info: EngineInfo

    def allocate(self, num_pages: int, max_model_len: int) -> None: ...

    def capture(self, report: ReportProgress) -> None: ...

    def submit(self, requests: list[NewRequest]) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request_ids: list[str]) -> None: ...


class OutOfDeviceMemoryError(ValueError):
    """What was configured does not fit into the GPU; says by how much, and what to change."""


def left_bytes(
    device: torch.device, utilization: float, *, step_bytes: int, freed_bytes: int
) -> int:
    """What may be allocated on a GPU so that a step of so much fits beside it, once `freed_bytes`
    are freed: of this process's share, and of what others there leave. Raises
    OutOfDeviceMemoryError.
    """
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    free_bytes += freed_bytes
    # Not what is missing of the whole: another process may be loading at this moment.
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


def measure_pages(
    engine: Engine, pair: ModelPair, config: EngineConfig, report: ReportProgress
) -> int:
    """Pages for what is left of the memory: on a GPU beside the largest step and all graphs, both
    of which are made for that once, over few pages.
    """
    # More than every seat at full length would only cache prefixes; one page is a dummy.
    most = config.scheduler.max_num_seqs * pair.num_pages_of(pair.max_model_len) + 1
    device = torch.device(config.device)
    if device.type == "cpu":
        available_bytes = psutil.virtual_memory().available
        return min(most, int(available_bytes * config.cache.memory_fraction) // pair.page_bytes)
    report("measuring the largest step", 0, 1)
    step_bytes = largest_step_bytes(engine, pair, config)
    if not config.enforce_eager:
        engine.capture(lambda stage, done, total: None)
    num_bytes = left_bytes(
        device,
        config.gpu_memory_utilization,
        step_bytes=step_bytes,
        freed_bytes=engine.info.cache_bytes,  # the few pages
    )
    num_pages = num_bytes // pair.page_bytes
    return num_pages if config.cache.prefix_caching else min(most, num_pages)


def largest_step_bytes(engine: Engine, pair: ModelPair, config: EngineConfig) -> int:
    """What the largest step that can be scheduled takes while it runs, by running it."""
    device = torch.device(config.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_largest_step(engine, pair, config)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfDeviceMemoryError(
            f"a step of {config.scheduler.max_num_batched_tokens} rows does not fit beside the "
            f"weights; lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs ({error})"
        ) from None
    peak_bytes = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak_bytes - torch.cuda.memory_reserved(device)


def run_largest_step(engine: Engine, pair: ModelPair, config: EngineConfig) -> None:
    """Prompts that fill a step, alone; then such prompts beside seats that decode with every draft,
    and one that asks for its prompt's logprobs. All ask for what gathers and copies logits.

    Between the two, short prompts of ever fewer sequences. On the way, kernels are compiled for
    which the first requests would have to wait.
    """
    num_rows, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    k = engine.info.num_speculative_tokens
    plain = SamplingParams(
        max_tokens=2 * (k + 1) + 1,  # of two steps, the last of which ends none
        num_speculative_tokens=1,
        ignore_eos=True,
    )
    asks_all = replace(
        plain,
        top_p=0.9,
        logit_bias={0: 1.0},
        logprobs=MAX_LOGPROBS,
        num_speculative_tokens=k,
    )
    bans = {
        "allowed_token_ids": tuple(range(min(64, pair.vocab_size))),
        "bad_words": ((0, 1),),
        "min_tokens": 1,
    }
    edits = bans | {"repetition_penalty": 1.1}
    longest = pair.max_model_len - 1
    lens = [min(longest, num_rows - first) for first in range(0, num_rows, longest)][:num_seqs]
    alone = _requests("alone", lens, asks_all, edits)
    shorts = [
        _requests(
            f"{n} of {length}", [min(length, longest, max(1, num_rows // n))] * n, plain, bans
        )
        for n in padded_sizes(num_seqs)
        for length in reversed(_SHORT_PROMPTS)
    ]
    decoding = _requests("decoding", [1] * max(0, num_seqs - len(lens) - 1), asks_all, edits)
    scored_len = min(longest, MAX_PROMPT_LOGITS + 1)
    scores = replace(asks_all, prompt_logprobs=MAX_LOGPROBS)
    scored = _requests("scored", [scored_len], scores, edits)
    beside = (scored + _requests("beside", lens, asks_all, edits))[: num_seqs - len(decoding)]
    num_pages = max(
        sum(
            pair.num_pages_of(len(new.prompt_token_ids) + new.params.max_tokens) for new in together
        )
        for together in (alone, shorts[0], [*decoding, *beside])
    )
    engine.allocate(num_pages + 1, pair.max_model_len)  # one is a dummy
    for together in ([alone], *([short] for short in shorts), [decoding, beside]):
        for requests in together:
            engine.submit(requests)
            engine.step()
        engine.abort([new.request_id for requests in together for new in requests])


def _requests(
    name: str, prompt_lens: list[int], params: SamplingParams, edits: Mapping[str, Any]
) -> list[NewRequest]:
    """Sequences that share no pages, the first of which asks for edits, too: to ask takes time."""
    return [
        NewRequest(
            request_id=f"{name} {i}",
            prompt_token_ids=[0] * prompt_len,
            params=replace(params, **edits) if i == 0 else params,
            cache_salt=f"{name} {i}",
        )
        for i, prompt_len in enumerate(prompt_lens)
    ]
