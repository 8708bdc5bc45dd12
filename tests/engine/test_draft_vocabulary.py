"""Draft models of another vocabulary than the target's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributions import bound, chi_squared, total_variation
from engines import engine_config, prompts, run, sampling_config, tokens
from grammars import stands_for
from paged import run_prompt
from safetensors.torch import load_file, save_file
from target_distribution import greedy, joint, sample
from tiny_models import DEVICE, Tiny, change_config, save_tiny_model

from outrider.engine.api import SamplingParams
from outrider.engine.config import DraftVocabulary, EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.loading import DRAFTED_TOKENS, load_network
from outrider.kernels.cpu.layers import compiled

VOCAB = 4
PROMPT = [2, 0, 3]
# The draft has seven tokens, three of them the target's; it reads the fourth as one of its own.
THREE = DraftVocabulary(
    target_ids=(-1, 3, -1, 0, 1, -1, -1), read_as=(3, 4, 2, 1), share_of_text=0.75
)
PLAIN = SamplingParams(max_tokens=4)
ALL = SamplingParams(
    max_tokens=4,
    temperature=1.3,
    top_p=0.95,
    repetition_penalty=1.5,
    frequency_penalty=0.6,
    logit_bias={1: 0.8},
    allowed_token_ids=(0, 1, 2),
    bad_words=((0, 2), (1, 1)),
    min_tokens=2,
    stop_token_ids=(0,),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """On a CPU both compiled, the draft with an output layer that cannot be cut."""
    root = tmp_path_factory.mktemp("pair")
    sizes = {"num_hidden_layers": 1, "scale": 0.15}
    if DEVICE.type == "cuda" or compiled() is None:
        return (
            save_tiny_model(root / "target", vocab_size=VOCAB, seed=3, **sizes),
            save_tiny_model(root / "draft", vocab_size=7, seed=4, **sizes),
        )
    from tiny_gguf import save_quick_llama

    return save_quick_llama(root / "target", 3, VOCAB), save_quick_llama(root / "draft", 4, 7)


def with_vocabulary(config: EngineConfig, vocabulary: DraftVocabulary = THREE) -> EngineConfig:
    assert config.draft is not None
    return replace(config, draft=replace(config.draft, vocabulary=vocabulary))


def check_joint(
    config: EngineConfig, params: SamplingParams, truth: dict[tuple[int, ...], float]
) -> None:
    engine = Engine(config)
    counts = sample(engine, PROMPT, params, max_k=3, n=2400)
    assert counts.keys() <= truth.keys()
    assert total_variation(truth, counts) < bound(len(truth), 2400)
    assert chi_squared(truth, counts) < 1
    stats = engine.stats()
    assert 0 < sum(stats.accepted_per_position) < sum(stats.drafted_per_position)


@pytest.mark.parametrize(
    "params",
    [
        replace(PLAIN, verification="token"),
        replace(PLAIN, verification="block"),
        replace(PLAIN, verification="match"),
        pytest.param(replace(ALL, verification="token"), marks=pytest.mark.deep),
        pytest.param(replace(ALL, verification="block"), marks=pytest.mark.deep),
        pytest.param(
            replace(PLAIN, temperature=1.5, top_k=3, top_p=0.8, min_p=0.05), marks=pytest.mark.deep
        ),
    ],
)
def test_the_joint_is_the_targets(params: SamplingParams, pair: tuple[Path, Path]) -> None:
    config = with_vocabulary(sampling_config(*pair, "draft_model"))
    check_joint(config, params, joint(pair[0], PROMPT, params))


@pytest.mark.deep
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_joint_is_the_targets_with_every_way_to_run_the_draft(
    architecture: str, tiny_model: Tiny, pair: tuple[Path, Path]
) -> None:
    draft = tiny_model(architecture, vocab_size=7, num_hidden_layers=1, scale=0.15)
    config = with_vocabulary(sampling_config(pair[0], draft, "draft_model"))
    check_joint(config, PLAIN, joint(pair[0], PROMPT, PLAIN))


@pytest.mark.deep
def test_the_joint_is_the_targets_beside_other_sources(pair: tuple[Path, Path]) -> None:
    config = with_vocabulary(sampling_config(*pair, ("prediction", "suffix", "draft_model")))
    check_joint(config, PLAIN, joint(pair[0], PROMPT, PLAIN))


@pytest.mark.deep
def test_the_joint_is_that_of_the_masked_target(pair: tuple[Path, Path]) -> None:
    def mask(output: list[int]) -> list[bool]:  # c follows b alone, and 3 ends the text
        return (
            [False, False, True, False] if output[-1:] == [1] else [True, True, False, bool(output)]
        )

    config = with_vocabulary(sampling_config(*pair, "draft_model"))
    config = replace(config, token_table=stands_for(*"abc"), eos_token_ids=(3,))
    truth = joint(pair[0], PROMPT, PLAIN, eos=(3,), mask=mask)
    check_joint(config, replace(PLAIN, grammar="start: /(a|bc)+/"), truth)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_common_token_is_allowed_answers_are_right(
    temperature: float, pair: tuple[Path, Path]
) -> None:
    engine = Engine(with_vocabulary(sampling_config(*pair, "draft_model")))
    params = replace(PLAIN, temperature=temperature, allowed_token_ids=(2,), max_tokens=6)
    for rule in ("token", "block", "match"):
        assert tokens(run(engine, [PROMPT], replace(params, verification=rule))[0]) == [2] * 6


def renumbered(model: Path, path: Path, order: torch.Tensor, num_more: int) -> DraftVocabulary:
    """Save the same model with token `order[i]` as its i-th, in front of others of its own."""
    size, config = len(order), (model / "config.json").read_text()
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if len(tensor) == size:
            tensors[name] = torch.cat((tensor[order], 9 * torch.randn(num_more, tensor.shape[1])))
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(config)
    change_config(path, vocab_size=size + num_more)
    own = torch.empty_like(order)
    own[order] = torch.arange(size)
    return DraftVocabulary(
        target_ids=(*order.tolist(), *[-1] * num_more),
        read_as=tuple(own.tolist()),
        share_of_text=1.0,
    )


@pytest.mark.parametrize(("architecture", "hidden"), [("llama", 32), ("llama", 64), ("gpt2", 32)])
def test_the_target_itself_with_other_ids_drafts_what_the_target_says(
    architecture: str, hidden: int, tiny_model: Tiny, tmp_path: Path
) -> None:
    sizes = {"hidden_size": hidden, "num_attention_heads": 2, "vocab_size": 61}
    if architecture == "llama":
        sizes["num_key_value_heads"] = 2
    target = tiny_model(architecture, **sizes)
    vocabulary = renumbered(target, tmp_path / "draft", torch.randperm(61), 4)
    config = engine_config(target, tmp_path / "draft", k=3)
    engine = Engine(with_vocabulary(config, vocabulary))
    given = prompts((3, 15, 30), 61)
    params = replace(PLAIN, max_tokens=13, temperature=0.0, ignore_eos=True)
    answers = list(map(tokens, run(engine, given, params)))
    assert answers == [greedy(target, prompt, params) for prompt in given]
    stats = engine.stats()
    assert sum(stats.accepted_per_position) > 0.95 * sum(stats.drafted_per_position)


def test_answers_have_the_bits_of_those_without_drafts(tiny_model: Tiny, tmp_path: Path) -> None:
    target = tiny_model("llama", vocab_size=61)
    given = prompts((3, 15, 30), 61)
    params = [
        replace(PLAIN, max_tokens=20, temperature=0.0),
        replace(PLAIN, max_tokens=20, temperature=0.9, seed=5, verification="match"),
        replace(PLAIN, max_tokens=20, top_p=0.8, seed=6, verification="match"),
    ]
    truth = list(map(tokens, run(Engine(engine_config(target)), given, params)))
    order = torch.randperm(61)
    vocabulary = renumbered(target, tmp_path / "draft", order, 4)
    common = tuple(-1 if i % 3 == 0 else i for i in vocabulary.target_ids)
    read_as = tuple(own if own % 5 else 63 for own in vocabulary.read_as)
    vocabulary = replace(vocabulary, target_ids=common, read_as=read_as)
    engine = Engine(with_vocabulary(engine_config(target, tmp_path / "draft", k=3), vocabulary))
    assert list(map(tokens, run(engine, given, params))) == truth
    assert 0 < sum(engine.stats().accepted_per_position) < sum(engine.stats().drafted_per_position)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU a draft has its whole output layer")
def test_of_the_tokens_that_it_proposes_the_common_ones_are_drafted(tmp_path: Path) -> None:
    draft = save_tiny_model(tmp_path / "draft", vocab_size=7)
    (draft / DRAFTED_TOKENS).write_text("[6, 4, 3]")
    config = ModelConfig(path=str(draft), dtype="float32", vocabulary=THREE)
    network = load_network(config, DEVICE, is_draft=True)
    logits = run_prompt(network, torch.arange(9) % VOCAB).logits[:, :VOCAB]
    assert logits.isfinite().all(0).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_ids": (0, 1)}, "its vocabulary is of 5 tokens, but it has 7 logits and 7 embed"),
        ({"read_as": (0, 1, 2, 7)}, "its vocabulary is of 8 tokens, but it has 7 logits and 7"),
        (
            {"target_ids": (-1,) * 7},
            "must lead to distinct ones of the target's 4, and some to any",
        ),
        ({"target_ids": (0, 0, *[-1] * 5)}, "must lead to distinct ones of the target's 4"),
        ({"target_ids": (4, *[-1] * 6)}, "must lead to distinct ones of the target's 4"),
        ({"read_as": (0, 1, 2, 3, 4)}, "the draft can read 5 tokens; the vocabulary has 4"),
    ],
)
def test_a_vocabulary_that_is_not_the_models_is_refused(
    changes: dict[str, tuple[int, ...]], says: str, pair: tuple[Path, Path]
) -> None:
    config = with_vocabulary(sampling_config(*pair, "draft_model"), replace(THREE, **changes))
    with pytest.raises((UnsupportedModelError, ValueError), match=says):
        Engine(config)
