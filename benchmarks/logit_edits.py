"""What each edit of logits costs in a step: microseconds on this machine, on a GPU if there is one.

    python benchmarks/logit_edits.py [--batch 8,64] [--k 4] [--vocab 151936] [--prompt 1000]

A step edits the k + 1 rows of the target of each request that asks for it, and B rows of each of
the draft's k passes. The columns are for every request of the batch and for one of them, launched
one by one: in a graph the host's part is gone. The last lines time the verification behind it:
edited rows are verified in float32.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import NoRepeatNGramLogitsProcessor

from outrider.engine.api import NewRequest, ProcessorChoice, SamplingParams, ThinkingBudget
from outrider.engine.logit_edits import LogitEdits, RequestRows
from outrider.engine.request import Request
from outrider.engine.state.slots import Slots
from outrider.kernels.verify.sampling import Rule, Sampling
from outrider.kernels.verify.step import SlotContents
from outrider.kernels.verify.verify import verify

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
OUTPUT_TOKENS = 200

FEATURES: dict[str, dict[str, object]] = {
    "penalties": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
    "logit_bias, 300 tokens": {"logit_bias": {100 + i: 1.0 for i in range(300)}},
    "min_tokens": {"min_tokens": 1000, "stop_token_ids": (5, 6)},
    "allowed_token_ids, 1000": {"allowed_token_ids": tuple(range(50, 1050))},
    "bad_words, 100": {"bad_words": tuple((i, i + 1, i + 2) for i in range(100))},
    "thinking_token_budget": {
        "thinking": ThinkingBudget(num_tokens=100, open_token_id=0, close_token_id=7, begun=True)
    },
    "a processor, in Python": {"logits_processors": (ProcessorChoice("no_repeat"),)},
}
FEATURES["everything"] = {name: value for of in FEATURES.values() for name, value in of.items()}


def request(prompt: list[int], asked: dict[str, object]) -> Request:
    params = SamplingParams(max_tokens=4000, **asked)  # type: ignore[arg-type]
    made = Request(NewRequest(request_id="", prompt_token_ids=prompt, params=params))
    if params.logits_processors:
        made.logits_processors = [("no_repeat", NoRepeatNGramLogitsProcessor(3))]
    return made


def median_us(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median time of each call, all of them in turn, so that all meet the same machine."""
    # On a CPU, time that others take on a busy machine does not count.
    clock = time.perf_counter if DEVICE.type == "cuda" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in calls}
    until = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < until or len(times[next(iter(calls))]) < 4:
        for name, call in calls.items():
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            start = clock()
            call()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((clock() - start) * 1e6)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def edit_calls(
    batch: int, k: int, vocab: int, prompt_len: int, logits: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Of each feature, the edit of a step's target rows: of all requests, and of one."""
    rng = np.random.default_rng(0)
    width = prompt_len + OUTPUT_TOKENS + k + 1
    tokens_np = rng.zipf(1.3, (batch + 1, width)).clip(max=vocab) - 1
    rows = RequestRows.in_turn(np.arange(batch), np.full(batch, k + 1))
    calls: dict[str, Callable[[], object]] = {}
    for name, asked in FEATURES.items():
        for kind, num_asking in (("all", batch), ("one", 1)):
            slots = Slots(batch, width, k, 16, DEVICE, vocab)
            slots.token_ids[:, :width] = torch.from_numpy(tokens_np)
            slots.num_tokens.fill_(prompt_len + OUTPUT_TOKENS)
            edits = LogitEdits(slots)
            seated = []  # slots do not keep requests alive
            for slot, tokens in enumerate(tokens_np[:num_asking].tolist()):
                made = request(tokens[:prompt_len], asked)
                made.token_ids += tokens[prompt_len : prompt_len + OUTPUT_TOKENS]
                made.slot, slots.requests[slot] = slot, made
                edits.seat(made)
                seated.append(made)
            asking = rows.take(rows.slot_np < num_asking)
            packed = torch.from_numpy(asking.packed(len(asking.row_np), slots.dummy)).to(DEVICE)
            at = RequestRows.unpack(packed, len(asking.row_np), slots.num_tokens)
            calls[f"{name}|{kind}"] = lambda edits=edits, at=at, asking=asking, _=seated: (
                edits.apply(logits, at, asking)
            )
    return calls


def verify_calls(
    batch: int, k: int, vocab: int, logits: torch.Tensor
) -> dict[str, Callable[[], object]]:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=DEVICE)

    sampling = Sampling(
        full(1.0, torch.float32),
        full(0, torch.int32),
        full(1.0, torch.float32),
        full(0.0, torch.float32),
        torch.arange(batch, device=DEVICE),
        full(int(Rule.TOKEN), torch.int32),
    )
    cu_rows = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * (k + 1)
    drafts = torch.randint(0, vocab, (batch, k + 1), dtype=torch.int32, device=DEVICE)
    slot = torch.arange(batch, device=DEVICE)
    # Without known tokens, so that no call moves them on; the drafts are random in every one.
    slots = SlotContents(drafts, torch.zeros_like(slot), sampling)
    return {
        str(x.dtype): lambda x=x: verify(
            x, cu_rows, slots, slot, full(k, torch.int32), k, None, vocab, filters=False
        )
        for x in (logits, logits.float())
    }  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=numbers, default=[8, 64])
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring, for each figure")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(
        f"{name}, k = {args.k}, V = {args.vocab}, {DTYPE}, {args.prompt} + {OUTPUT_TOKENS} tokens"
    )
    for batch in args.batch:
        logits = torch.randn(batch * (args.k + 1), args.vocab, device=DEVICE).to(DTYPE)
        us = median_us(edit_calls(batch, args.k, args.vocab, args.prompt, logits), args.seconds)
        print(f"\n{f'B = {batch}, edits of the target rows, us':<44}{'all':>10}{'one of B':>10}")
        for feature in FEATURES:
            print(f"{feature:<44}{us[f'{feature}|all']:>10.0f}{us[f'{feature}|one']:>10.0f}")
        us = median_us(verify_calls(batch, args.k, args.vocab, logits), args.seconds)
        for dtype, value in us.items():
            print(f"{f'verification of {dtype}':<44}{value:>10.0f}")


if __name__ == "__main__":
    main()
