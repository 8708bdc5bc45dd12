"""Rows of a prompt whose last hidden state nobody reads leave out what the last layer does with
it: of attention all but their keys and values, and the MLP.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from heads import save_tiny_head
from mtp import save_tiny_mtp_model
from tiny_models import DEVICE, VOCAB, Tiny
from torch import Tensor

from outrider.engine.api import SamplingParams, ignore_progress
from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.attention import ForwardBatch, PagedAttention
from outrider.engine.models.compiled_decoder import CompiledDecoder
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network
from outrider.engine.models.network import Network, Pass
from outrider.engine.state.batch import HostBatch
from outrider.engine.state.slots import Slots
from outrider.kernels.cpu.layers import compiled

ON_GPU = DEVICE.type == "cuda"
PAGE = 16
# Of an unfinished prompt, of one that ends, and of a sequence that decodes, with drafts.
LENS = np.array([200, 90, 3])
NUM_LOGITS = np.array([0, 1, 3])
Counts = list[int]
Count = Callable[[Network], Counts]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Notes how many rows go through the last part of a model in each pass from now on."""

    def of(network: Network) -> Counts:
        assert isinstance(network, Decoder)
        counts: Counts = []
        last = network.blocks[-1].parts[-1]
        call = type(last).__call__

        def counted(part: Any, x: Tensor, *args: Any) -> Any:
            if part is last:
                counts.append(len(x))
            return call(part, x, *args)

        monkeypatch.setattr(type(last), "__call__", counted)
        return counts

    return of


def load(path: Path, *, is_draft: bool = False) -> Network:
    """A draft is in compiled layers, where there are any."""
    config = ModelConfig(path=str(path), dtype="auto" if is_draft else "float32")
    batch_invariant = False if is_draft else None
    network = load_network(config, DEVICE, is_draft=is_draft, batch_invariant=batch_invariant)
    network.bind_cache(num_pages=64, page_size=PAGE)
    slots = Slots(3, 256, 4, PAGE, DEVICE, VOCAB)
    generator = torch.Generator().manual_seed(0)
    slots.token_ids.copy_(torch.randint(0, VOCAB, slots.token_ids.shape, generator=generator))
    slots.block_tables[0, :3, :16] = torch.randperm(63, generator=generator)[:48].view(3, 16) + 1
    network.bind_slots(slots)
    return network


@torch.inference_mode()
def computed(
    network: Network, lens: np.ndarray, num_logits: np.ndarray, firsts: np.ndarray | int = 0
) -> Pass:
    """So many rows of each sequence, which are known tokens."""
    ends = firsts + lens
    network._slots.num_tokens[:3] = torch.from_numpy(ends).to(DEVICE)
    passed = network.forward(HostBatch.build(np.arange(3), -lens, lens, num_logits))
    return passed._replace(logits=passed.logits.clone())


def keeps_rows(network: Network) -> bool:
    assert isinstance(network, Decoder)
    last = network.blocks[-1].parts[-1]
    return last.attention is not None or last.state is not None


def assert_equal(network: Network, found: Tensor, expected: Tensor) -> None:
    if network.batch_invariant:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def last_of_each(rows: Tensor, num_logits: np.ndarray) -> Tensor:
    """So many of the last rows of each sequence."""
    each = zip(rows.split(LENS.tolist()), num_logits.tolist(), strict=True)
    return torch.cat([part[len(part) - num :] for part, num in each])


OWN = [
    "llama", "exaone4", "granitemoehybrid", "glm4_moe", "nemotron_h", "qwen3_5_moe_text",
    "qwen3_moe", "qwen3_next",
]  # fmt: skip
ENDING_IN_MAMBA = {"layers_block_type": ["mlp", "full_attention", "linear_attention"]}


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [*((name, {}) for name in OWN), ("nemotron_h", ENDING_IN_MAMBA)],
)
def test_rows_without_logits_leave_out_the_last_mlp(
    architecture: str, overrides: dict[str, Any], tiny_model: Tiny, count: Count
) -> None:
    network = load(tiny_model(architecture, **overrides))
    whole = computed(network, LENS, LENS).logits
    counts = count(network)
    few = computed(network, LENS, NUM_LOGITS).logits
    assert counts == [sum(LENS) if keeps_rows(network) else sum(NUM_LOGITS)]
    assert keeps_rows(network) == bool(overrides)
    assert_equal(network, few, last_of_each(whole, NUM_LOGITS))
    # All layers keep what they should of every row: later rows read it.
    three = np.array([3, 3, 3])
    found = computed(network, three, three, LENS).logits
    computed(network, LENS, LENS)
    assert_equal(network, found, computed(network, three, three, LENS).logits)


GATED = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("architecture", "overrides"), [("llama", {}), ("qwen3_5_moe_text", GATED)]
)
def test_rows_without_logits_do_not_attend_in_the_last_layer(
    architecture: str,
    overrides: dict[str, Any],
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = load(tiny_model(architecture, **overrides))
    whole = computed(network, LENS, LENS).logits
    counts, call = list[tuple[bool, int]](), PagedAttention.__call__

    def counted(layer: PagedAttention, query: Tensor, batch: ForwardBatch) -> Tensor:
        counts.append((layer is network.attentions[-1], len(query)))
        return call(layer, query, batch)

    monkeypatch.setattr(PagedAttention, "__call__", counted)
    for num_logits in (NUM_LOGITS, np.array([0, 70, 0]), 0 * LENS):
        counts.clear()
        few = computed(network, LENS, num_logits).logits
        before = [(False, sum(LENS))] * (len(network.attentions) - 1)
        assert counts == [*before, *([(True, sum(num_logits))] if any(num_logits) else [])]
        assert_equal(network, few, last_of_each(whole, num_logits))


def test_a_pass_without_logits_leaves_out_the_last_mlp_altogether(
    tiny_model: Tiny, count: Count
) -> None:
    network = load(tiny_model("qwen3_moe"))
    counts = count(network)
    assert len(computed(network, LENS, 0 * LENS).logits) == 0
    assert counts == []


def test_few_rows_go_through_all_layers(tiny_model: Tiny, count: Count) -> None:
    """A decoding step has hardly any others, and a launch more would cost it time."""
    network = load(tiny_model())
    counts = count(network)
    computed(network, np.array([2, 2, 2]), np.array([1, 1, 1]))
    assert counts == [6]


@pytest.mark.parametrize(
    ("tapped", "num_rows"), [([0, 2], 4), ([0, 3], sum(LENS)), ([4], sum(LENS))]
)
def test_heads_find_every_row_that_they_read(
    tapped: list[int], num_rows: int, tiny_model: Tiny, count: Count
) -> None:
    """4: behind the last norm, as MTP heads read it."""
    network = load(tiny_model(num_hidden_layers=4))
    network.tap(tapped)
    whole = computed(network, LENS, LENS)
    assert whole.taps is not None
    taps = whole.taps.clone()
    counts = count(network)
    few = computed(network, LENS, NUM_LOGITS)
    assert counts == [num_rows]
    assert_equal(network, few.logits, last_of_each(whole.logits, NUM_LOGITS))
    assert few.taps is not None
    assert_equal(network, few.taps, taps)


@pytest.mark.skipif(compiled() is None or ON_GPU, reason="the CPU's layers are not compiled")
@pytest.mark.parametrize("tapped", [[], [0, 2], [0, 3], [4]])
def test_compiled_layers_leave_out_the_same_rows(tapped: list[int], tiny_model: Tiny) -> None:
    network = load(tiny_model("qwen3", num_hidden_layers=4), is_draft=True)
    assert isinstance(network, CompiledDecoder)
    network.tap(tapped)
    whole = computed(network, LENS, LENS)
    few = computed(network, LENS, NUM_LOGITS)
    assert torch.equal(few.logits, last_of_each(whole.logits, NUM_LOGITS))
    if tapped:
        assert few.taps is not None
        assert whole.taps is not None
        assert torch.equal(few.taps, whole.taps)
    assert len(computed(network, LENS, 0 * LENS).logits) == 0
    three = np.array([3, 3, 3])
    found = computed(network, three, three, LENS).logits
    computed(network, LENS, LENS)
    assert torch.equal(found, computed(network, three, three, LENS).logits)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("architecture", OWN)
def test_graphs_with_prompts_leave_out_the_same_rows(
    architecture: str, tiny_model: Tiny, count: Count
) -> None:
    network = load(tiny_model(architecture))
    whole = computed(network, LENS, LENS).logits
    counts = count(network)
    network.capture(1, 512, False, ignore_progress)
    num_logits = np.array([0, 1, 1])
    few = computed(network, LENS, num_logits).logits
    assert min(counts) == 1
    assert_equal(network, few, last_of_each(whole, num_logits))


KINDS = ["plain", "draft", "eagle3", "mtp"]
PROMPTS = prompts([210, 40, 150, 97], VOCAB)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_short_chunks(
    kind: str, tiny_model: Tiny, draft: Path, tmp_path: Path, count: Count
) -> None:
    """Of which no pass is long enough to leave out rows."""
    target, its = tiny_model("llama", num_hidden_layers=6), None
    if kind == "draft":
        its = draft
    elif kind == "eagle3":
        its = save_tiny_head(tmp_path / "head", target)
    elif kind == "mtp":
        target = its = save_tiny_mtp_model(tmp_path / "model", num_hidden_layers=3)
    greedy = replace(GREEDY, logprobs=1)
    scored = replace(greedy, prompt_logprobs=2)
    params = [greedy, scored, SamplingParams(max_tokens=24, seed=5), greedy]
    answers = []
    for chunk in (64, 300, 1000):
        engine = Engine(engine_config(target, its, max_num_batched_tokens=chunk))
        counts = count(engine.worker.pair.target)
        outputs = run(engine, PROMPTS, params)
        if not ON_GPU:  # there graphs run that were captured before
            assert (max(counts) > 256) == (kind == "mtp" and chunk > 64)
        scores = [entry.logprob for output in outputs[1] for entry in output.prompt_logprobs or ()]
        assert len(scores) == len(PROMPTS[1]) - 1
        answers.append(([tokens(each) for each in outputs], torch.tensor(scores)))
    for found, scores in answers[1:]:
        assert found == answers[0][0]
        torch.testing.assert_close(scores, answers[0][1], rtol=1e-4, atol=1e-4)
