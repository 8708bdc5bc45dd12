"""What lives on one device: the models, the slots of the sequences, and the steps over them."""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from outrider.kernels.compiling import compile_together
from outrider.kernels.cpu.layers import torch_on_one_thread
from outrider.kernels.verify.sampling import MAX_DRAFTS

from .api import ReportProgress
from .config import ConfigError, EngineConfig
from .cpu_share import CPUShare, set_threads
from .gpu_memory import is_full, no_room
from .host_memory import check_host_memory
from .logit_edits import LogitEdits
from .memory.budget import Budget
from .memory.host_tier import PageCopies
from .memory.spec import PagedSpec
from .models.batch_invariance import alike_thread_counts
from .models.compiled_decoder import CompiledDecoder
from .models.groups import grouped
from .models.network import Pass, short_batches
from .models.pair import ModelPair
from .plan import Plan
from .progress import ReportCounts, counted
from .proposers import build_proposer
from .ranks.admission import check_ranks
from .ranks.followers import Followers
from .ranks.wire import Op
from .scoring.logprobs import read_prompt_logprobs
from .scoring.ranking import Ranking
from .scoring.scorer import Scorer
from .scoring.verifier import Verifier
from .seats import check_seats, longest_in_slots, seated
from .state.slots import Slots


@dataclass(slots=True)
class LaunchedStep:
    """A plan that the device is working on."""

    plan: Plan
    scored: Pass | None  # with logits [sum(k_i + 1), V]; None once verified
    drafting_s: float  # host time to draft, until `read`: then the device's
    begin: torch.cuda.Event | None = None
    drafted: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    launch_s: float = 0.0  # host time to plan and launch it
    drawn: list[np.ndarray] | None = None  # see `Verifier.verify`

    @property
    def device_s(self) -> float | None:
        """How long it ran on a GPU; call it once the step has ended there."""
        if self.begin is None or self.end is None:
            return None
        return float(self.begin.elapsed_time(self.end)) / 1e3


class Worker:
    """Runs plans, whose newcomers and pages it enters in the slots."""

    def __init__(self, config: EngineConfig, report: ReportProgress) -> None:
        self.device = torch.device(config.device)
        set_threads(config.num_threads, config.target.tensor_parallel, self.device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton launches on the current device
        k = config.speculation.k
        if k > MAX_DRAFTS:
            raise ConfigError(
                f"speculation.num_speculative_tokens is {k}; it must be at most {MAX_DRAFTS}"
            )
        check_ranks(config, self.device)
        if self.device.type == "cuda":  # weights take none of it, so none need be read
            check_host_memory(config.cache, config.speculation)
        self.followers: Followers | None = None
        if config.target.tensor_parallel > 1:
            self.followers = followers = Followers(config)
            report = followers.watched(report)
        try:
            self._build(config, report)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and is_full(error):
                raise no_room(error) from None
            raise

    def _build(self, config: EngineConfig, report: ReportProgress) -> None:
        k = config.speculation.k
        others = [] if self.followers is None else [partial(self.followers.shared, report=report)]
        self.pair = ModelPair(config, report, *others)
        if self.device.type == "cuda":  # before anybody measures what is left
            gc.collect()  # frees the memory of an engine that was used before
        max_drafts = MAX_DRAFTS if k > 0 else 0  # k is for models; what is looked up costs rows
        self.config = config = seated(self.pair.config, self.pair, self.device, max_drafts)
        longest = longest_in_slots(config, self.pair, self.device)
        if self.device.type == "cpu":
            check_seats(config, self.pair, longest, max_drafts)
        keeps_states = bool(self.pair.target.states) and self.pair.caches_prefixes
        self.slots = Slots(
            config.scheduler.max_num_seqs,
            longest,
            max_drafts,
            self.pair.page_size,
            self.device,
            self.pair.vocab_size,
            max_drawn=k if "draft_model" in config.speculation.sources else 0,
            num_groups=len(self.pair.groups),
            # Of prefixes, as many as sequences can be seated.
            num_kept_states=config.scheduler.max_num_seqs if keeps_states else 0,
        )
        self.budget = Budget(
            [group.spec for group in self.pair.groups],
            page_size=self.pair.page_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_drafts=self.slots.max_drafts,
            most_rows=config.scheduler.max_num_batched_tokens,
            caches_prefixes=self.pair.caches_prefixes,
            has_host_tier=config.cache.host_gib > 0,
        )
        self.host_pages: tuple[list[int], PageCopies] | None = None  # number of each group's
        of_host = self.budget_of_all_ranks if self.device.type == "cpu" else None
        check_host_memory(config.cache, config.speculation, of_host)
        self.edits = LogitEdits(self.slots)
        self.proposer = build_proposer(config, self.slots, self.edits, self.pair)
        self.scorer = Scorer(self.pair.target, self.slots.vocab_size)
        draws, target = self.proposer.draws, self.pair.target
        self.verifier = Verifier(self.slots, self.edits, draws.distributions if draws else None)
        is_alone = self.followers is None  # ranks agree on a number of threads once
        # The others of a target get what the host knows of a step.
        self.ranking: Ranking | None = None
        if is_alone and draws is not None and draws.log_odds is not None:
            self.ranking = Ranking(self.slots, draws.log_odds)
        counts = alike_thread_counts(target) if self.device.type == "cpu" and is_alone else ()
        self._cpu_share = CPUShare(counts)
        self._is_compiled = isinstance(target, CompiledDecoder)
        self._most_rows = config.scheduler.max_num_batched_tokens

    @property
    def state_bytes(self) -> int:
        """Of what layers keep of whole sequences, in all slots."""
        return self.slots.num_states * self.pair.target.bytes_per_slot(self.slots.max_drafts)

    @torch.inference_mode()
    def compile(self, report: ReportProgress) -> None:
        """Compile the kernels of steps over the dummy page, so that no request waits for one."""
        report("compiling kernels", 0, 0)
        ranks = self.followers
        with nullcontext() if ranks is None else ranks.compiling(self._most_rows, report):
            self._compile(partial(report, "compiling kernels"))

    def _compile(self, report: ReportCounts) -> None:
        target = self.pair.target
        num_rows = 2 * (self.slots.max_drafts + 1)
        logits = torch.zeros(num_rows, target.vocab_size, dtype=target.dtype, device=self.device)
        draws = self.proposer.draws
        warm_ups = (*self.verifier.warm_ups(logits), *(draws.warm_ups() if draws else ()))
        if self.ranking is not None:
            warm_ups = *warm_ups, self.ranking.warm_up
        launches = *warm_ups, self.rehearse, *self.short_steps()
        compile_together(counted(launches, report), self.device)

    def short_steps(self) -> list[Callable[[], None]]:
        """Small steps over dummy sequences that together launch every kernel."""

        def rehearse(num_seqs: int, num_rows: int) -> None:
            scored = self.pair.target.rehearse_short(num_seqs, num_rows)
            for source in self.proposer.sources:
                source.rehearse_short(num_seqs, num_rows, scored)

        num_seqs, rows_per_seq = self.slots.max_num_seqs, self.slots.max_drawn + 1
        batches = short_batches(num_seqs, self._most_rows, rows_per_seq)
        return [partial(rehearse, *batch) for batch in batches]

    def send_to_ranks(self, op: Op) -> None:
        """Have the other ranks of the target do something, if there are any."""
        if self.followers is not None:
            self.followers.send(op)

    def fewest_pages(self, num_pages: int) -> int:
        """How many pages all ranks have room for, of which this one has it for `num_pages`."""
        if self.followers is None:
            return num_pages
        budget = replace(self.budget, specs=self.specs_of_others)
        rooms = self.followers.ask(Op.ROOM)
        return min(num_pages, *(budget.most_within(room.item()) for room in rooms))

    @property
    def specs_of_others(self) -> list[PagedSpec]:
        """Of the other ranks: they have the first of this one's groups, some without its draft."""
        groups = grouped(self.pair.on_all_ranks, self.pair.max_model_len)
        return [group.spec for group in groups]

    @property
    def budget_of_all_ranks(self) -> Budget:
        """As `budget`, for the pages of all ranks together."""
        others = 0 if self.followers is None else len(self.followers.pids)
        of_each = [spec.bytes_per_token for spec in self.specs_of_others]
        added = [others * each for each in of_each] + [0] * len(self.budget.specs)
        specs = [
            replace(spec, bytes_per_token=spec.bytes_per_token + more)
            for spec, more in zip(self.budget.specs, added, strict=False)
        ]
        return replace(self.budget, specs=specs)

    def close(self) -> None:
        """End the other ranks. The worker is of no use afterwards."""
        if self.followers is not None:
            self.followers.stop()

    def allocate(self, num_pages: int) -> None:
        """Allocate so many pages for layers without a window, and what the others need.

        They replace the present ones, and what was captured over these is dropped. Raises
        ValueError if the GPU has no room.
        """
        of_sources = (phase for source in self.proposer.sources for phase in source.phases)
        for phase in (*self.verifier.phases, *of_sources):
            phase.drop()
        try:
            counts = self.budget.of_groups(num_pages)
            if self.followers is not None:
                self.followers.bind(self.slots, counts)
            self.pair.bind(counts, self.slots)
        except torch.OutOfMemoryError as error:
            num_gib = (self.budget.num_bytes(num_pages) + self.state_bytes) / 2**30
            states, remedy = "", ""
            if self.state_bytes:
                states = f", with the states of {self.slots.max_num_seqs} sequences,"
                remedy = "scheduler.max_num_seqs, or "
            raise ValueError(
                f"a KV cache of {num_pages} pages{states} takes {num_gib:.2f} GiB, which the GPU "
                f"does not have; lower {remedy}cache.num_pages, if it is set, or "
                f"engine.gpu_memory_utilization ({error})"
            ) from None

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run the largest steps on dummy sequences, to measure their memory: of prompts, and of
        verifications, whose attention adds up parts.
        """
        num_seqs = min(self.slots.max_num_seqs, self._most_rows)
        num_rows = min(self.slots.max_drawn + 1, self._most_rows // num_seqs)
        self.pair.target.rehearse_short(num_seqs, num_rows)
        num_logits = min(self.slots.max_verified, self._most_rows)
        scored = self.scorer.rehearse(self._most_rows, num_logits)
        for source in self.proposer.sources:
            source.rehearse(scored)
        self.verifier.rehearse(scored.logits)

    def capture(self, report: ReportProgress) -> None:
        """Capture the phases of a step as CUDA graphs."""
        logits = self.pair.target.capture(
            self.slots.max_drawn + 1,
            self._most_rows,
            True,
            partial(report, "capturing the target's graphs"),
            most_rows_per_seq=self.slots.max_drafts + 1,
        )
        for source in self.proposer.sources:  # after the target: a head's graphs read its taps
            source.capture(report)
        self.verifier.capture(logits)

    def launch(self, plan: Plan) -> LaunchedStep:
        """Draft and score, counting from the tokens that the device knows when this runs there."""
        if plan.follows_another:
            self._cpu_share.adapt()
        else:
            self._cpu_share.begin()
        self.pair.target.copy_states(plan.state_copies)
        self.slots.fill(plan.newcomers, [scheduled.request for scheduled in plan.scheduled])
        for request in plan.newcomers:
            self.edits.seat(request)
        start_s, begin = time.perf_counter(), self._event()
        with self._threads():
            plan.set_drafts(self.proposer.propose(plan))
            drafting_s, drafted = time.perf_counter() - start_s, self._event()
            if self.ranking is not None:
                plan.chosen = self.ranking.choose(plan)
            scored = self.scorer.score(plan)
        return LaunchedStep(plan, scored, drafting_s, begin, drafted)

    def verify(self, step: LaunchedStep) -> None:
        """Verify the drafts, and add the drawn tokens to those the device knows.

        No other plan may be launched between `launch` and this.
        """
        assert step.scored is not None
        with self._threads():
            step.drawn = self.verifier.verify(step.plan, step.scored.logits)
            self.proposer.follow(step.plan, step.scored)
        step.scored = None
        step.end = self._event()

    def _threads(self) -> AbstractContextManager[None]:
        return torch_on_one_thread() if self._is_compiled else nullcontext()

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, step: LaunchedStep) -> None:
        """Wait for a step, and enter what it drew and scored in its plan."""
        if step.end is not None:
            step.end.synchronize()
        if step.begin is not None and step.drafted is not None:
            step.drafting_s = step.begin.elapsed_time(step.drafted) / 1e3
        read_prompt_logprobs(step.plan)
        self.verifier.read(step.plan, step.drawn)
