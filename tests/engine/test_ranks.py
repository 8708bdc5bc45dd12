"""A target that two ranks share: the answers, and what happens when one of them is lost.

On a GPU machine each rank has a GPU (`make gpu-ranks`); elsewhere ranks are processes on the CPU.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from counted_graphs import without_gpu
from distributions import bound, chi_squared, total_variation
from engines import GREEDY, engine_config, prompts, run, sampling_config, tokens
from forked_ranks import forked
from heads import save_tiny_head
from mtp import save_tiny_hybrid, save_tiny_mtp_model
from target_distribution import joint, sample
from tiny_models import DEVICE, VOCAB, Tiny

from outrider.engine.api import RequestOutput, SamplingParams, ignore_progress
from outrider.engine.config import ConfigError, DraftVocabulary, EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models import loading, pair
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network
from outrider.engine.models.shares import WHOLE, Share
from outrider.engine.ranks import admission, followers, own_shares
from outrider.engine.ranks import group as group_module
from outrider.engine.ranks.followers import RankLostError
from outrider.engine.ranks.group import RankGroup
from outrider.engine.ranks.shared_decoder import SharedDecoder
from outrider.engine.ranks.shared_host_pages import SharedHostPages
from outrider.engine.ranks.wire import Op

SOME = ["qwen2"]  # with biases of q, k and v
# On GPUs each runs other kernels; on a CPU test_shares.py compares every family.
OTHERS = ["llama", "mistral", "phi3", "qwen3_moe", "glm4_moe", "granitemoe"]
STEPS = ["PeerMemory", "connect", "compile", "try_out"]  # to memory that GPUs read of each other
PROMPTS = prompts([3, 17, 9, 40], VOCAB)


def shared(config: EngineConfig, size: int = 2) -> EngineConfig:
    target = replace(config.target, tensor_parallel=size)
    return replace(config, target=target, num_threads=1)


def with_shared_draft(config: EngineConfig, size: int = 2) -> EngineConfig:
    assert config.draft is not None
    return replace(config, draft=replace(config.draft, tensor_parallel=size))


@pytest.fixture
def start(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[EngineConfig], Engine]]:
    """Start an engine of two ranks; afterwards, all processes have ended.

    They leave no file while they run: so there is none however they end, even killed.
    """
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    engines = []
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def started(config: EngineConfig) -> Engine:
        if DEVICE.type == "cuda":
            engines.append(Engine(shared(config)))
            ranks = engines[-1].worker.followers
            assert ranks is not None
            # Else this would test NCCL alone.
            by_nccl = os.environ.get("NCCL_P2P_DISABLE") == "1"
            assert (ranks.group._peers is None) == by_nccl
        else:
            with forked():
                engines.append(Engine(shared(config)))
        return engines[-1]

    yield started
    left = list(temporary.iterdir())
    for engine in engines:
        engine.worker.close()
        with pytest.raises(ProcessLookupError):
            os.kill(follower_of(engine), 0)
    assert left == []


def follower_of(engine: Engine) -> int:
    ranks = engine.worker.followers
    assert ranks is not None
    (pid,) = ranks.pids
    return pid


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
    """They share the draft as well."""
    config = engine_config(tiny_model(architecture), draft, max_num_batched_tokens=32)
    params = replace(GREEDY, prompt_logprobs=20)
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


def test_ranks_copy_the_groups_that_they_have() -> None:
    """The first has another group in front of the states: that of its draft."""
    own, sent = Mock(), []
    pages = SharedHostPages(own, lambda *frame: sent.append(frame), groups=[0, 2], num_bytes=1)
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
    own, sent = Mock(), []
    pages = SharedHostPages(own, lambda op, *_: sent.append(op), groups=[0], num_bytes=1)
    pages.before_steps()
    own.before_steps.assert_called_once_with()
    assert sent == [Op.LOADED]


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
@pytest.mark.deep
@pytest.mark.parametrize(
    ("proposer", "num_kv_heads"), [("draft_model", 1), ("shared draft_model", 2), ("head", 2)]
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


@pytest.mark.skipif(
    DEVICE.type == "cuda",
    reason="a GPU waits for the lost rank for ever, so that this process would end",
)
def test_a_follower_that_dies_or_hangs_ends_the_step(
    tiny_model: Tiny,
    draft: Path,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followers, "HUNG_AFTER_S", 1.5)
    for number, reason in (
        (signal.SIGKILL, r"rank 1 of the target: killed by signal 9"),
        (signal.SIGSTOP, r"rank 1 of the target: it has not been heard for 1\.5 s"),
    ):
        engine = start(with_shared_draft(engine_config(tiny_model(), draft)))
        assert run(engine, PROMPTS[:1], GREEDY)
        os.kill(follower_of(engine), number)
        with pytest.raises(RankLostError, match=reason):
            run(engine, PROMPTS, GREEDY)
        engine.worker.close()


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


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what is captured cannot fail in this way")
def test_a_shared_draft_that_fails_ends_the_engine(
    tiny_model: Tiny,
    draft: Path,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ranks are left in its pass: what the first exchanged next would be taken for it."""
    engine = start(with_shared_draft(engine_config(tiny_model(), draft)))
    monkeypatch.setattr(followers, "_NEWS_S", 0.0)
    monkeypatch.setattr(engine.worker.pair.draft, "embedded", Mock(side_effect=MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        run(engine, PROMPTS, GREEDY)


def first_frame_of(follower: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is heard of a process that runs this code, with the socket `s`; None: its loss."""
    code = f"import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); {follower}"
    monkeypatch.setattr(followers, "_COMMAND", (sys.executable, "-c", code))
    meeting_fd, lost = os.memfd_create("meeting"), followers._Loss()
    one = followers._Follower(1, EngineConfig(target=ModelConfig(path="")), meeting_fd, lost)
    answer = one.answers.get(timeout=30)
    followers._end([one], lost, RankGroup(0, 2))
    os.close(meeting_fd)
    return answer, lost.reason


def test_a_follower_may_start_slowly_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first word it imports torch, from a cold disk perhaps."""
    monkeypatch.setattr(followers, "HUNG_AFTER_S", 0.2)
    words = [(int(op).to_bytes(8, "little") + bytes(16)) for op in (Op.ALIVE, Op.ANSWER)]
    speaks = f"time.sleep(0.5); s.sendall({words[0]!r} + {words[1]!r}); time.sleep(60)"
    answer, reason = first_frame_of(speaks, monkeypatch)
    assert answer is not None
    assert reason is None
    monkeypatch.setattr(followers, "FIRST_WORD_S", 0.1)
    answer, reason = first_frame_of("time.sleep(60)", monkeypatch)
    assert answer is None
    assert reason == "rank 1 of the target: it has not been heard for 0.1 s"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="forks this process")
def test_a_follower_that_dies_where_ranks_meet_ends_the_engine(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first would wait for it for half an hour."""
    path = tiny_model()

    def die(group: RankGroup, *_: Any) -> None:
        os._exit(9)

    def start() -> None:
        monkeypatch.setattr(followers, "_GRACE_S", 0.2)
        join = RankGroup.join
        monkeypatch.setattr(
            RankGroup, "join", lambda group, *args: (die if group.rank else join)(group, *args)
        )
        with forked():
            Engine(shared(engine_config(path)))

    assert exit_code_of(start) == 1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs no GPU")
def test_an_engine_beside_another_of_the_process_is_refused(
    tiny_model: Tiny, start: Callable[[EngineConfig], Engine]
) -> None:
    config = engine_config(tiny_model())
    engine = start(config)
    with pytest.raises(ConfigError, match=r"torch\.distributed is in use in this process.*close"):
        Engine(shared(config))
    engine.worker.close()
    start(config)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="forks this process")
def test_a_process_goes_on_while_its_group_takes_long_to_end(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model()

    def start_and_close() -> None:
        monkeypatch.setattr(followers, "_GRACE_S", 0.1)
        with forked():
            engine = Engine(shared(engine_config(path)))
        leave = RankGroup.leave
        monkeypatch.setattr(RankGroup, "leave", lambda group: (time.sleep(1), leave(group)))
        engine.worker.close()

    assert exit_code_of(start_and_close) == 0


def exit_code_of(run_it: Callable[[], None]) -> int | None:
    """Of a process forked from this one; None if it hangs."""
    pid = os.fork()
    if pid == 0:
        try:
            run_it()
            os._exit(0)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(ended[1])


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
def test_a_follower_that_cannot_load_says_why_once(
    tiny_model: Tiny,
    start: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    load = pair.load_network

    def refused(*args: Any, share: Share = WHOLE, **options: Any) -> Any:
        if share.rank == 1:
            raise UnsupportedModelError("its share is damaged")
        return load(*args, share=share, **options)

    monkeypatch.setattr(pair, "load_network", refused)
    with pytest.raises(ConfigError, match=r"^rank 1 of the target: its share is damaged$"):
        start(engine_config(tiny_model()))
    assert "damaged" not in "".join(capfd.readouterr())


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


@pytest.mark.parametrize(
    ("size", "architecture", "reason"),
    [
        (3, "llama", r"does not divide .*num_key_value_heads 2: set it to 1 or 2 or 4$"),
        (4, "gpt_oss", r"does not divide intermediate_size 64 in groups of 32: set it to 1 or 2$"),
        (2, "granitemoehybrid", r"does not divide mamba_n_groups 1: set it to 1$"),
        (2, "gemma2", "runs as transformers has it .*: leave it out, or run a replica on each GPU"),
        (0, "llama", "target.tensor_parallel is 0; it is at least 1"),
    ],
)
def test_a_target_that_cannot_be_shared_is_refused_at_once(
    size: int,
    architecture: str,
    reason: str,
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a process is started, or a weight is read."""
    monkeypatch.setattr(followers, "Followers", None)
    monkeypatch.setattr(pair, "load_network", None)
    with pytest.raises(ConfigError, match=reason):
        Engine(shared(engine_config(tiny_model(architecture)), size))


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([("H100", 80), ("H100", 80)], None),
        (
            [("H100", 80), ("A100", 80)],
            "the GPUs are A100 and H100, but ranks need GPUs of one model: ",
        ),
        ([("H100", 80), ("H100", 64)], "the GPUs have 80, 64 GiB, and all get shares of the same"),
        ([("H100", 80)], "1 GPUs are visible: set it to 1 at most"),
    ],
)
def test_ranks_have_gpus_of_one_kind(
    gpus: list[tuple[str, int]], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the kernels for its own."""
    made = [SimpleNamespace(name=name, total_memory=gib << 30) for name, gib in gpus]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: made[i])
    found = admission.why_not_these_gpus(2, torch.device("cuda"))
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)


@pytest.mark.parametrize(
    ("ranks", "size", "draft", "reason"),
    [
        (1, 2, {}, "target.tensor_parallel is 1, and a draft is whole on the first of its ranks"),
        (4, 2, {}, "target.tensor_parallel is 4, .* leave it out, or set both to one number"),
        (2, 4, {}, "target.tensor_parallel is 2, .* leave it out, or set both to one number"),
        (2, 2, {"architecture": "gemma2"}, "the draft runs as transformers has it .*: leave it"),
        (2, 2, {"intermediate_size": 63}, "does not divide intermediate_size 63: leave it out"),
        (2, 2, None, "only a draft model can be shared, and this is a head: leave it out"),
    ],
)
def test_a_draft_that_cannot_be_shared_is_refused_at_once(
    ranks: int,
    size: int,
    draft: dict[str, Any] | None,
    reason: str,
    tiny_model: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followers, "Followers", None)
    monkeypatch.setattr(pair, "load_network", None)
    target = tiny_model(num_key_value_heads=4)
    path = save_tiny_head(tmp_path, target) if draft is None else tiny_model(**draft)
    config = with_shared_draft(shared(engine_config(target, path), ranks), size)
    with pytest.raises(ConfigError, match=rf"^draft\.tensor_parallel is {size}, but .*{reason}"):
        Engine(config)
