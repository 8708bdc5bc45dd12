"""Padding to a captured shape changes nobody's output. The graphs are stood in for on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_heads import save_tiny_block_head
from counted_graphs import without_gpu
from engines import GREEDY, engine_config, prompts, run, tokens
from heads import save_tiny_head
from tiny_models import DEVICE, VOCAB, Tiny
from torch import Tensor
from torch.utils._pytree import tree_map

from outrider.engine.api import SamplingParams, ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models import attention, network
from outrider.engine.models.attention import ForwardBatch, PagedAttention
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.network import Network, Pass, captured_shapes
from outrider.engine.proposers.draft_model import DraftModel
from outrider.engine.scoring import edited_sequences, verifier
from outrider.engine.state import phase
from outrider.engine.state.batch import HostBatch
from outrider.engine.state.phase import Phase, Shape, padded_sizes, record_graph
from outrider.engine.state.ragged import NONE_NP
from outrider.engine.state.slots import Slots


class _Recorded:
    """Runs again on the same tensors, as a CUDA graph does."""

    num_replays = 0

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self.output = run()

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        type(self).num_replays += 1
        tree_map(_copy, self.output, self._run())


def _copy(into: Tensor | None, what: Tensor | None) -> None:
    if into is not None:
        into.copy_(what)


class _Complete(dict[Shape, Any]):
    def get(self, shape: Shape, default: object = None) -> Any:
        return self[shape]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[_Recorded]:
    def record(
        run: Callable[[], Tensor], pool: object, *, is_prepared: bool
    ) -> tuple[_Recorded, Tensor]:
        graph = _Recorded(run)
        return graph, graph.output

    monkeypatch.setattr(phase, "record_graph", record)
    # As on a GPU, verifications are captured, and read the logits that a pass has left in place, of
    # no more rows than they were captured with.
    monkeypatch.setattr(verifier, "cpu", SimpleNamespace(takes=lambda *_: False))
    verify = verifier.verify

    def verified(logits: Tensor, cu_rows: Tensor, *args: Any, **options: bool) -> Tensor:
        assert cu_rows[-1] <= len(logits)
        return verify(logits, cu_rows, *args, **options)

    monkeypatch.setattr(verifier, "verify", verified)
    monkeypatch.setattr(_Recorded, "num_replays", 0)
    return _Recorded


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every test there runs over graphs")
@pytest.mark.parametrize(
    "proposer",
    [
        "draft_model",
        "suffix",
        pytest.param("head", marks=pytest.mark.deep),
        "head, ahead",
        pytest.param("dflash", marks=pytest.mark.deep),
        "dspark",
    ],
)
def test_padding_changes_nobodys_output(
    target: Path, draft: Path, recorded: type[_Recorded], proposer: str, tmp_path: Path
) -> None:
    is_ahead = proposer == "head, ahead"
    if proposer.startswith("head"):
        draft = save_tiny_head(tmp_path, target, boundaries=(0, 1, 2), draft_vocab=60)
        proposer = "draft_model"
    if proposer in ("dflash", "dspark"):
        markov = "vanilla" if proposer == "dspark" else None
        draft = save_tiny_block_head(tmp_path, target, boundaries=(0, 1, 2), markov=markov)
        proposer = "draft_model"
    config = engine_config(target, draft, k=2, proposer=proposer, max_num_seqs=6)
    mixed = prompts([3, 40, 1, 17, 8], VOCAB)
    params = [
        SamplingParams(max_tokens=30, seed=4),
        replace(GREEDY, num_speculative_tokens=1),
        SamplingParams(max_tokens=13, seed=2, temperature=0.7),
        SamplingParams(max_tokens=20, seed=3, top_k=9, repetition_penalty=1.3),
        replace(GREEDY, logprobs=2),
    ]
    plain, padded = Engine(config), Engine(config)
    padded.worker.capture(ignore_progress)
    plain.scheduler.lag = padded.scheduler.lag = int(is_ahead)
    scored = [replace(each, prompt_logprobs=i % 2 or None) for i, each in enumerate(params)]
    for batch in (slice(0, 5), slice(0, 3)):
        expected = [tokens(o) for o in run(plain, mixed[batch], params[batch])]
        # Rows of logits that score prompts lie between those that are verified.
        assert [tokens(o) for o in run(padded, mixed[batch], scored[batch])] == expected
    assert recorded.num_replays > 30


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every test there runs over graphs")
@pytest.mark.parametrize("most_rows", [256, 33])  # of the graphs of passes with such drafts
def test_captured_verifications_read_all_rows_of_drafts_that_are_looked_up(
    target: Path, recorded: type[_Recorded], monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    monkeypatch.setattr(network, "MOST_LOOKED_UP_ROWS", most_rows)
    config = engine_config(target, proposer="suffix", k=2, max_num_seqs=6)
    asked, params = prompts([3, 17, 8, 21, 1, 5], VOCAB), replace(GREEDY, max_tokens=60)
    plain, padded = Engine(config), Engine(config)
    padded.worker.capture(ignore_progress)
    expected = [tokens(o) for o in run(plain, asked, params)]
    assert [tokens(o) for o in run(padded, asked, params, predicted=expected)] == expected
    assert padded.stats().accepted_per_position[20] > 0
    assert recorded.num_replays > 0


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every test there runs over graphs")
@pytest.mark.parametrize("architecture", ["opt", "gpt2"])
def test_padding_stays_at_the_beginning_beside_edited_rows(
    tiny_model: Tiny, recorded: type[_Recorded], architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Positions beyond those that the draft has learned would raise.
    target = tiny_model(architecture, seed=0)
    draft = tiny_model(architecture, seed=1, max_position_embeddings=32)
    config = engine_config(target, draft, k=2, max_num_seqs=6)
    edited = replace(GREEDY, max_tokens=40, repetition_penalty=1.3)
    mixed, params = prompts([60, 3, 4, 5], VOCAB), [edited, *[GREEDY] * 3]
    plain, padded = Engine(config), Engine(config)
    padded.worker.capture(ignore_progress)
    padded.scheduler.lag = 1
    expected = [tokens(o) for o in run(plain, mixed, params)]
    assert [tokens(o) for o in run(padded, mixed, params)] == expected
    assert not caplog.records  # drafting never failed


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every test there runs over graphs")
@pytest.mark.parametrize("proposer", ["draft_model", "head", "dflash"])
@pytest.mark.parametrize("edited_rows", [128, 8])  # at once
def test_edits_that_need_no_host_are_captured(
    target: Path,
    draft: Path,
    recorded: type[_Recorded],
    monkeypatch: pytest.MonkeyPatch,
    proposer: str,
    edited_rows: int,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(edited_sequences, "EDITED_ROWS", edited_rows)
    if proposer == "head":
        draft = save_tiny_head(tmp_path, target, boundaries=(0, 1, 2), draft_vocab=60)
    if proposer == "dflash":
        draft = save_tiny_block_head(tmp_path, target, boundaries=(0, 1, 2))
    config = engine_config(target, draft, k=3, max_num_seqs=7)
    asked = prompts([3, 40, 1, 17, 8, 5], VOCAB)
    params = [
        replace(GREEDY, max_tokens=60, frequency_penalty=0.8),
        replace(GREEDY, max_tokens=60, logit_bias={4: 2.0}, bad_words=((4, 4), (7,)), logprobs=2),
        SamplingParams(max_tokens=20, seed=3, top_k=9, repetition_penalty=1.3),
        GREEDY,
        SamplingParams(max_tokens=13, seed=2, temperature=0.7, allowed_token_ids=(3, 4, 5, 60)),
        SamplingParams(max_tokens=13, seed=6, verification="match", presence_penalty=1.0),
    ]
    plain, padded = Engine(config), Engine(config)
    padded.worker.capture(ignore_progress)
    source = padded.worker.proposer.sources[-1]
    drafting = source.draws.phase if isinstance(source, DraftModel) else source._drafts
    for each in (drafting, padded.worker.verifier._edited.phase):
        each.captured = _Complete(each.captured)  # which raises where a step was not captured
    for lag in (0, 1):
        plain.scheduler.lag = padded.scheduler.lag = lag
        expected = [tokens(o) for o in run(plain, asked, params)]
        assert [tokens(o) for o in run(padded, asked, params)] == expected
        # Rows of drafts that are looked up are more than a model's.
        predicted = expected
        expected = [tokens(o) for o in run(plain, asked, params, predicted=predicted)]
        assert [tokens(o) for o in run(padded, asked, params, predicted=predicted)] == expected
    assert padded.stats().accepted_per_position[10] > 0
    assert recorded.num_replays > 50


@pytest.mark.parametrize(
    ("max_num_seqs", "rows_per_seq", "most_rows"), [(32, 5, 512), (256, 5, 512), (64, 3, 100)]
)
def test_no_captured_pass_has_more_rows_than_a_step(
    max_num_seqs: int, rows_per_seq: int, most_rows: int
) -> None:
    shapes = captured_shapes(max_num_seqs, rows_per_seq, most_rows, True)
    assert max(rows for _, rows, _ in shapes) <= most_rows
    assert len(set(shapes)) == len(shapes)
    for num_seqs in range(1, max_num_seqs + 1):  # all that a step may hold has a graph
        for rows in range(1, rows_per_seq + 1):
            num_rows = min(num_seqs * rows, most_rows)
            assert any(s >= num_seqs and r >= num_rows and n >= num_rows for s, r, n in shapes)


def test_a_captured_pass_with_prompts_has_at_most_an_eighth_more_rows_than_it_needs() -> None:
    most = 8192
    shapes = captured_shapes(64, 5, most, True, 33, host_bound_rows=most)
    assert len(shapes) < len(captured_shapes(64, 5, most, True, 33)) + 25
    for wanted in range(1025, most + 1):
        padded = min(rows for _, rows, _ in shapes if rows >= wanted)
        assert padded <= 9 / 8 * wanted


@pytest.mark.parametrize("max_num_seqs", [1, 16, 256])
def test_attention_knows_which_passes_hold_prompts(
    max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their shapes alone: with room for all sequences, a prompt's rows are few for each."""
    listed: list[bool] = []
    monkeypatch.setattr(
        attention, "list_items", lambda *_, holds_prompt, **__: listed.append(holds_prompt)
    )
    slots = Slots(max_num_seqs, 64, 32, 16, DEVICE, VOCAB, max_drawn=4)
    layer = PagedAttention(2, 1, 64, 64, 1.0)

    def holds_prompt(shape: Shape) -> bool:
        packed = HostBatch.build(NONE_NP, NONE_NP, NONE_NP, NONE_NP).packed(shape[0], slots.dummy)
        batch = ForwardBatch.unpack(torch.from_numpy(packed).to(DEVICE), shape, slots)
        batch.items(layer)
        ForwardBatch.of_next_tokens(batch.rows, slots).items(layer)  # as its head attends
        assert listed[-2] == listed[-1]
        return listed[-1]

    for num_seqs, rows, logits in captured_shapes(max_num_seqs, 5, 4096, True, 33, 4096)[::7]:
        assert holds_prompt((num_seqs, rows, logits)) == (rows > max(256, 5 * num_seqs))
    assert holds_prompt((200, 4096, 200))  # not captured


def full(error: Exception) -> Callable[[Tensor, Shape], int]:
    """A pass of which no more than 8 rows fit into memory."""

    def body(integers: Tensor, shape: Shape) -> int:
        if shape[0] <= 8:
            return shape[0]
        if "capturing" not in str(error):
            raise error
        try:
            raise torch.OutOfMemoryError
        finally:
            raise error  # as the end of the capture does then

    return body


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),  # of the graph itself
        RuntimeError("operation not permitted when stream is capturing"),
    ],
)
def test_without_memory_for_all_graphs_there_are_fewer_and_one_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    passes: Phase[int] = Phase(full(error), torch.device("cpu"))
    with without_gpu():
        for size in (32, 16, 8, 4):
            passes.capture(NONE_NP, (size,))
    assert [*passes.captured] == [(8,), (4,)]
    assert passes.padded((5,)) == (8,)
    assert passes.padded((9,)) == (9,)  # which runs as it is
    assert len(emptied) == 2
    (record,) = caplog.records
    assert "no memory for the CUDA graph of (32,)" in record.getMessage()
    with without_gpu(), pytest.raises(torch.OutOfMemoryError, match=str(error)):
        Phase(full(error), torch.device("cpu"), needs_all_graphs=True).capture(NONE_NP, (32,))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every start there captures twice")
@pytest.mark.parametrize("has_head", [False, True])
def test_no_graph_outlives_the_pages_that_it_was_captured_over(
    target: Path,
    draft: Path,
    recorded: type[_Recorded],
    has_head: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start captures twice: to learn how much memory graphs take, and over the pages there are.
    Where there is no memory for a graph the second time, the first one must not run.
    """
    if has_head:
        draft = save_tiny_head(tmp_path, target, boundaries=(0, 1, 2))
    phases: list[Phase[Any]] = []
    begin = Phase.__init__

    def begin_noted(self: Phase[Any], *args: Any, **options: bool) -> None:
        phases.append(self)
        begin(self, *args, **options)

    monkeypatch.setattr(Phase, "__init__", begin_noted)
    worker = Engine(engine_config(target, draft, k=2, max_num_seqs=2)).worker
    worker.capture(ignore_progress)
    assert sum(bool(each.captured) for each in phases) == 5  # the draft's draws: one by one alone
    worker.allocate(8)
    assert not any(each.captured for each in phases)


def test_other_errors_of_a_capture_are_raised() -> None:
    def fail(integers: Tensor, shape: Shape) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with without_gpu(), pytest.raises(RuntimeError, match="not permitted"):
        Phase(fail, torch.device("cpu")).capture(NONE_NP, (4,))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every test there runs over graphs")
@pytest.mark.parametrize(("kind", "most"), [("draft_model", 0), ("draft_model", 8), ("head", 8)])
def test_an_engine_serves_with_the_graphs_that_there_is_memory_for(
    target: Path,
    draft: Path,
    recorded: type[_Recorded],
    kind: str,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "head":
        draft = save_tiny_head(tmp_path, target, boundaries=(0, 1, 2), draft_vocab=60)
    record = phase.record_graph

    def record_small(run: Callable[[], Any], pool: object, *, is_prepared: bool) -> Any:
        graph, output = record(run, pool, is_prepared=is_prepared)
        if isinstance(output, Pass) and len(output.logits) > most:
            raise torch.OutOfMemoryError
        return graph, output

    monkeypatch.setattr(phase, "record_graph", record_small)
    config = engine_config(target, draft, k=2, max_num_seqs=6)
    plain, padded = Engine(config), Engine(config)
    padded.worker.capture(ignore_progress)
    assert all(len(c.output.logits) <= most for c in padded.worker.pair.target.captured.values())
    mixed, params = prompts([3, 40, 1, 17], VOCAB), SamplingParams(max_tokens=20, seed=4)
    expected = [tokens(o) for o in run(plain, mixed, params)]
    assert [tokens(o) for o in run(padded, mixed, params)] == expected


@pytest.mark.parametrize(
    ("num_layers", "gigabytes", "least", "most"),
    [
        (30, 0.27, 8192, 1 << 20),  # SmolLM2-135M: captured as far as a step goes
        (48, 6.1, 3000, 4096),  # Qwen3-30B-A3B, by the weights that a token reads
        (36, 16.0, 1024, 1100),  # Qwen3-8B: beyond, a GPU is the slower one
        (80, 140.0, 1024, 1024),
    ],
)
def test_passes_with_prompts_are_captured_as_long_as_the_host_is_the_slower_one(
    num_layers: int, gigabytes: float, least: int, most: int
) -> None:
    network = SimpleNamespace(num_layers=num_layers, weight_bytes=int(gigabytes * 1e9))
    rows = Network.host_bound_rows.fget(network)  # type: ignore[attr-defined]
    assert least <= rows <= most


def test_few_passes_are_captured_for_the_rows_of_looked_up_drafts() -> None:
    usual = captured_shapes(64, 5, 512, True)
    shapes = captured_shapes(64, 5, 512, True, 33)
    assert set(shapes) >= set(usual)
    assert len(shapes) < len(usual) + 25
    for num_seqs in (1, 2, 4):  # of which each may have any number of rows
        for rows in range(1, 34):
            wanted = num_seqs * rows
            padded = min(r for s, r, n in shapes if s >= num_seqs and min(r, n) >= wanted)
            assert padded <= max(wanted + 9 * num_seqs, 5 * num_seqs)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every test there runs over graphs")
def test_a_step_of_all_its_rows_runs_captured(target: Path, recorded: type[_Recorded]) -> None:
    config = engine_config(target, target, k=4, max_num_seqs=7, max_num_batched_tokens=12)
    plain, padded = Engine(config), Engine(config)
    padded.worker.capture(ignore_progress)
    asked, params = prompts([5, 3, 4, 1, 1], VOCAB), SamplingParams(max_tokens=20, seed=3)
    expected = [tokens(o) for o in run(plain, asked, params)]
    assert [tokens(o) for o in run(padded, asked, params)] == expected
    assert recorded.num_replays > 10


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every test there runs over graphs")
def test_logprobs_are_raw_beside_edits(target: Path, recorded: type[_Recorded]) -> None:
    config = engine_config(target, target, k=2, max_num_seqs=2)
    params = SamplingParams(max_tokens=12, seed=1, allowed_token_ids=(3, 5, 8), logprobs=2)
    plain, padded = Engine(config), Engine(config)
    padded.worker.capture(ignore_progress)
    expected, got = (
        [
            [o.logprobs for o in of_prompt]
            for of_prompt in run(engine, prompts([4, 9], VOCAB), params)
        ]
        for engine in (plain, padded)
    )
    assert got == expected
    assert recorded.num_replays > 10


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there memory is measured")
def test_graphs_of_all_shapes_write_logits_and_taps_to_the_same_memory(
    tiny_model: Tiny,
) -> None:
    target = tiny_model("qwen3_moe", seed=0)  # whose layers are not compiled
    config = engine_config(target, None, k=0, proposer="none", max_num_seqs=6)
    network = Engine(config).worker.pair.target
    assert isinstance(network, Decoder)
    network.tap((0, 1))
    with without_gpu():
        network.capture(3, 64, True, lambda done, total: None)
    outputs = [captured.output for captured in network.captured.values()]
    assert len(outputs) > 5
    assert len({output.logits.data_ptr() for output in outputs}) == 1
    (taps,) = {output.taps.data_ptr() for output in outputs if output.taps is not None}
    with torch.inference_mode():
        more = network.rehearse_short(6, 20).taps  # of more rows than any graph
    assert more is not None
    assert more.data_ptr() != taps


@pytest.mark.skipif(DEVICE.type == "cuda", reason="every test there runs over graphs")
def test_prompts_run_captured_too(target: Path, recorded: type[_Recorded]) -> None:
    config = engine_config(target, target, k=2, max_num_seqs=3)
    engine = Engine(config)
    expected = [tokens(o) for o in run(engine, prompts([40, 1, 9], VOCAB), GREEDY)]
    engine.worker.capture(ignore_progress)
    phase_of_target = engine.worker.scorer._target.phase
    phase_of_target.captured = _Complete(phase_of_target.captured)
    assert [tokens(o) for o in run(engine, prompts([40, 1, 9], VOCAB), GREEDY)] == expected


def test_a_pass_takes_the_smallest_shape_that_holds_it_and_passes_over_fewer_sequences() -> None:
    num_compared = 0

    class Counted(int):
        def __le__(self, other: int) -> bool:
            nonlocal num_compared
            num_compared += 1
            return int(self) <= other

    passes: Phase[None] = Phase(lambda *_: None, DEVICE)
    passes._ascending = shapes = sorted(captured_shapes(256, 7, 2048, True, 33))
    for n, rows, more in product((1, 2, 3, 60, 200, 256), (1, 2, 5, 7, 20), (0, 1, 90)):
        wanted = n, n * rows + more, n * rows
        holding = [
            s for s in shapes if all(have >= want for have, want in zip(s, wanted, strict=True))
        ]
        assert passes.padded(wanted) == (holding[0] if holding else wanted)
    assert passes.padded((64, Counted(64), Counted(64))) == (64, 64, 64)
    assert num_compared == 2  # of the first shape with room for 64 sequences


def test_sizes_are_the_powers_of_two_and_the_most() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(6) == [6, 4, 2, 1]
    assert padded_sizes(8) == [8, 4, 2, 1]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_graphs_that_nobody_holds_are_not_collected_in_a_capture() -> None:
    class Gone:
        def __init__(self) -> None:
            self.itself = self
            self.graph, _ = record_graph(lambda: torch.ones(1, device=DEVICE), None)

    Gone()
    num_runs = 0

    def collecting() -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 2:  # the captured one
            assert [[i] for i in range(10_000)]  # so many that a collection is due
        return torch.ones(1, device=DEVICE)

    record_graph(collecting, None)[0].replay()
    torch.cuda.synchronize()
