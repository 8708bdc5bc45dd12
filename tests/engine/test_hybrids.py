"""Targets of which most layers keep a state in place of KV, which cannot go back: Qwen3.5 and
its mixtures, Nemotron 3, and Granite 4.

test_random_comparison.py has one among its kinds: any mixture of sequences, to the bit.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, is_greedy, lagging, prompts, run, tokens
from mtp import PlainHybrid, check_drafts, save_tiny_hybrid
from paged import PROMPT, check_against_eager, run_prompt
from safetensors.torch import load_file, save_file
from tiny_models import (
    DEVICE,
    VOCAB,
    Tiny,
    change_config,
    change_tensor,
    save_tiny_model,
    write_index,
)
from transformers import AutoModelForCausalLM

from outrider.engine import seats
from outrider.engine.api import NewRequest, ignore_progress
from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.measuring import OutOfDeviceMemoryError
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.architectures import load_config
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.groups import LayerGroup
from outrider.engine.models.heads.config import HeadError
from outrider.engine.models.heads.loading import load_head
from outrider.engine.models.loading import load_network
from outrider.engine.models.pair import ModelPair
from outrider.engine.models.parts import delta_net, mamba2
from outrider.engine.models.weight_files import stored_tensors, unread_files

K = 4


def deep(*case: Any) -> Any:
    """What another test guards, too."""
    return pytest.param(*case, marks=pytest.mark.deep)


@pytest.fixture
def target(tiny_model: Tiny) -> Path:
    return tiny_model("qwen3_5_text")


@pytest.fixture
def own(target: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(target, tmp_path / "own")


def answers(
    engine: Engine, target: Path, asked: list[list[int]], predicted: list[list[int]] | None = None
) -> list[list[int]]:
    """Greedy answers, which must be transformers' own."""
    found = [tokens(outputs) for outputs in run(engine, asked, GREEDY, predicted)]
    for prompt, answer in zip(asked, found, strict=True):
        assert len(answer) == GREEDY.max_tokens
        assert is_greedy(target, prompt, answer)
    return found


def with_mistakes(answer: list[int], *, every: int) -> list[int]:
    return [(t + 1) % VOCAB if i % every == every - 1 else t for i, t in enumerate(answer)]


def test_greedy_answers_are_the_targets_own(target: Path) -> None:
    """Of prompts around the edges of pages and chunks, and in several chunks."""
    answers(Engine(engine_config(target)), target, prompts([1, 4, 5, 63, 65], VOCAB))


@pytest.mark.parametrize(
    ("lag", "architecture"),
    [
        (0, "qwen3_5_text"),
        (1, "qwen3_5_text"),
        (1, "nemotron_h"),
        deep(1, "qwen3_5_moe_text"),  # test_random_comparison.py
        deep(1, "granitemoehybrid"),
    ],
)
def test_any_number_of_drafts_may_be_accepted(
    lag: int, architecture: str, tiny_model: Tiny
) -> None:
    target = tiny_model(architecture)
    asked = prompts([5, 9, 2, 14, 7], VOCAB)
    right = answers(Engine(engine_config(target)), target, asked)
    engine = Engine(engine_config(target, proposer="suffix", k=K))
    engine.scheduler.lag = lag
    accepted, commit = set(), engine.committer._commit_drawn

    def counted(scheduled):  # type: ignore[no-untyped-def]
        if scheduled.num_drafts:
            accepted.add((scheduled.num_drafts, len(scheduled.token_ids) - 1))
        return commit(scheduled)

    engine.committer._commit_drawn = counted  # type: ignore[method-assign]
    predicted = [with_mistakes(a, every=n) for a, n in zip(right, (2, 4, 5, 6, 7), strict=True)]
    assert answers(engine, target, asked, predicted) == right
    assert {count for _, count in accepted} >= {0, 1, 2, 3, 4}
    assert any(count < drafted for drafted, count in accepted if count)


@pytest.mark.parametrize(
    "architecture",
    ["qwen3_5_text", deep("nemotron_h")],  # test_random_comparison.py
)
def test_a_model_may_draft_for_it(architecture: str, tiny_model: Tiny) -> None:
    """Whose KV lies in the same pages, and which falls behind and catches up."""
    target = tiny_model(architecture)
    engine = lagging(engine_config(target, tiny_model("qwen3"), k=K))
    answers(engine, target, prompts([5, 30, 1, 70], VOCAB))
    assert engine.stats().drafted_per_position[0] > 20


@pytest.mark.parametrize(
    "architecture",
    # test_quantised_hybrids.py has the others' formulas.
    ["qwen3_5_moe_text", deep("qwen3_5_text"), deep("qwen3_next")],
)
def test_the_mtp_head_drafts_by_its_formulas(architecture: str, tmp_path: Path) -> None:
    """Also behind rejected drafts, in chunks, and a step ahead; the answers are the target's.

    The experts of one mixture are stacked, those of the other one by one.
    """
    path = save_tiny_hybrid(tmp_path / "model", architecture)
    asked, plain = prompts([3, 70], VOCAB), PlainHybrid(path)
    engine = lagging(engine_config(path, path, k=2))
    assert engine.info.proposer == "mtp"
    requests = [
        NewRequest(request_id=str(i), prompt_token_ids=ids, params=GREEDY, returns_drafts=True)
        for i, ids in enumerate(asked)
    ]
    engine.submit(requests)
    known, num_drafts = [list(ids) for ids in asked], 0
    while engine.has_work():
        for output in engine.step():
            tokens_so_far = known[int(output.request_id)]
            if drafts := output.draft_token_ids:
                assert drafts == plain.drafts(tokens_so_far, len(drafts))
                num_drafts += len(drafts)
            tokens_so_far += output.token_ids
    assert num_drafts > 40
    for prompt, ids in zip(asked, known, strict=True):
        assert is_greedy(path, prompt, ids[len(prompt) :])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mtp_num_hidden_layers": 2}, "its MTP head has 2 layers; one is read here"),
        ({"model_type": "llama"}, "no MTP head is known for models of type llama"),
    ],
)
def test_another_mtp_head_is_refused(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    path = save_tiny_hybrid(tmp_path / "model")
    config = ModelConfig(path=str(path), dtype="float32", is_mtp=True)
    network = load_network(config, DEVICE)
    change_config(path, **changes)
    with pytest.raises(HeadError, match=says):
        load_head(config, network, config.path)


@pytest.mark.parametrize("dedicated", [True, False])
def test_an_mtp_head_reads_its_own_embedding_where_the_config_says_so(
    dedicated: bool, tmp_path: Path
) -> None:
    path = save_tiny_hybrid(tmp_path / "model")
    change_config(path, mtp_use_dedicated_embeddings=dedicated)
    own = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(2))
    change_tensor(path, "mtp.embed_tokens.weight", own)
    check_drafts(path, path)


def test_an_embedding_of_an_mtp_head_that_no_file_holds_is_the_targets_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tiny_hybrid(tmp_path / "model")
    change_config(path, mtp_use_dedicated_embeddings=True)
    check_drafts(path, path)
    said = "its MTP head has an embedding of its own by its config (mtp_use_dedicated_embeddings)"
    assert f"{path}: {said}, and its files hold none: it reads the target's" in caplog.text


def test_an_mtp_head_is_found_under_the_models_name_too(tmp_path: Path) -> None:
    path = save_tiny_hybrid(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    named = {f"model.{n}" if n.startswith("mtp.") else n: tensor for n, tensor in tensors.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    assert Engine(engine_config(path, path, k=2)).info.proposer == "mtp"


@pytest.mark.parametrize("indexed", ["nothing", "the model", "all"])
def test_an_mtp_head_may_have_a_file_of_its_own(indexed: str, tmp_path: Path) -> None:
    """Outside the index, in it, or in it although there is no such file."""
    path = save_tiny_hybrid(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    of_head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    save_file(of_head, path / "mtp.safetensors", metadata={"format": "pt"})
    places = dict.fromkeys(tensors, "model.safetensors")
    if indexed == "all":
        places |= dict.fromkeys(of_head, "mtp.safetensors")
    if indexed != "nothing":
        write_index(path, places)
    assert set(stored_tensors(path)) == {*tensors, *of_head}
    assert unread_files(path) == []
    config = ModelConfig(path=str(path), dtype="float32", is_mtp=True)
    network = load_network(config, DEVICE)
    load_head(config, network, config.path)
    (path / "mtp.safetensors").unlink()
    assert set(stored_tensors(path)) == {*tensors}
    with pytest.raises(HeadError, match="its files hold no MTP head"):
        load_head(config, network, config.path)


def test_a_missing_mtp_head_is_said(target: Path) -> None:
    config = ModelConfig(path=str(target), dtype="float32", is_mtp=True)
    with pytest.raises(HeadError, match=r"its files hold no MTP head \(mtp\.fc\.weight\)"):
        load_head(config, load_network(config, DEVICE), config.path)


def test_a_preempted_sequence_starts_over(target: Path) -> None:
    engine = Engine(engine_config(target, num_pages=30, proposer="suffix"))
    answers(engine, target, prompts([30, 25, 31, 28], VOCAB))
    assert engine.stats().preemptions > 0


def test_states_are_counted(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(engine_config(target, proposer="suffix", max_num_seqs=3))
    target_model = engine.worker.pair.target
    kept = [tensor for state in target_model.states for tensor in state.memory]  # type: ignore[attr-defined]
    assert engine.info.state_bytes == target_model.slot_memory.nbytes
    assert sum(tensor.nbytes for tensor in kept) <= engine.info.state_bytes
    # Of three sequences, of padding, and of three prefixes.
    assert [len(tensor) for tensor in kept] == 2 * [7, 7, 7]
    # They come before pages.
    if DEVICE.type == "cpu":
        monkeypatch.setattr("outrider.engine.seats.available_bytes", lambda: 100_000)
        with pytest.raises(
            OutOfDeviceMemoryError, match=r"states of 32 sequences and of prefixes take .* lower"
        ):
            Engine(engine_config(target, num_pages=None))


def step_bytes(vocab_size: int) -> int:
    """What a GPU keeps for graphs and the largest step before it has seats."""
    return 2**30 + 8_400 * vocab_size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("num_fitting", "caches_prefixes", "given", "expected"),
    [
        (5, True, {}, 5),
        (5, False, {}, 5),
        (500, True, {}, 256),  # no more than the device makes use of
        (0, True, {}, 1),  # then what does not fit says so
        (5, True, {"may_lower_seqs": False}, 256),  # somebody has asked for so many
    ],
)
def test_no_more_sequences_run_than_half_of_the_memory_has_states_for(
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    num_fitting: int,
    caches_prefixes: bool,
    given: dict[str, bool],
    expected: int,
) -> None:
    config = engine_config(target, num_pages=None, prefix_caching=caches_prefixes, max_num_seqs=256)
    pair = ModelPair(config, ignore_progress)
    num_states = 2 * num_fitting if caches_prefixes else num_fitting
    room_bytes = 2 * num_states * pair.target.bytes_per_slot(32) + 1
    monkeypatch.setattr(seats, "left_for_caches", lambda _: room_bytes)
    monkeypatch.setattr(seats, "left_bytes", lambda *_, **__: room_bytes + step_bytes(VOCAB))
    scheduler = replace(config.scheduler, **{"may_lower_seqs": True, **given})
    config = replace(config, scheduler=scheduler)
    seated = seats.seated(config, pair, torch.device(device), 32)
    assert seated.scheduler.max_num_seqs == expected


@pytest.mark.parametrize(("vocab_size", "expected"), [(248_320, 1), (65_536, 8)])
def test_a_step_takes_less_room_from_states_with_a_smaller_vocabulary(
    target: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, expected: int
) -> None:
    config = engine_config(target, num_pages=None, max_num_seqs=64)
    pair = ModelPair(config, ignore_progress)
    monkeypatch.setattr(pair, "vocab_size", vocab_size)
    monkeypatch.setattr(pair.target, "bytes_per_slot", lambda _: 40 * 2**20)
    monkeypatch.setattr(seats, "left_bytes", lambda *_, **__: int(2.8 * 2**30))  # of a GPU of 4 GB
    config = replace(config, scheduler=replace(config.scheduler, may_lower_seqs=True))
    seated = seats.seated(config, pair, torch.device("cuda"), 32)
    assert seated.scheduler.max_num_seqs == expected


def test_windows_of_a_head_are_counted_with_the_states_of_a_sequence(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(target, num_pages=None, max_num_seqs=32)
    scheduler = replace(config.scheduler, may_lower_seqs=True)
    config = replace(config, scheduler=scheduler)
    pair = ModelPair(config, ignore_progress)
    windowed = LayerGroup(64, pair.groups[0].layers)
    window_bytes = 64 * windowed.spec.bytes_per_token
    pair.groups.append(windowed)
    of_each = 2 * pair.target.bytes_per_slot(32) + window_bytes
    monkeypatch.setattr(seats, "left_for_caches", lambda _: 2 * 20 * of_each)
    assert seats.seated(config, pair, torch.device("cpu"), 32).scheduler.max_num_seqs == 20


def test_an_engine_has_as_many_seats_as_its_states_have_room_for(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(target, proposer="suffix", max_num_seqs=32)
    state_bytes = Engine(config).worker.pair.target.bytes_per_slot(32)
    monkeypatch.setattr(seats, "left_for_caches", lambda _: 2 * 2 * 3 * state_bytes)
    left_bytes = 2 * 2 * 3 * state_bytes + step_bytes(VOCAB)
    monkeypatch.setattr(seats, "left_bytes", lambda *_, **__: left_bytes)
    scheduler = replace(config.scheduler, may_lower_seqs=True)
    engine = Engine(replace(config, scheduler=scheduler))
    assert engine.info.max_num_seqs == 3
    assert len(answers(engine, target, prompts([30, 25, 31, 28], VOCAB))) == 4
    engine.check_integrity()


def as_published(path: Path, folder: Path) -> Path:
    """The same model as the text of one that reads images, with an MTP head beside it."""
    folder.mkdir()
    config = json.loads((path / "config.json").read_text())
    model_type = config["model_type"].removesuffix("_text")
    whole = {"model_type": model_type, "text_config": config, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(4)
    tensors["mtp.norm.weight"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("architecture", [deep("qwen3_5_text"), "qwen3_5_moe_text"])
def test_the_text_of_a_model_that_reads_images_is_served(
    architecture: str, tiny_model: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_model(architecture)
    asked = prompts([9], VOCAB)
    expected = answers(Engine(engine_config(target)), target, asked)
    engine = Engine(engine_config(as_published(target, tmp_path / "published")))
    assert [tokens(outputs) for outputs in run(engine, asked, GREEDY)] == expected
    assert "not read" not in caplog.text


def test_a_quantised_text_keeps_its_format(target: Path, tmp_path: Path) -> None:
    path = as_published(target, tmp_path / "published")
    change_config(path, quantization_config={"quant_method": "unheard-of"})
    assert load_config(path).quantization_config["quant_method"] == "unheard-of"
    with pytest.raises(UnsupportedModelError, match="unheard-of"):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)


@pytest.mark.parametrize("is_tied", [False, True])
def test_norms_are_one_more_than_stored(is_tied: bool, tmp_path: Path) -> None:
    """Also in 16 bits, where 1 + w would lose most of a small w."""
    path = save_tiny_model(tmp_path, "qwen3_5_text", tie_word_embeddings=is_tied)
    change_tensor(path, "model.norm.weight", torch.full((32,), 2.0**-12))
    network = load_network(ModelConfig(path=str(path), dtype="bfloat16"), DEVICE)
    assert isinstance(network, Decoder)
    assert network.norm.weight.unique().tolist() == [1 + 2.0**-12]
    assert network.dtype == torch.bfloat16


def test_as_a_draft_it_is_refused(target: Path, tiny_model: Tiny) -> None:
    with pytest.raises(UnsupportedModelError, match="as a draft model it would go back"):
        Engine(engine_config(tiny_model("llama"), target))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mamba_ssm_dtype": "bfloat16"}, "its state is kept in bfloat16"),
        ({"linear_num_key_heads": 3}, "4 value heads cannot share 3 key heads"),
        ({"attn_output_gate": False}, "its attention has no gate"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"linear_key_head_dim": 11}, r"A_log|in_proj_qkv|conv1d"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    changes: dict[str, object], says: str, own: Path
) -> None:
    check_refused(own, changes, says)


def check_refused(path: Path, changes: dict[str, object], says: str) -> None:
    change_config(path, **changes)
    with pytest.raises(UnsupportedModelError, match=f"only our own decoder keeps.*{says}"):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "its state is kept in bfloat16"),
        ({"n_groups": 3}, "4 heads of Mamba2 cannot share 3 groups"),
        ({"time_step_limit": [0.01, 10.0]}, r"its time steps are limited to \(0\.01, 10\.0\)"),
        ({"moe_latent_size": 16}, "mixer.fc1_latent_proj.weight"),
        ({"residual_in_fp32": True}, "its config has residual_in_fp32"),
        ({"mlp_hidden_act": "silu"}, "its activation is silu"),
        ({"ssm_state_size": 11}, r"conv1d\.weight is 80 x 1 x 4"),
        ({"mamba_head_dim": 16}, r"conv1d\.weight is 80 x 1 x 4"),
    ],
)
def test_what_is_not_served_of_mamba2_is_refused_by_name(
    changes: dict[str, object], says: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    path = shutil.copytree(tiny_model("nemotron_h"), tmp_path / "own")
    check_refused(path, changes, says)


@pytest.mark.parametrize(
    ("architecture", "part"), [("qwen3_5_text", delta_net), ("nemotron_h", mamba2)]
)
def test_a_state_that_differs_from_transformers_is_refused(
    architecture: str, part: ModuleType, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the comparison allows for a layer that enlarges rounding."""
    ours, path = part.gated_norm, tiny_model(architecture)

    def off(*args: Any, **options: Any) -> torch.Tensor:
        y: torch.Tensor = ours(*args, **options)
        return y * (1 + 1e-4)

    monkeypatch.setattr(part, "gated_norm", off)
    with pytest.raises(UnsupportedModelError, match="computes layer 0 at position 0 differently"):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)


def test_nemotron_is_read_as_it_is_published(
    tiny_model: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its layers are a pattern, and its MTP head, which is not read, lies in the same files."""
    path = shutil.copytree(tiny_model("nemotron_h"), tmp_path / "own")
    config = json.loads((path / "config.json").read_text())
    del config["layers_block_type"]
    config |= {"hybrid_override_pattern": "ME*M-", "num_hidden_layers": 5}
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    (path / "config.json").write_text(json.dumps(config | {"time_step_limit": [0.0, torch.inf]}))
    change_tensor(path, "mtp.layers.0.eh_proj.weight", torch.ones(4, 8))
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    check_against_eager(network, tiny_model("nemotron_h"))
    assert "not read" not in caplog.text
    with pytest.raises(HeadError, match="no MTP head is known for models of type nemotron_h"):
        load_head(ModelConfig(path=str(path), is_mtp=True), network, str(path))


def test_experts_may_compute_in_a_smaller_space(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "nemotron_h", moe_latent_size=12)
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    check_against_eager(network, path)


@pytest.mark.parametrize("rope", [None, "rope"])
def test_granites_hybrids_may_have_no_experts(rope: str | None, tmp_path: Path) -> None:
    options = {"num_local_experts": 0, "position_embedding_type": rope}
    path = save_tiny_model(tmp_path, "granitemoehybrid", **options)
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    check_against_eager(network, path)


@torch.inference_mode()
def test_time_steps_of_mamba2_have_no_least(tmp_path: Path) -> None:
    """As transformers computes one token after the other, though it does not compute prompts so."""
    path = save_tiny_model(tmp_path, "nemotron_h", time_step_min=0.1)
    for name in stored_tensors(path):
        if name.endswith("dt_bias"):
            change_tensor(path, name, torch.tensor([-6.0, 0.0, -3.0, -4.0]))
    ours = run_prompt(load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)).logits
    eager = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").to(DEVICE)
    assert (eager(PROMPT[None]).logits[0] - ours).norm() > 0.01 * ours.norm()
    for module in eager.modules():  # the first token has no state yet, so it is a prompt, too
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, torch.inf)
    cache, expected = None, []
    for token in PROMPT:
        output = eager(token.view(1, 1), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        expected.append(output.logits[0, 0])
    torch.testing.assert_close(ours, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_another_model_with_a_state_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    change_config(path, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedModelError, match=r"qwen3.*state.* layers of type linear"):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
