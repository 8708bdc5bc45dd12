"""Tokens a second of a pair, and where a step's time goes, by batch size and k, on a GPU.

    python benchmarks/engine.py TARGET DRAFT [--batch 1 8 32 64] [--k 0 4] [--best-of 8]
    python benchmarks/engine.py TARGET HEAD --tokens-a-step 2.7 --quantization fp8
    python benchmarks/engine.py TARGET HEAD --once --best-of 0 --prompt-tokens 512 8192 131072 \
        --new-tokens 64 --batch 1 8 --sequences 1 --most-tokens 300000

Needs torch, triton and transformers only. Prompts are random token ids, 128 of them, and 256 tokens
are decoded, as in the tables of other engines this is compared with. Every line decodes the same
sequences, `--sequences` at least, one batch after the other: the share of accepted drafts varies
from one sequence to the next (at k = 4 its standard deviation is 0.04). One engine serves all k,
which every request names for itself; the best k of each line is found by measuring all up to
--best-of.

Tokens/s and a step's time are those of steps whose batch is full, until the first of its sequences
ends: what a server gives that has so many at all times. "To end" goes on until the last one has
ended, as a fixed set of prompts is timed: sequences with more accepted drafts end earlier, and
the rest is decoded in smaller batches, which plain decoding never does. The best k is best by
tokens/s. "Prefill too" is to the end as well, the clock started before the prompts. "First s" is
how long a batch's prompts take, until the last of its sequences has its first token.

DRAFT is a model, a head, or mtp: the head in the target's own checkpoint, or in the folder mtp
beside it, where published_shapes.py writes it. --k and --best-of must not go beyond what a head
drafts. With --tokens-a-step a step gives that many tokens on the
average, each draft with the same chance, whatever draft and target say: it times a head of random
weights, whose drafts nobody would accept. Nothing else changes: drafts are drawn and verified as
ever, and then the verdict is replaced. Such tables say so in their first line. With --at-k that
many are accepted in a step of this k, and more in one of more drafts, as with a real head.

The floor is that of the weights that the first GPU reads once a step. Draft, target and verify are
that GPU's time for their graphs in steps of a full batch, measured in a second pass over the same
text with a pause in front of each graph, so that no launch is waited for. Idle is the rest of the
step: the host's, and that of copies between the graphs.

Each line decodes three times: a little before, so that nothing happens for the first time; timed;
and for the parts. With --once it is timed alone, and the parts are left out: where a line takes
minutes, and for a first look. How far it has come is shown on stderr every few seconds.

With --kernels N each line is followed by the N kernels that take the GPU longest, per step: by the
profiler, over a few more steps of a full batch, and over the prompts of the batch. A kernel that is
launched early waits for the one in front; its time here begins when all that ended before it had.
"""

import argparse
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from set_acceptance import set_acceptance
from step_parts import Call, wrapped
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine
from outrider.engine.models.heads.chain import MarkovHead
from outrider.engine.models.heads.eagle3 import Eagle3Head
from outrider.engine.models.heads.mtp import MtpHead

PARTS = ("draft", "target", "verify")
MTP = "mtp"
PAGE_TOKENS = 16
SEARCH_TOKENS = 64  # decoded for each k that is tried
PROFILED_STEPS = 8
IDLE = "(idle)"
PROGRESS_S = 5.0  # between two lines of progress
PAUSE_CYCLES = 1_000_000  # about half a millisecond, in which a graph is launched


def build(args: argparse.Namespace) -> Engine:
    k = max(*args.k, args.best_of)
    # As many as the lines need: counting what fits would take a step of its own at every start.
    beside_prompt = max(args.new_tokens, SEARCH_TOKENS) + 4 * (k + 1)
    num_pages = 1 + max(
        batch * ((prompt + beside_prompt) // PAGE_TOKENS + 1) for prompt, batch in lines(args)
    )
    longest = max(prompt for prompt, _ in lines(args)) + beside_prompt
    return Engine(
        EngineConfig(
            target=ModelConfig(
                path=args.target,
                dtype=args.dtype,
                quantization=args.quantization,
                tensor_parallel=args.tensor_parallel,
            ),
            draft=ModelConfig(
                path=mtp_folder(args.target) if args.draft == MTP else args.draft,
                dtype=args.dtype,
                quantization=args.draft_quantization,
                is_mtp=args.draft == MTP,
            )
            if k
            else None,
            device=args.device,
            batch_invariant=args.batch_invariant,
            max_model_len=longest,
            cache=CacheConfig(
                page_size_tokens=PAGE_TOKENS,
                num_pages=num_pages,
                prefix_caching=False,
                dtype=args.cache_dtype,
            ),
            scheduler=SchedulerConfig(max_num_seqs=max(args.batch), max_num_batched_tokens=8192),
            speculation=SpeculationConfig(num_speculative_tokens=k, adaptive=False),
        ),
        Progress().stage,
    )


def lines(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Tokens of a prompt, and sequences at once."""
    every = product(args.prompt_tokens, args.batch)
    return [(prompt, batch) for prompt, batch in every if prompt * batch <= args.most_tokens]


def mtp_folder(target: str) -> str:
    """Where the MTP head of a target lies."""
    own = Path(target, MTP)
    return str(own if own.is_dir() else target)


class Progress:
    """Shows on stderr how far long work has come, every few seconds."""

    def __init__(self) -> None:
        self._start_s = self._shown_s = time.perf_counter()
        self._shown = ""

    def stage(self, stage: str, done: int, total: int) -> None:
        """Of the start; each stage is shown once at least."""
        if stage != self._shown:
            self._shown, self._shown_s = stage, 0.0
        self.show(lambda: f"{stage} {done}/{total}")

    def show(self, text: Callable[[], str]) -> None:
        now_s = time.perf_counter()
        if now_s - self._shown_s >= PROGRESS_S:
            self._shown_s = now_s
            print(f"  {now_s - self._start_s:6.1f} s  {text()}", file=sys.stderr, flush=True)


class Measured:
    """Sequences of one batch size, temperature and k, in an engine that does nothing else."""

    def __init__(
        self,
        engine: Engine,
        args: argparse.Namespace,
        prompt_tokens: int,
        batch: int,
        temperature: float,
        k: int,
    ) -> None:
        self._engine = engine
        self._batch, self._temperature, self._k = batch, temperature, k
        self._prompt_tokens = prompt_tokens
        self._vocab_size = engine.info.vocab_size  # once: it takes half a millisecond
        self._firsts = range(0, args.sequences, batch)  # of each batch
        self.tokens_per_s = self.to_end_per_s = self.prefill_too_per_s = 0.0
        self.first_token_s = self.step_s = self.acceptance = 0.0
        self._progress = Progress()
        self._wanted = 0  # tokens of all batches of a line

    def decode(self, new_tokens: int) -> None:
        """Decode all to their ends; the clock runs once a batch's prompts are computed."""
        num_tokens = num_full_tokens = num_full_steps = num_drafted = num_accepted = 0
        spent_s = full_s = whole_s = prompts_s = 0.0
        self._progress = Progress()
        self._wanted = self._engine.stats().generation_tokens
        self._wanted += len(self._firsts) * self._batch * new_tokens
        for first in self._firsts:
            prompts_start_s = time.perf_counter()
            self._start(first, new_tokens)
            before, start_s = self._engine.stats(), time.perf_counter()
            prompts_s += start_s - prompts_start_s
            num_full_steps += self._step_while_full()
            full_s += time.perf_counter() - start_s
            num_full_tokens += self._engine.stats().generation_tokens - before.generation_tokens
            while self._engine.has_work():
                self._engine.step()
                self._show()
            spent_s += time.perf_counter() - start_s
            whole_s += time.perf_counter() - prompts_start_s
            after = self._engine.stats()
            num_tokens += after.generation_tokens - before.generation_tokens
            num_drafted += sum(after.drafted_per_position) - sum(before.drafted_per_position)
            num_accepted += sum(after.accepted_per_position) - sum(before.accepted_per_position)
        self.tokens_per_s = num_full_tokens / full_s
        self.to_end_per_s = num_tokens / spent_s
        self.prefill_too_per_s = len(self._firsts) * self._batch * new_tokens / whole_s
        self.first_token_s = prompts_s / len(self._firsts)
        self.step_s = full_s / num_full_steps
        self.acceptance = num_accepted / max(1, num_drafted)

    def parts(self, new_tokens: int) -> dict[str, float]:
        """Seconds that each part takes of the GPU in a step of a full batch."""
        self._start(self._firsts[0], new_tokens)
        with graph_times(self._engine) as spent_s:
            num_steps = self._step_while_full()
        self._engine.abort([str(i) for i in range(self._firsts[0], self._batch)])
        return {part: sum(spent_s[part]) / num_steps for part in PARTS}

    def kernels(self, new_tokens: int) -> Iterator[tuple[str, int, list[tuple[float, int, str]]]]:
        """For the prompts, then for a few steps: how many steps, and of each kernel the
        milliseconds and launches of all steps, the longest first.
        """
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            num_steps = self._start(self._firsts[0], new_tokens)
            torch.cuda.synchronize()
        yield "prompts", num_steps, kernel_times(profiler)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED_STEPS):
                self._engine.step()
            torch.cuda.synchronize()
        yield "steps", PROFILED_STEPS, kernel_times(profiler)
        self._engine.abort([str(i) for i in range(self._firsts[0], self._batch)])

    def _start(self, first: int, new_tokens: int) -> int:
        """Step until each sequence of a batch has a token; returns the number of steps."""
        engine, num_steps = self._engine, 0
        for i in range(first, first + self._batch):
            generator = torch.Generator().manual_seed(i)
            prompt = torch.randint(
                2, self._vocab_size, (self._prompt_tokens,), generator=generator
            ).tolist()
            params = SamplingParams(
                max_tokens=new_tokens,
                temperature=self._temperature,
                seed=i,
                ignore_eos=True,
                num_speculative_tokens=self._k,
            )
            engine.submit([NewRequest(request_id=str(i), prompt_token_ids=prompt, params=params)])
        started: set[str] = set()
        while len(started) < self._batch:  # the first have more than one token by then
            started |= {output.request_id for output in engine.step() if output.token_ids}
            self._show()
            num_steps += 1
        return num_steps

    def _step_while_full(self) -> int:
        """Step until the first sequence of the batch ends; returns the number of steps."""
        num_steps, ended = 0, False
        while not ended:
            ended = any(output.finish_reason for output in self._engine.step())
            self._show()
            num_steps += 1
        return num_steps

    def _show(self) -> None:
        self._progress.show(self._left)

    def _left(self) -> str:
        left = self._wanted - self._engine.stats().generation_tokens
        return f"batch {self._batch}, k {self._k}: {left} tokens to go"


@contextmanager
def graph_times(engine: Engine) -> Iterator[dict[str, list[float]]]:
    """Seconds that the GPU takes for each graph that is replayed, by the part of the step."""
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
    spent_s: dict[str, list[float]] = defaultdict(list)
    current = ""
    replay = torch.cuda.CUDAGraph.replay
    calls: list[tuple[Any, str, str]] = [
        (engine.worker.proposer, "propose", "draft"),
        (engine.worker.proposer, "follow", "draft"),
        (engine.worker.scorer, "score", "target"),
        (engine.worker.verifier, "verify", "verify"),
    ]

    def labelled(call: Call, part: str) -> Call:
        def run(*args: Any) -> Any:
            nonlocal current
            current = part
            return call(*args)

        return run

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE_CYCLES)
        before.record()
        replay(graph)
        after.record()
        spans[current].append((before, after))

    torch.cuda.CUDAGraph.replay = timed
    try:
        with wrapped(calls, labelled):
            yield spent_s
    finally:
        torch.cuda.CUDAGraph.replay = replay
        torch.cuda.synchronize()
        for part, pairs in spans.items():
            spent_s[part] = [before.elapsed_time(after) / 1e3 for before, after in pairs]


def kernel_times(profiler: profile) -> list[tuple[float, int, str]]:
    """Milliseconds, launches and name of each kernel, and of nothing: the GPU's idle time."""
    spans = sorted(
        (event.time_range.end, event.time_range.start, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    spent_us: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    before = min((start for _, start, _ in spans), default=0.0)
    for end, start, name in spans:
        if start > before:
            spent_us[IDLE] += start - before
        spent_us[name] += end - max(start, before)
        count[name] += 1
        before = end
    return sorted(((us / 1e3, count[name], name) for name, us in spent_us.items()), reverse=True)


def bytes_read(engine: Engine, k: int) -> int:
    """Bytes of weights that the target's pass reads, and k drafts after it."""
    pair = engine.worker.pair
    num_bytes = pair.target.weight_bytes
    if pair.draft is not None:
        return num_bytes + k * pair.draft.weight_bytes
    head = pair.head
    if head is None or k == 0:
        return num_bytes
    if isinstance(head, MtpHead):
        return num_bytes + k * head.weight_bytes
    drafting = head.weight_bytes - head.fc.weight.num_bytes  # which is for the target's states
    if isinstance(head, Eagle3Head):
        return num_bytes + (k if head.mask is None else 1) * drafting
    chain = head.chain
    each = chain.output.weight.num_bytes if isinstance(chain, MarkovHead) else 0  # for a draft
    return num_bytes + drafting + k * each


def show_kernels(measured: Measured, args: argparse.Namespace) -> None:
    for what, num_steps, times in measured.kernels(args.new_tokens):
        all_ms = sum(ms for ms, _, _ in times)
        print(f"      {what}: {num_steps}, of {all_ms / num_steps:.3f} ms of the GPU each")
        for ms, count, name in times[: args.kernels]:
            share = f"{ms / num_steps:8.3f} ms  {ms / all_ms:5.1%}"
            each = f"{count / num_steps:7.1f} x {1e3 * ms / max(count, 1):8.1f} us"
            print(f"      {share}  {each}  {name[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["fp8"], help="of the target; see the settings")
    parser.add_argument("--draft-quantization", choices=["fp8"], help="of the draft model")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the target")
    parser.add_argument("--cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--best-of", type=int, default=8, help="largest k to try; 0: try none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--sequences", type=int, default=8, help="at least so many a line")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128])
    parser.add_argument(
        "--most-tokens", type=int, default=1 << 60, help="of a batch's prompts; leave others out"
    )
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tokens-a-step", type=float, help="set acceptance; for random weights")
    parser.add_argument("--at-k", type=int, help="the k that --tokens-a-step is for; every k")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tb-per-s", type=float, default=4.3, help="of the floor: a copy's rate")
    parser.add_argument("--device", default="cuda", help="cpu: to try a command with tiny shapes")
    parser.add_argument("--once", action="store_true", help="decode each line once, without parts")
    parser.add_argument("--kernels", type=int, default=0, help="show so many of each line")
    parser.add_argument("--batch-invariant", action="store_true", help="engine.batch_invariant")
    args = parser.parse_args()

    if args.tokens_a_step:
        set_acceptance(args.tokens_a_step, max(*args.k, args.best_of), args.at_k)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("outrider.engine.ranks").setLevel(logging.INFO)  # how they exchange parts
    engine = build(args)
    info = engine.info
    if args.tokens_a_step:
        at_k = f" of k = {args.at_k}" if args.at_k else ""
        print(f"SET ACCEPTANCE: {args.tokens_a_step} tokens a step{at_k}, whatever the models say")
    print(f"ready in {info.load_s:.1f} s, {info.warm_up_s:.1f} s of them to warm up")
    columns = "  ".join(f"{part:>7}" for part in PARTS)
    print(
        "prompt batch temp   k     tokens/s   to end  prefill too  first s  accepted  step ms"
        "  floor ms  |  "
        f"{columns}  |  idle"
    )
    for prompt_tokens, batch in lines(args):
        for temperature in args.temperature:
            measure = [
                Measured(engine, args, prompt_tokens, batch, temperature, k)
                for k in range(max(*args.k, args.best_of) + 1)
            ]
            for each in measure[1 : args.best_of + 1]:
                each.decode(SEARCH_TOKENS)
            rates = [each.tokens_per_s for each in measure]
            best = {rates.index(max(rates))} if args.best_of else set()
            for k in sorted({*args.k} | best):
                if not args.once:
                    measure[k].decode(SEARCH_TOKENS)
                measure[k].decode(args.new_tokens)
                parts = {} if args.once else measure[k].parts(args.new_tokens)
                step_s = measure[k].step_s
                floor_ms = bytes_read(engine, k) / args.tb_per_s / 1e9
                spent = "  ".join(
                    f"{1e3 * parts[part]:7.2f}" if parts else f"{'-':>7}" for part in PARTS
                )
                idle = f"{1 - sum(parts.values()) / step_s:.1%}" if parts else "-"
                print(
                    f"{prompt_tokens:6d} {batch:5d} {temperature:4.1f}  {k:2d}"
                    f"{' best' if k in best else '     '}"
                    f" {measure[k].tokens_per_s:8.1f} {measure[k].to_end_per_s:8.1f}"
                    f"     {measure[k].prefill_too_per_s:8.1f} {measure[k].first_token_s:8.3f}"
                    f"  {measure[k].acceptance:8.3f}"
                    f"  {1e3 * step_s:7.2f}  {floor_ms:8.2f}  |  {spent}"
                    f"  |  {idle}",
                    flush=True,
                )
                if args.kernels:
                    show_kernels(measure[k], args)


if __name__ == "__main__":
    main()
