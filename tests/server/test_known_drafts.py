"""The draft that a target is given if nobody names one."""

import logging
from pathlib import Path
from typing import NoReturn

import pytest
from quantised import FORMATS, quantise
from tiny_models import save_tiny_model
from tiny_pairs import save_tiny_model_with_few_tokens, save_tiny_model_with_tokenizer
from transformers import AutoTokenizer

from outrider.engine.api import ignore_progress
from outrider.server.config.pair_settings import DEFAULT_DRAFT, DEFAULT_TARGET, MTP
from outrider.server.config.settings import Settings
from outrider.server.config.settings_loader import load_settings
from outrider.server.models import builtin, hub, known_drafts
from outrider.server.models.builtin import BUILTINS, obtain
from outrider.server.models.choice import count_parameters
from outrider.server.models.known_drafts import KNOWN_DRAFTS, KnownDraft, Target, known_draft
from outrider.server.models.pair import engine_config, prepare_pair
from outrider.server.models.resolve import resolve
from outrider.server.models.store import ModelError


def target(name: str, model_type: str, vocab_size: int, billions: float) -> Target:
    return Target(
        name=name, model_type=model_type, vocab_size=vocab_size, num_parameters=int(billions * 1e9)
    )


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (target("smollm2-135m-instruct", "llama", 49_152, 0.134), "smollm2-135m-instruct-draft"),
        (target("HuggingFaceTB/SmolLM2-360M", "llama", 49_152, 0.36), known_drafts.DEFAULT_DRAFT),
        (target("SmolLM2-1.7B.gguf", "llama", 49_152, 1.7), "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (target("Qwen/Qwen3-8B", "qwen3", 151_936, 8.2), "RedHatAI/Qwen3-8B-speculator.eagle3"),
        (target("/m/Qwen3-8B-FP8", "qwen3", 151_936, 8.2), "RedHatAI/Qwen3-8B-speculator.eagle3"),
        (target("me/Qwen3-8B-tuned", "qwen3", 151_936, 8.2), "Qwen/Qwen3-0.6B"),
        (target("Qwen/Qwen3-4B", "qwen3", 151_936, 4.0), "Qwen/Qwen3-0.6B"),
        (
            target("meta-llama/Llama-3.1-8B-Instruct", "llama", 128_256, 8.0),
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        ),
        (
            target("openai/gpt-oss-20b", "gpt_oss", 201_088, 20.9),
            "RedHatAI/gpt-oss-20b-speculator.eagle3",
        ),
        (
            target("openai/gpt-oss-120b", "gpt_oss", 201_088, 116.8),
            "RedHatAI/gpt-oss-120b-speculator.eagle3",
        ),
        (target("openai/gpt-oss-220b", "gpt_oss", 201_088, 216.8), None),
        (
            target("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3_moe", 151_936, 30.5),
            "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",
        ),
        (
            target("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3_moe", 151_936, 30.5),
            "RedHatAI/Qwen3-30B-A3B-Thinking-2507-speculator.eagle3",
        ),
        (
            target("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "qwen3_moe", 151_936, 30.5),
            "RedHatAI/Qwen3-30B-A3B-speculator.eagle3",
        ),
        (target("me/Qwen3-30B-A3B-tuned", "qwen3_moe", 151_936, 30.5), None),
        *(
            (
                target(f"of/Qwen3-14B{end}", "qwen3", 151_936, 14.8),
                "RedHatAI/Qwen3-14B-speculator.eagle3",
            )
            for end in ("-GPTQ-Int4", "-AWQ-4bit", "-quantized.w4a16", "-FP8-dynamic", "_NVFP4")
        ),
        (
            target("models/Qwen3-14B/", "qwen3", 151_936, 14.8),
            "RedHatAI/Qwen3-14B-speculator.eagle3",
        ),
        (target("/models/mine", "qwen3", 151_936, 32.8), "Qwen/Qwen3-0.6B"),
        (target("Qwen/Qwen3-0.6B", "qwen3", 151_936, 0.6), None),
        (target("Qwen/Qwen2.5-7B-Instruct", "qwen2", 152_064, 7.6), "Qwen/Qwen2.5-0.5B-Instruct"),
        (
            target("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2", 152_064, 7.6),
            "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        ),
        (
            target("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "qwen2", 152_064, 14.8),
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        ),
        (target("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama", 128_256, 8.0), None),
        (
            target("meta-llama/Llama-3.3-70B-Instruct", "llama", 128_256, 70.6),
            "meta-llama/Llama-3.2-1B-Instruct",
        ),
        (target("google/gemma-3-27b-it", "gemma3_text", 262_208, 27.0), "google/gemma-3-1b-it"),
        (target("google/gemma-3-1b-it", "gemma3_text", 262_144, 1.0), "google/gemma-3-270m-it"),
        (target("mistralai/Mistral-7B-v0.3", "mistral", 32_768, 7.2), None),
        (target("XiaomiMiMo/MiMo-7B-RL", "mimo", 151_680, 7.8), "mtp"),
        (target("zai-org/GLM-4.5-Air-FP8", "glm4_moe", 151_552, 106.9), "mtp"),
        (target("Qwen/Qwen3.6-27B", "qwen3_5_text", 248_320, 27.0), "mtp"),
        (target("Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe", 248_320, 35.0), "mtp"),
        (target("Qwen/Qwen3-Coder-Next", "qwen3_next", 151_936, 80.0), "mtp"),
    ],
    ids=lambda value: value.name if isinstance(value, Target) else "",
)
def test_a_target_gets_the_draft_of_its_family(of: Target, expected: str | None) -> None:
    found = known_draft(of)
    assert (found and found.model) == expected


def test_the_pairs_of_our_configs_are_known() -> None:
    """What the table and configs/ say of a target agrees."""
    sizes = {"qwen3": 151_936, "qwen2": 152_064, "llama": 128_256, "gemma3_text": 262_208}
    sizes["mimo"] = 151_680
    heads = ("qwen3-8b-eagle3", "qwen3-14b-eagle3", "qwen3-32b-eagle3", "llama-3.1-8b-eagle3")
    for name in (*heads, "qwen2.5-coder-7b", "gemma-3-27b", "mimo-7b-mtp"):
        settings = load_settings(Path(name), environ={})
        kinds = [kind for kind in sizes if kind[:4] in settings.target.model.lower()]
        kind = "qwen2" if "2.5" in name else kinds[0]
        found = known_draft(target(settings.target.model, kind, sizes[kind], 8.0))
        assert found is not None
        assert found.model == settings.draft.model


def test_the_heads_of_our_configs_are_known_with_their_k() -> None:
    known = {(draft.model, draft.num_speculative_tokens) for draft in KNOWN_DRAFTS}
    heads = ("qwen3-8b-dspark", "qwen3-8b-dflash", "qwen3-14b-dspark", "llama-3.1-8b-dflash")
    mixtures = ("gpt-oss-20b-eagle3", "gpt-oss-120b-eagle3", "qwen3-30b-a3b-eagle3")
    mixtures += ("qwen3-30b-a3b-dflash", "qwen3-coder-next-fp8-dflash")
    mixtures += ("qwen3-coder-30b-a3b-dflash", "qwen3-coder-30b-a3b-eagle3")
    mixtures += ("qwen3.6-27b-dflash", "qwen3.6-27b-fp8-dflash")
    mixtures += ("qwen3.8-27b-fp8-dflash2",)
    mixtures += ("qwen3.6-35b-a3b-dflash", "qwen3.6-35b-a3b-fp8-dflash")
    hybrids = [f"qwen3.6-{size}{end}-mtp" for size in ("27b", "35b-a3b") for end in ("", "-fp8")]
    mtp = ("mimo-7b-mtp", "glm-4.5-air-fp8-mtp", *hybrids)
    for name in (*heads, *mtp, *mixtures):
        settings = load_settings(Path(name), environ={})
        assert (settings.draft.model, settings.speculation.num_speculative_tokens) in known


def test_no_draft_suits_a_target_of_its_own_size() -> None:
    for known in KNOWN_DRAFTS:
        own_size = target(
            known.model, next(iter(known.model_types), ""), min(known.vocab_sizes or {0}), 0.0
        )
        assert known.model == MTP or not known.suits(own_size)


# ---- what is made of it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_tiny_model_with_tokenizer(root / "target", num_hidden_layers=3)
    save_tiny_model_with_tokenizer(root / "draft", num_hidden_layers=1)
    save_tiny_model_with_few_tokens(root / "other", num_hidden_layers=1)
    return root


def know(monkeypatch: pytest.MonkeyPatch, *models: Path) -> None:
    drafts = [
        KnownDraft(model=str(model), num_parameters=1, family="tiny", num_speculative_tokens=7)
        for model in models
    ]
    monkeypatch.setattr(known_drafts, "KNOWN_DRAFTS", drafts)


def settings_of(models: Path, *assignments: str) -> Settings:
    given = [f"target.model={models / 'target'}", "target.device=cpu", *assignments]
    return load_settings(assignments=given, environ={})


def test_the_known_draft_is_loaded_with_its_k_and_the_reason_is_shown(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    know(monkeypatch, models / "draft")
    pair = prepare_pair(settings_of(models))
    config = engine_config(pair)
    assert config.draft is not None
    assert config.draft.path == str(models / "draft") == pair.settings.draft.model
    assert config.speculation.num_speculative_tokens == 7
    assert (
        f"draft: {models / 'draft'} (draft model for tiny), the best that is known for"
        in caplog.text
    )


def test_what_the_settings_say_goes_first(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, models / "not-there")
    named = prepare_pair(
        settings_of(
            models, f"draft.model={models / 'draft'}", "speculation.num_speculative_tokens=2"
        )
    )
    assert named.draft == models / "draft"
    assert engine_config(named).speculation.num_speculative_tokens == 2
    know(monkeypatch, models / "draft")
    known = prepare_pair(settings_of(models, "speculation.num_speculative_tokens=2"))
    assert engine_config(known).speculation.num_speculative_tokens == 2
    for plain in ("speculation.proposer=none", "speculation.num_speculative_tokens=0"):
        pair = prepare_pair(settings_of(models, plain))
        assert (pair.draft, engine_config(pair).speculation.sources) == (None, ())


@pytest.mark.parametrize("draft", ["not-there", "other", None])
def test_without_a_draft_that_works_prompt_lookup_drafts(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    draft: str | None,
) -> None:
    caplog.set_level(logging.INFO)
    know(monkeypatch, *[models / draft] if draft else [])
    config = engine_config(prepare_pair(settings_of(models)))
    assert (config.draft, config.speculation.sources) == (None, ("prediction", "grammar", "suffix"))
    assert config.speculation.num_speculative_tokens == 5
    why = {
        "not-there": "does not exist",
        "other": "it has another tokenizer",
        None: "no draft is known",
    }
    assert why[draft] in caplog.text
    assert "drafts are looked up in the text" in caplog.text


def test_a_target_that_brings_an_mtp_head_is_served_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = save_tiny_model_with_tokenizer(tmp_path / "mimo", has_mtp=True)
    pair = prepare_pair(load_settings(assignments=[f"target.model={path}"], environ={}))
    config = engine_config(pair)
    assert config.draft is not None
    assert (config.draft.path, config.draft.is_mtp) == (str(path), True)
    assert (pair.settings.draft.model, config.speculation.num_speculative_tokens) == ("mtp", 3)
    assert "draft: mtp (MTP head for MiMo 7B), the best" in caplog.text


def test_a_target_of_such_a_family_without_its_mtp_head_gets_prompt_lookup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tiny_model_with_tokenizer(tmp_path / "mimo", architecture="mimo")
    config = engine_config(
        prepare_pair(load_settings(assignments=[f"target.model={path}"], environ={}))
    )
    assert (config.draft, config.speculation.sources) == (None, ("prediction", "grammar", "suffix"))
    assert "draft.model = 'mtp': its files hold no MTP head" in caplog.text


def test_a_draft_that_was_asked_for_is_never_replaced(models: Path) -> None:
    with pytest.raises(ModelError, match=r"draft\.model = .*other.*another tokenizer, with 0%"):
        prepare_pair(settings_of(models, f"draft.model={models / 'other'}"))


def test_parameters_are_counted_from_the_headers(models: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "target")
    expected = sum(tensor.numel() for tensor in model.state_dict().values())
    tied = model.lm_head.weight.numel() if model.config.tie_word_embeddings else 0
    assert count_parameters(models / "target") == expected - tied


@pytest.mark.parametrize("name", FORMATS)
def test_packed_numbers_are_counted_one_by_one(tmp_path: Path, name: str) -> None:
    plain = save_tiny_model(tmp_path / "plain", hidden_size=64, intermediate_size=128)
    quantised = quantise(plain, tmp_path, name)
    share = count_parameters(quantised) / count_parameters(plain)
    assert 1 <= share < 1.1  # scales and zero points come with them


@pytest.mark.model
def test_parameters_of_the_default_target_are_counted_in_its_gguf_file() -> None:
    target = obtain(BUILTINS[DEFAULT_TARGET], ignore_progress)
    assert not [*target.glob("*.safetensors")]
    assert count_parameters(target) == 134_515_008


def test_the_draft_in_the_package_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object) -> NoReturn:
        raise ModelError("no network")

    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(builtin.wheel, "fetch", offline)
    draft = resolve(DEFAULT_DRAFT)
    assert (draft / "model.safetensors").stat().st_size > 10_000_000
    assert len(AutoTokenizer.from_pretrained(draft)) == 49_152
    assert {"LICENSE", "NOTICE", "README.md"} <= {file.name for file in draft.iterdir()}


def test_without_a_hub_a_draft_that_needs_none_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked = []

    def offline(hub_id: str, *_: object, **__: object) -> NoReturn:
        asked.append(hub_id)
        raise ModelError("cannot download a/b")

    monkeypatch.setattr(hub, "snapshot", offline)
    target = save_tiny_model_with_tokenizer(tmp_path / "target")
    draft = save_tiny_model_with_tokenizer(tmp_path / "draft", num_hidden_layers=1)
    drafts = [
        KnownDraft(model=name, num_parameters=0, family="tiny Llamas", model_types=("llama",))
        for name in ("a/b", "c/d", DEFAULT_DRAFT)
    ]
    monkeypatch.setattr(known_drafts, "KNOWN_DRAFTS", drafts)
    monkeypatch.setattr(builtin, "obtain", lambda *_: draft)
    pair = prepare_pair(load_settings(assignments=[f"target.model={target}"], environ={}))
    assert pair.draft == draft
    assert asked == ["a/b"]
    assert "cannot download a/b; draft: smollm2-135m-instruct-draft" in caplog.text


@pytest.mark.model
def test_the_default_target_gets_the_draft_that_was_made_for_it() -> None:
    pair = prepare_pair(load_settings(environ={}))
    assert pair.settings.draft.model == DEFAULT_DRAFT
    assert pair.draft is not None
    assert pair.draft_vocabulary is None  # its tokenizer, which the package has, is the target's
