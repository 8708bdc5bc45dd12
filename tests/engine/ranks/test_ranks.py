"""A target that two ranks share: its answers, and what ranks agree on.

On a GPU machine each rank has a GPU (`make gpu-ranks`); elsewhere ranks are processes on the CPU.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from counted_graphs import without_gpu
from distributions import bound, chi_squared, total_variation
from engines import GREEDY, engine_config, prompts, run, sampling_config, tokens
from heads import save_tiny_head
from mtp import save_tiny_hybrid, save_tiny_mtp_model
from target_distribution import joint, sample
from tiny_models import DEVICE, VOCAB, Tiny
from two_ranks import with_shared_draft

from outrider.engine.api import RequestOutput, SamplingParams, ignore_progress
from outrider.engine.config import DraftVocabulary, EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models import loading
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.host_pages import HostPages
from outrider.engine.models.loading import load_network
from outrider.engine.models.shares import WHOLE, Share
from outrider.engine.ranks import group as group_module
from outrider.engine.ranks import own_shares
from outrider.engine.ranks.group import RankGroup
from outrider.engine.ranks.shared_decoder import SharedDecoder
from outrider.engine.ranks.shared_host_pages import SharedHostPages
from outrider.engine.ranks.wire import Op

SOME = ["qwen2"]  # with biases of q, k and v
# On GPUs each runs other kernels; on a CPU test_shares.py compares every family.
OTHERS = ["llama", "mistral", "phi3", "qwen3_moe", "glm4_moe", "granitemoe"]
STEPS = ["PeerMemory", "connect", "compile", "try_out"]  # to memory that GPUs read of each other
PROMPTS = prompts([3, 17, 9, 40], VOCAB)


def prompt_logprobs(outputs: list[list[RequestOutput]]) -> torch.Tensor:
    return torch.tensor(
        [
            [chance for _, chance in sorted(logprobs.top)]
            for each in outputs
            for output in each
            for logprobs in output.prompt_logprobs or []
        ]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "architecture", [*SOME, *(pytest.param(name, marks=pytest.mark.deep) for name in OTHERS)]
)
def test_two_ranks_answer_as_one_process(
    architecture: str, tiny_model: Tiny, draft: Path, start: Callable[[EngineConfig], Engine]
) -> None:
    """They share the draft as well. The first edits logits, alone."""
    config = engine_config(tiny_model(architecture), draft, max_num_batched_tokens=32)
    params = [replace(GREEDY, prompt_logprobs=20)] * 4
    params[1] = replace(params[1], frequency_penalty=0.7, logit_bias={5: 2.0})
    alone, both = Engine(config), start(with_shared_draft(config))
    one, two = (run(engine, PROMPTS, params) for engine in (alone, both))
    assert len(both.worker.pair.on_all_ranks) == both.info.tensor_parallel == 2
    # Every draft is what one process would have drafted.
    assert both.stats().drafted_per_position == alone.stats().drafted_per_position
    assert both.stats().accepted_per_position == alone.stats().accepted_per_position
    assert [tokens(outputs) for outputs in two] == [tokens(outputs) for outputs in one]
    ours, theirs = prompt_logprobs(two), prompt_logprobs(one)
    assert len(ours) == sum(map(len, PROMPTS)) - len(PROMPTS)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="no equal bits in float32 there")
def test_answers_of_two_ranks_have_the_same_bits_in_any_company(
    tiny_model: Tiny, start: Callable[[EngineConfig], Engine]
) -> None:
    """Sums of one row, of a whole batch and of a prompt in chunks add the same parts alike."""
    # One row of so many inputs is summed otherwise on some machines.
    wide = {"vocab_size": 512, "hidden_size": 192, "num_attention_heads": 6}
    wide |= {"intermediate_size": 3072, "num_key_value_heads": 2}
    target, draft = tiny_model("llama", scale=0.06, **wide), tiny_model(scale=0.066, **wide)
    config = engine_config(target, draft, k=3, max_num_batched_tokens=40, max_num_seqs=8)
    engine = start(with_shared_draft(replace(config, batch_invariant=True)))
    drawn = SamplingParams(max_tokens=16, seed=7, verification="match", logprobs=2, ignore_eos=True)
    greedy = replace(drawn, temperature=0.0)
    texts, params = prompts((3, 15, 90, 47), 512), [greedy, drawn, drawn, greedy]

    def bits(outputs: list[RequestOutput]) -> list[Any]:
        return [tokens(outputs), [entry for output in outputs for entry in output.logprobs or ()]]

    alone = [bits(run(engine, [text], p)[0]) for text, p in zip(texts, params, strict=True)]
    assert len({token for ids, _ in alone for token in ids}) > 30  # no loop of a few
    engine.start_over()  # so that prompts are computed beside each other
    for _ in range(2):
        assert list(map(bits, run(engine, texts, params))) == alone
    assert 0 < sum(engine.stats().accepted_per_position) < sum(engine.stats().drafted_per_position)


@pytest.mark.gpu
@pytest.mark.deep
def test_ranks_share_a_hybrid_with_its_head_and_the_states_behind_prefixes(
    tmp_path: Path, start: Callable[[EngineConfig], Engine]
) -> None:
    """Each rank keeps the states of its heads, and copies them when the first does."""
    target = save_tiny_hybrid(tmp_path / "target", "qwen3_5_text", seed=1)
    config = engine_config(target, target, state_interval=8, max_num_batched_tokens=32)
    params = replace(GREEDY, logprobs=2)
    [text] = prompts([40], VOCAB)
    found = []
    for engine in (Engine(config), start(config)):
        answers = [run(engine, [text[:length]], params) for length in (40, 40, 30)]
        stats = engine.stats()
        assert stats.cached_tokens > 0
        assert sum(stats.drafted_per_position) > 0
        found.append([tokens(outputs) for (outputs,) in answers])
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("has_head", [False, True])
def test_ranks_agree_on_the_rows_that_the_last_mlp_computes(
    has_head: bool, tmp_path: Path, start: Callable[[EngineConfig], Engine]
) -> None:
    """A pass of prompts computes no others than are read; the head reads all, on rank 0 alone."""
    target = save_tiny_mtp_model(tmp_path / "target")
    config = engine_config(target, target if has_head else None, max_num_batched_tokens=512)
    given = prompts([150, 150], VOCAB)  # in one pass
    one, two = (run(engine, given, GREEDY) for engine in (Engine(config), start(config)))
    assert list(map(tokens, two)) == list(map(tokens, one))


@pytest.mark.gpu
def test_pages_of_all_ranks_go_to_host_memory_and_come_back(
    tiny_model: Tiny, draft: Path, start: Callable[[EngineConfig], Engine]
) -> None:
    # With small weights attention hardly matters, and answers stay the same without it.
    target = tiny_model("llama", scale=0.3)
    config = engine_config(target, draft, num_pages=24, max_num_batched_tokens=32)
    texts = prompts([60, 61, 62], VOCAB)
    config = replace(config, cache=replace(config.cache, host_gib=1e-3))
    alone, engine = Engine(config), start(config)
    expected = [tokens(outputs) for outputs in run(alone, texts, GREEDY)]
    for _ in range(2):
        assert [tokens(run(engine, [text], GREEDY)[0]) for text in texts] == expected
    stats = engine.stats()
    assert stats.host_loaded_tokens > 60
    # The memory is that of all ranks: in the same, two ranks keep no more than one process.
    assert engine.info.host_bytes <= 1e-3 * 2**30
    assert engine.info.host_pages <= alone.info.host_pages


@pytest.mark.gpu
def test_ranks_group_layers_alike_where_the_cache_holds_less_than_a_window(
    tiny_model: Tiny, start: Callable[[EngineConfig], Engine]
) -> None:
    """Slots have room for what the cache holds, 52 tokens; the model has it for 256."""
    config = engine_config(tiny_model("exaone4", sliding_window=64), num_pages=14)
    config = replace(config, cache=replace(config.cache, host_gib=1e-3))
    texts = prompts([20, 21, 22], VOCAB)
    alone, engine = Engine(config), start(config)
    for _ in range(2):
        one, two = (list(map(tokens, run(each, texts, GREEDY))) for each in (alone, engine))
        assert two == one
    assert engine.stats().host_loaded_tokens == alone.stats().host_loaded_tokens > 0


def test_ranks_copy_the_groups_that_they_have() -> None:
    """The first has another group in front of the states: that of its draft."""
    own, others, sent = Mock(), Mock(), []
    others.send = lambda *frame: sent.append(frame)
    pages = SharedHostPages(own, others, groups=[0, 2], num_bytes=1)
    for group in range(3):
        pages.save(group, [5, 6], [7, 8])
        pages.load(group, [7, 8], [5, 6])
    assert [(op, shape) for op, shape, _ in sent] == [
        (Op.SAVE, (0,)), (Op.LOAD, (0,)), (Op.SAVE, (1,)), (Op.LOAD, (1,)),
    ]  # fmt: skip
    assert [integers_np.tolist() for *_, integers_np in sent[2:]] == [
        [[5, 6], [7, 8]],
        [[7, 8], [5, 6]],
    ]
    assert [call.args[0] for call in own.save.call_args_list] == [0, 1, 2]


def test_steps_of_all_ranks_wait_for_what_comes_back() -> None:
    own, others = Mock(), Mock()
    others.ask.return_value = [np.zeros(0)]
    SharedHostPages(own, others, groups=[0], num_bytes=1).before_steps()
    own.before_steps.assert_called_once_with()
    others.ask.assert_called_once_with(Op.LOADED)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="its ranks are forked from what is changed here")
@pytest.mark.parametrize("fails", ["save", "load", "before_steps"])
def test_host_memory_that_fails_on_one_rank_is_left_by_all(
    fails: str,
    tiny_model: Tiny,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody's answer changes, and no request ends."""
    own_pid, call = os.getpid(), getattr(HostPages, fails)

    def failing(pages: HostPages, *args: Any) -> None:
        if os.getpid() != own_pid:
            raise RuntimeError("the bus is gone")
        call(pages, *args)

    monkeypatch.setattr(HostPages, fails, failing)
    config = engine_config(tiny_model(scale=0.3), num_pages=24, proposer="none")
    texts = prompts([60, 61, 62], VOCAB)
    expected = [tokens(outputs) for outputs in run(Engine(config), texts, GREEDY)]
    engine = start(replace(config, cache=replace(config.cache, host_gib=1e-3)))
    for others in ([], [[1, 2, 3]], []):
        for text, answer in zip(texts, expected, strict=True):
            assert tokens(run(engine, [*others, text], GREEDY)[-1]) == answer
    warnings = [r.message for r in caplog.records if "host memory" in r.message]
    assert len(warnings) == 1
    assert "on another rank: RuntimeError: the bus is gone" in warnings[0]
    stats = engine.stats()
    assert (stats.host_pages_total, stats.host_loaded_tokens) == (0, 0)


@pytest.mark.gpu
@pytest.mark.deep
def test_all_ranks_bring_states_back_with_their_pages(
    tmp_path: Path, start: Callable[[EngineConfig], Engine]
) -> None:
    """Between two prompts another takes their pages and states."""
    target = save_tiny_hybrid(tmp_path / "target", "qwen3_5_text", seed=1)
    config = engine_config(target, target, state_interval=8, max_num_seqs=2, num_pages=24, k=2)
    config = replace(config, cache=replace(config.cache, host_gib=4e-3))
    texts = prompts([60, 61, 62], VOCAB)
    alone, engine = Engine(config), start(config)
    expected = [tokens(outputs) for outputs in run(alone, texts, GREEDY)]
    for _ in range(2):
        assert [tokens(run(engine, [text], GREEDY)[0]) for text in texts] == expected
    assert engine.stats().host_loaded_tokens > 100
    assert engine.info.host_bytes <= 4e-3 * 2**30
    assert engine.info.host_pages <= alone.info.host_pages


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("proposer", "num_kv_heads"),
    [
        pytest.param("draft_model", 1, marks=pytest.mark.deep),
        ("shared draft_model", 2),
        pytest.param("head", 2, marks=pytest.mark.deep),
    ],
)
def test_the_joint_of_two_ranks_is_the_targets(
    proposer: str,
    num_kv_heads: int,
    tiny_model: Tiny,
    tmp_path: Path,
    start: Callable[[EngineConfig], Engine],
) -> None:
    """A head reads hidden states, which are whole on the first rank, as a draft may be, which has
    another vocabulary here. Of one KV head both ranks have a copy.
    """
    sizes = {"vocab_size": 4, "scale": 0.15}
    target = tiny_model(
        "llama", seed=3, num_hidden_layers=2, num_key_value_heads=num_kv_heads, **sizes
    )
    if proposer == "head":
        drafter = save_tiny_head(tmp_path, target, boundaries=(0, 1, 2), scale=0.2)
    else:
        drafter = tiny_model("llama", seed=4, num_hidden_layers=1, vocab_size=7, scale=0.15)
    config = sampling_config(target, drafter, "draft_model")
    if proposer != "head":
        assert config.draft is not None
        vocabulary = DraftVocabulary(
            target_ids=(-1, 3, -1, 0, 1, -1, -1), read_as=(3, 4, 2, 1), share_of_text=0.75
        )
        config = replace(config, draft=replace(config.draft, vocabulary=vocabulary))
    engine = start(with_shared_draft(config) if proposer == "shared draft_model" else config)
    params = SamplingParams(max_tokens=4, verification="token")
    truth = joint(target, [2, 0, 3], params)
    counts = sample(engine, [2, 0, 3], params, max_k=3, n=2400)
    assert total_variation(truth, counts) < bound(len(truth), 2400)
    assert chi_squared(truth, counts) < 1
    stats = engine.stats()
    assert 0 < sum(stats.accepted_per_position) < sum(stats.drafted_per_position)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts what runs in place of graphs")
def test_all_ranks_run_a_shape_once_and_then_only_capture_it(
    tiny_model: Tiny, start: Callable[[EngineConfig], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 80 layers each pass takes the host of every rank tenths of a second."""
    passes = torch.zeros(2, dtype=torch.int64).share_memory_()
    run_pass = SharedDecoder.run

    def counted(decoder: SharedDecoder, *args: Any) -> Any:
        passes[decoder._group.rank] += 1
        return run_pass(decoder, *args)

    monkeypatch.setattr(SharedDecoder, "run", counted)
    stages: list[str] = []
    with without_gpu():
        engine = start(engine_config(tiny_model(), max_num_seqs=2))
        engine.worker.compile(lambda stage, *_: stages.append(stage))
        passes.zero_()
        for _ in range(2):  # to learn how much memory graphs take, and over the pages there are
            engine.worker.allocate(8)
            engine.worker.capture(ignore_progress)
        engine.worker.compile(ignore_progress)  # answered when the others are done
    num_captures = 2 * len(engine.worker.pair.target.captured)
    assert passes.tolist() == [num_captures + num_captures // 2] * 2
    assert stages == ["compiling kernels", "loading kernels on the other ranks"]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="forks this process")
@pytest.mark.parametrize("unable", [None, 0, 1])
def test_all_ranks_are_batch_invariant_or_none(
    unable: int | None,
    tiny_model: Tiny,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else two routers might choose other experts, of which the ranks would add parts."""
    own_pid = os.getpid()
    make = loading.make_batch_invariant

    def made(*args: Any, **options: Any) -> None:
        if unable is not None and (os.getpid() == own_pid) == (unable == 0):
            raise ValueError("there is too little memory to find out how it sums")
        make(*args, **options)

    seen = torch.zeros(2, dtype=torch.int64).share_memory_()
    run_pass = SharedDecoder.run

    def noted(decoder: SharedDecoder, *args: Any) -> Any:
        seen[decoder._group.rank] = 1 + decoder.batch_invariant
        return run_pass(decoder, *args)

    monkeypatch.setattr(loading, "make_batch_invariant", made)
    monkeypatch.setattr(SharedDecoder, "run", noted)
    engine = start(engine_config(tiny_model("qwen3_moe")))
    assert run(engine, PROMPTS[:1], GREEDY)
    assert engine.info.batch_invariant == (unable is None)
    assert seen.tolist() == [1 + (unable is None)] * 2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts what stands in for graphs")
def test_no_graph_is_left_when_the_group_ends(
    tiny_model: Tiny,
    draft: Path,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL would wait for it for ever."""
    left: list[dict[Any, Any]] = []
    destroy = group_module.dist.destroy_process_group

    with without_gpu():
        engine = start(with_shared_draft(engine_config(tiny_model(), draft, max_num_seqs=2)))
        networks = engine.worker.pair.on_all_ranks
        engine.worker.capture(ignore_progress)
        assert len(networks) == 2
        assert all(network.captured for network in networks)

        def noted() -> None:
            left.extend(network.captured for network in networks)
            destroy()

        monkeypatch.setattr(group_module.dist, "destroy_process_group", noted)
        engine.worker.close()
    assert left == [{}, {}]


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("", ""),
        ("an engine before", "rank 0: RuntimeError: an engine before this one"),
        ("PeerMemory", "rank 0: ImportError: no PeerMemory here"),
        ("connect", "rank 0: RuntimeError: no connect here"),
        ("try_out", "rank 0: RuntimeError: no try_out here"),
        ("connect of rank 1", "rank 1: RuntimeError: operation not permitted"),
    ],
)
def test_peer_memory_is_left_alone_if_one_rank_has_none(
    fails: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others would wait for it in the next step, for ever."""
    done = []

    def step(name: str) -> None:
        done.append(name)
        if fails == name:
            error = ImportError if name == "PeerMemory" else RuntimeError
            raise error(f"no {name} here\nand much more")

    peers = Mock(**{f"{name}.side_effect": partial(step, name) for name in STEPS[1:]})

    def made(device: torch.device) -> Mock:
        step("PeerMemory")
        return peers

    def gather(x: torch.Tensor) -> torch.Tensor:
        theirs = torch.zeros_like(x)
        if done and fails == f"{done[-1]} of rank 1":
            text = b"RuntimeError: operation not permitted"
            theirs[0, : len(text)] = torch.tensor(list(text))
        return torch.stack((x, theirs))

    made.num_connected = int(fails == "an engine before")  # type: ignore[attr-defined]
    monkeypatch.setattr(group_module, "PeerMemory", made)
    group = RankGroup(0, 2)
    monkeypatch.setattr(group, "gather", gather)
    with caplog.at_level("INFO"):
        group._meet_peers(torch.device("cpu"))
    assert group._peers is (None if fails else peers)
    last = fails.partition(" of ")[0]
    assert done == (STEPS[: STEPS.index(last) + 1] if last in STEPS else [] if fails else STEPS)
    said = f"all parts of sums by NCCL ({reason}" if fails else "in each other's memory"
    assert said in caplog.text


@pytest.mark.skipif(DEVICE.type == "cuda", reason="its ranks are forked from what is changed here")
def test_pages_are_as_many_as_the_rank_with_the_least_room_has(
    tiny_model: Tiny, start: Callable[[EngineConfig], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_shares, "left_bytes", lambda *_args, **_more: 100_000)
    worker = start(engine_config(tiny_model())).worker
    of_the_other = worker.fewest_pages(10**6)
    assert 0 < of_the_other < 1000
    assert worker.fewest_pages(of_the_other - 1) == of_the_other - 1


def test_shares_of_two_ranks_make_the_whole(tiny_model: Tiny) -> None:
    """Each holds half of every layer that has an axis."""
    config = ModelConfig(path=str(tiny_model("qwen2")), dtype="float32")
    decoders = [
        load_network(config, DEVICE, share=share) for share in (WHOLE, Share(0, 2), Share(1, 2))
    ]
    blocks = []
    for decoder in decoders:
        assert isinstance(decoder, Decoder)
        blocks.append(decoder.blocks[1])
    for part in range(2):
        whole, first, second = (block.parts[part].linears for block in blocks)
        for name, layer in whole.items():
            matrix = layer.weight.dequantised()
            own, other = (share[name].weight.dequantised() for share in (first, second))
            dim = 0 if layer.axis == "outputs" else 1
            assert own.shape[dim] == other.shape[dim] == matrix.shape[dim] // 2
            # Rows of q, k and v, and of gate and up, alternate: as a set, they are those of both.
            rows = torch.cat((own, other), dim)
            found = {tuple(row) for row in rows.movedim(dim, 0).tolist()}
            assert found == {tuple(row) for row in matrix.movedim(dim, 0).tolist()}
