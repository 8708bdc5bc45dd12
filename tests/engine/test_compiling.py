"""Kernels are compiled before there are requests."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import engine_config
from tiny_models import DEVICE, VOCAB

from outrider.engine import worker
from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models import attention, expert_weights, narrow_weight, proof
from outrider.engine.models.expert_weights import StackedExperts
from outrider.engine.models.loading import load_network
from outrider.engine.models.network import captured_shapes, short_batches
from outrider.engine.state.slots import Slots
from outrider.kernels.model.narrow_matrix import narrow_matrix, round_to_fp8
from outrider.kernels.model.row_scaled_few_rows import MOST_ROWS, rows_of


@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_warming_up_touches_no_sequence(tiny_model: Callable[..., Path], proposer: str) -> None:
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, target, k=2, proposer=proposer, max_num_seqs=2))
    state = engine.worker.slots.state
    state.token_ids.random_(90)
    state.num_tokens.random_(9)
    before = [field[:2].clone() for field in (state.token_ids, state.num_tokens)]
    model, draws = engine.worker.pair.target, engine.worker.proposer.draws
    logits = torch.zeros(2 * 3, model.vocab_size, dtype=model.dtype, device=DEVICE)
    with torch.inference_mode():
        for warm_up in [
            *(draws.warm_ups() if draws else ()),
            *engine.worker.verifier.warm_ups(logits),
        ]:
            warm_up()
    assert torch.equal(before[0], state.token_ids[:2])
    assert torch.equal(before[1], state.num_tokens[:2])


def test_what_is_compiled_is_counted(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(engine_config(tiny_model(), max_num_seqs=2))
    reported: list[tuple[str, int, int]] = []
    monkeypatch.setattr(worker, "compile_together", lambda launches, device: [*launches])
    engine.worker.compile(lambda *counts: reported.append(counts))
    total = reported[-1][2]
    assert total > 2
    counts = [("compiling kernels", done, total) for done in range(total)]
    assert reported == [("compiling kernels", 0, 0), *counts]


def test_prompts_are_tried_by_their_kernel_where_pages_are_bound(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything needs it, and for each kind of layer that may take it."""
    tried: list[tuple[object, ...]] = []
    monkeypatch.setattr(attention, "try_warpgroup_attention", lambda *args: tried.append(args))
    layer = attention.PagedAttention(4, 2, 64, 64, 0.125, window=9)
    bind = partial(layer.bind_pages, 1, 16, torch.float16, DEVICE, torch.bfloat16)
    bind()
    assert tried == [(layer.heads, 16, torch.bfloat16, torch.float16, DEVICE)]
    layer.causal = False
    bind()
    layer.causal, layer.softcap = True, 5.0
    bind()
    assert len(tried) == 1
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, target, k=2, max_num_seqs=2))
    own = {(attention.heads, 16) for attention in engine.worker.pair.target.attentions}
    page = engine.worker.pair.page_size
    assert {(args[0], args[1]) for args in tried} >= {(heads, page) for heads, _ in own}


def test_prompts_are_tried_by_their_kernel_where_kernels_run(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While kernels compile none runs, and what it should have written would seem to be wrong."""
    tried: set[tuple[object, ...]] = set()
    is_compiling = False

    def call_all(warm_ups: Iterable[Callable[[], object]], device: torch.device) -> None:
        nonlocal is_compiling
        is_compiling = True
        for warm_up in warm_ups:
            warm_up()
        is_compiling = False

    def try_kernel(*args: object) -> None:
        assert args in tried or not is_compiling
        tried.add(args)

    monkeypatch.setattr(attention, "try_warpgroup_attention", try_kernel)
    monkeypatch.setattr(proof, "compile_together", call_all)
    load_network(ModelConfig(path=str(tiny_model("mistral")), dtype="float32"), DEVICE)
    assert tried


def test_prompts_in_fp8_are_tried_by_their_kernel_where_a_matrix_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[object, ...]] = []
    monkeypatch.setattr(narrow_weight, "try_scaled_product", lambda *args: tried.append(args))
    matrix = round_to_fp8(torch.zeros(16, 16), rounds_inputs=True)
    narrow_weight.Scaled(matrix, torch.bfloat16)
    assert tried == [(matrix, torch.bfloat16)]


def test_few_rows_of_mxfp4_experts_are_tried_where_a_matrix_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[object, ...]] = []
    monkeypatch.setattr(expert_weights, "try_mxfp4_few_rows", lambda *args: tried.append(args))
    codes, scale = torch.zeros(8, 64), torch.ones(2, 8)
    plain = narrow_matrix("fp4", codes.to(torch.uint8), scale, group=32)
    StackedExperts(plain, 2, 1, torch.bfloat16)
    assert not tried
    powers = plain._replace(scale=scale.to(torch.float8_e8m0fnu))
    StackedExperts(powers, 2, 1, torch.bfloat16)
    assert tried == [(codes.device, torch.bfloat16)]


def test_few_rows_of_plain_experts_are_tried_where_a_matrix_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[object, ...]] = []
    monkeypatch.setattr(expert_weights, "try_few_rows_experts", lambda *args: tried.append(args))
    matrix = torch.zeros(8, 64).bfloat16()
    StackedExperts(matrix, 2, 1, torch.bfloat16)
    assert tried == [(matrix.device, torch.bfloat16)]


@pytest.mark.parametrize("rows_per_seq", [1, 4, 5, 9])
@pytest.mark.parametrize("max_num_seqs", [1, 16, 64, 256])
def test_short_passes_attend_in_every_way_that_captured_ones_do(
    max_num_seqs: int, rows_per_seq: int
) -> None:
    """A pass of many sequences counts as one with a prompt from fewer rows each on."""
    slots = Slots(max_num_seqs, 64, 32, 16, DEVICE, VOCAB, max_drawn=rows_per_seq - 1)

    def way(num_seqs: int, num_rows: int) -> tuple[int, int]:
        """What attention of decodes is compiled for; of few rows, of any number of sequences."""
        each = -(-num_rows // num_seqs)
        is_prompt = each > 16 or num_rows > attention._most_decoding(num_seqs, slots)
        return num_seqs, 0 if is_prompt else 1 << (each - 1).bit_length()

    short = short_batches(max_num_seqs, 4096, rows_per_seq)
    ways = {way(n, n * rows) for n, rows in short}
    captured = captured_shapes(max_num_seqs, rows_per_seq, 4096, True, 33)
    asked = {way(n, rows) for n, rows, _ in captured}
    assert {each for each in asked if each[1]} <= ways


@pytest.mark.parametrize("rows_per_seq", [1, 4, 5, 9])
@pytest.mark.parametrize("max_num_seqs", [8, 16, 64, 256])
def test_short_passes_have_every_tile_of_rows_that_captured_ones_do(
    max_num_seqs: int, rows_per_seq: int
) -> None:
    """A kernel that is compiled while graphs are captured has no other beside it."""
    short = {n * rows for n, rows in short_batches(max_num_seqs, 4096, rows_per_seq)}
    captured = {rows for _, rows, _ in captured_shapes(max_num_seqs, rows_per_seq, 4096, True, 33)}
    tiles = [{rows_of(n) for n in each if 32 < n <= MOST_ROWS} for each in (short, captured)]
    assert tiles[0] >= tiles[1]
