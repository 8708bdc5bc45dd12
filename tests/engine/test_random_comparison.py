"""Any mixture of sequences is answered as by plain decoding, one sequence at a time: the same
tokens and logprobs, to the bit.

The engine that is compared launches a step ahead, and drafts from every source. It is short of
pages all the time, computes prompts in chunks, whose rows leave out the last MLP where nobody reads
them, finds prefixes, also in host memory, and loses sequences under way.
A failure shows the seed, the request and both answers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from block_heads import save_tiny_block_head
from engines import engine_config, lagging
from gguf import GGMLQuantizationType as Gguf
from heads import save_tiny_head
from host_copies import with_late_copies
from mtp import save_tiny_hybrid, save_tiny_mtp_model
from random_sequences import offers, random_request
from tiny_gguf import VOCAB as GGUF_VOCAB
from tiny_gguf import llama_directory
from tiny_models import VOCAB, save_tiny_model
from verification import HAS_KERNELS

from outrider.engine.api import InvalidRequestError, NewRequest, RequestOutput
from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models import attention
from outrider.engine.plan import Plan
from outrider.engine.scheduling.commit import Committer
from outrider.kernels.cpu.layers import compiled

pytestmark = pytest.mark.skipif(HAS_KERNELS, reason="of many small steps on a CPU")

MAX_TOKENS, MAX_MODEL_LEN = 12, 68  # the context ends some answers
KINDS = (
    "draft_model",
    "compiled",
    "eagle3",
    "peagle",
    "mtp",
    "dflash",
    "dspark",
    "suffix",
    "hybrid",
    "hybrid-dflash2",
    "mamba2",
)
HYBRIDS = ("hybrid", "hybrid-dflash2", "mamba2")
# Of 11 kinds: 130 requests; 180 more in `make deep`, for CI has 40 minutes, and hybrids are slow;
# and 2,500 in `make sweep`.
CASES: list[Any] = [
    pytest.param(kind, 0, 13, marks=pytest.mark.deep if kind in HYBRIDS else ()) for kind in KINDS
]
CASES += [
    pytest.param(kind, 6, 20, marks=pytest.mark.deep) for kind in KINDS if kind != "hybrid-dflash2"
]
CASES += [
    pytest.param(kind, seed, 50, marks=pytest.mark.sweep) for kind in KINDS for seed in range(1, 6)
]


@dataclass(frozen=True, slots=True)
class Kind:
    """Where drafts come from, and plain decoding with the same target."""

    config: EngineConfig
    plain: Engine


def save_pair(kind: str, folder: Path) -> tuple[Path, Path | None]:
    """A target and what drafts for it."""
    if kind == "mtp":
        path = save_tiny_mtp_model(folder, num_hidden_layers=2)
        return path, path
    if kind == "compiled":  # a draft that is the target, but rounded to fewer bits
        saved = [
            llama_directory(folder / name, format_, Gguf.Q8_0)
            for name, format_ in (("target", Gguf.Q8_0), ("draft", Gguf.Q4_0))
        ]
        return saved[0], saved[1]
    if kind == "hybrid":
        path = save_tiny_hybrid(folder / "target", "qwen3_5_moe_text")
        return path, path
    if kind == "mamba2":
        target = save_tiny_model(folder / "target", "nemotron_h")
        return target, save_tiny_model(folder / "draft", "qwen3")
    if kind == "hybrid-dflash2":
        target = save_tiny_model(folder / "target", "qwen3_5_text")
        options = {"boundaries": (0, 1, 3), "selector": (6, 48), "windows": (7, None)}
        return target, save_tiny_block_head(folder / "draft", target, **options)
    target = save_tiny_model(folder / "target")
    path = folder / "draft"
    if kind == "draft_model":  # shares most of the target's weights
        return target, save_tiny_model(path, num_hidden_layers=1)
    if kind in ("eagle3", "peagle"):
        options = {"boundaries": (0, 1, 2), "draft_vocab": 60, "parallel": kind == "peagle"}
        return target, save_tiny_head(path, target, **options)
    if kind in ("dflash", "dspark"):
        markov = {"markov": "vanilla", "confidence": "token"} if kind == "dspark" else {}
        return target, save_tiny_block_head(path, target, boundaries=(0, 1, 2), **markov)
    return target, None


@pytest.fixture(autouse=True)
def any_pass_may_hold_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise only those of more rows than there are here."""
    monkeypatch.setattr(attention, "_most_decoding", lambda seqs, _: seqs)


@pytest.fixture(autouse=True)
def any_step_may_have_taken_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time at all, less than its drafting, or far too long: as where the host is held up."""
    commit, pick = Committer.commit, random.Random(0).choice

    def commit_any(
        self: Committer, plan: Plan, elapsed_s: float, drafting_s: float
    ) -> list[RequestOutput]:
        elapsed_s = pick([0.0, 1e-9, 0.01, 10.0, elapsed_s, elapsed_s])
        return commit(self, plan, elapsed_s, pick([0.0, 0.01, drafting_s, drafting_s]))

    monkeypatch.setattr(Committer, "commit", commit_any)


@pytest.fixture(scope="module")
def kind_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    made: dict[str, Kind] = {}

    def get(name: str) -> Kind:
        if name not in made:
            target, draft = save_pair(name, tmp_path_factory.mktemp(name))
            proposer = "suffix" if draft is None else "draft_model"
            config = engine_config(target, draft, proposer=proposer)
            vocab = VOCAB
            if name == "compiled":
                vocab = GGUF_VOCAB
                config = replace(
                    config,
                    target=ModelConfig(path=str(target)),
                    draft=ModelConfig(path=str(draft)),
                )
            config = replace(
                offers(config, vocab), max_model_len=MAX_MODEL_LEN, batch_invariant=True
            )
            alone = replace(
                config,
                draft=None,
                speculation=replace(config.speculation, sources=()),
                cache=replace(config.cache, prefix_caching=False),
                scheduler=replace(config.scheduler, max_num_seqs=1, max_num_batched_tokens=128),
            )
            made[name] = Kind(config, Engine(alone))
        return made[name]

    return get


def short_of_everything(
    config: EngineConfig, rng: random.Random, host_gib: float = 0.0
) -> EngineConfig:
    """Pages for one of the longest sequences, a second tier of a few more, and few rows a step."""
    pick, page_size = rng.choice, rng.choice([1, 4, 5])
    num_pages = 2 + -(-MAX_MODEL_LEN // page_size)
    return replace(
        config,
        speculation=replace(
            config.speculation,
            num_speculative_tokens=pick([1, 3, 4]),
            adaptive=rng.random() < 0.4,  # it hangs on the clock; answers must not
        ),
        cache=replace(
            config.cache,
            page_size_tokens=page_size,
            num_pages=num_pages,
            host_gib=host_gib,
            state_interval_tokens=pick([1, 9, 40]),
        ),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=pick([4, 6, 8]),
            max_num_batched_tokens=pick([7, 16, 40]),
        ),
    )


def whole(outputs: list[RequestOutput]) -> tuple[Any, ...]:
    """All that an answer says of its text, however it was cut into steps."""
    last = outputs[-1]
    texts = [
        [entry for output in outputs for entry in getattr(output, field) or ()]
        for field in ("token_ids", "logprobs", "prompt_logprobs")
    ]
    return *texts, last.finish_reason, last.stop_token_id, last.error, last.is_dead_end


def asked_and_answered(
    plain: Engine, rng: random.Random, num_requests: int
) -> list[tuple[NewRequest, tuple[Any, ...]]]:
    """Random requests whose drafts cannot change their tokens, and what is answered without."""
    found: list[tuple[NewRequest, tuple[Any, ...]]] = []
    while len(found) < num_requests:
        new = random_request(rng, len(found))
        params = replace(
            new.params,
            max_tokens=min(new.params.max_tokens, MAX_TOKENS),
            temperature=0.0 if rng.random() < 0.4 else new.params.temperature,
            seed=new.params.seed or len(found),
            verification="match",
            logprobs=2 if new.params.logprobs is None else new.params.logprobs,
        )
        new = replace(new, params=params)
        try:
            plain.submit([new])
        except InvalidRequestError:
            continue
        outputs = []
        while plain.has_work():
            outputs += plain.step()
        answer = whole(outputs)
        new = replace(
            new, returns_drafts=rng.random() < 0.2, predicted_token_ids=predicted(rng, answer[0])
        )
        found.append((new, answer))
    return found


def predicted(rng: random.Random, token_ids: list[int]) -> list[int]:
    """Half of all requests predict: their whole answer, most of it, or something else."""
    text = list(token_ids)
    cut, to = sorted(rng.randint(0, len(text)) for _ in range(2))
    odd = [rng.randrange(VOCAB) for _ in range(3)]
    return rng.choice([[], [], [], text, text[:cut] + odd + text[to:], text[:cut] + text[to:]])


def served(engine: Engine, asked: list[NewRequest], rng: random.Random) -> dict[str, Any]:
    """What is answered to requests that come, and sometimes go, under way; by their ids."""
    waiting, live = list(reversed(asked)), set[str]()
    outputs: dict[str, list[RequestOutput]] = {}
    while waiting or live:
        while waiting and len(live) < 12 and rng.random() < 0.7:
            new = waiting.pop()
            engine.submit([new])
            live.add(new.request_id)
            outputs[new.request_id] = []
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                live.remove(output.request_id)
        if live and rng.random() < 0.02:
            gone = rng.choice(sorted(live))
            engine.abort([gone])
            live.remove(gone)
            del outputs[gone]
        engine.check_integrity()
    while engine.sequences.memory.awaits_pages:  # for one that has gone
        engine.step()
    assert engine.stats().pages_used == 0
    return {name: whole(each) for name, each in outputs.items()}


@pytest.mark.parametrize(("kind", "seed", "num_requests"), CASES)
def test_answers_are_those_of_plain_decoding(
    kind: str, seed: int, num_requests: int, kind_of: Callable[[str], Kind]
) -> None:
    if kind == "compiled" and compiled() is None:
        pytest.skip("the CPU's layers are not compiled")
    rng = random.Random(f"{kind} {seed}")
    found = kind_of(kind)
    asked = asked_and_answered(found.plain, rng, num_requests)
    has_tier = kind not in HYBRIDS  # whose states stay on the device
    config = short_of_everything(found.config, rng, host_gib=1e-4 if has_tier else 0)
    engine = lagging(config)
    if has_tier:
        engine = with_late_copies(engine, rng)
    got = served(engine, [new for new, _ in asked], rng)
    for new, expected in asked:
        if new.request_id in got:
            answer = got[new.request_id]
            assert answer == expected, f"seed {seed} of {kind}, {engine.info}: {new}"
    assert len(got) > 0.7 * num_requests
    stats = engine.stats()
    if num_requests >= 50:
        if not config.speculation.adaptive:  # else few drafts may seem to pay
            assert 0 < sum(stats.accepted_per_position) < sum(stats.drafted_per_position)
        assert stats.preemptions > 0
        assert stats.cached_tokens > 0
        assert (stats.host_loaded_tokens > 0) == has_tier
