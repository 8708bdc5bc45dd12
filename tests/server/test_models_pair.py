"""The pair that the engine is handed."""

import asyncio
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from block_heads import save_tiny_block_head
from heads import save_tiny_head
from mtp import save_tiny_mtp_model
from tiny_models import change_config, change_tensor
from tiny_pairs import (
    NUM_TOKENS,
    save_tiny_model_with_few_tokens,
    save_tiny_model_with_other_tokenizer,
    save_tiny_model_with_tokenizer,
    write_tiny_gguf,
)
from tokenizers_for_tests import byte_level_wrapper

from outrider.engine.config import ConfigError, DraftVocabulary
from outrider.engine.ranks import fit
from outrider.server.config.settings_loader import load_settings
from outrider.server.models.pair import Pair, engine_config, prepare_pair, resolve_device
from outrider.server.models.prepare import Prepared, prepare
from outrider.server.models.store import ModelError
from outrider.server.text.tokenizer import Tokenizer, TokenizerData


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_tiny_model_with_tokenizer(root / "target", num_hidden_layers=3)
    save_tiny_model_with_tokenizer(root / "draft", num_hidden_layers=1, vocab_size=512)
    return root


def settings_for(models: Path, draft: str, *more: str):  # type: ignore[no-untyped-def]
    names = [f"target.model={models / 'target'}", f"draft.model={models / draft}"]
    return load_settings(assignments=[*names, "target.device=cpu", *more], environ={})


def test_a_pair_of_one_tokenizer_is_described_for_the_engine(models: Path) -> None:
    settings = settings_for(
        models, "draft", "target.dtype=float32", "cache.num_pages=64", "draft.quantization=fp8"
    )
    found = prepare_pair(settings)
    config = engine_config(found)
    assert config.target.path == str(models / "target")
    assert config.draft is not None
    assert config.draft.path == str(models / "draft")
    assert config.target.dtype == config.draft.dtype == "float32"
    assert (config.target.quantization, config.draft.quantization) == (None, "fp8")
    assert config.vocab_size == found.vocab_size < 512  # the draft's padding does not count
    assert (config.device, config.cache.num_pages) == ("cpu", 64)
    assert config.speculation.num_speculative_tokens == 4


def test_a_draft_of_another_tokenizer_drafts_the_common_tokens(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider")
    draft = save_tiny_model_with_other_tokenizer(tmp_path / "other", num_hidden_layers=1)
    settings = settings_for(models, "draft", f"draft.model={draft}", "target.dtype=float32")
    found = prepare_pair(settings)
    config = engine_config(found)
    assert config.draft is not None
    assert config.vocab_size == found.vocab_size
    a, b = (Tokenizer(found.tokenizer).id_of(letter) for letter in "ab")
    same = [b if i == a else a if i == b else i for i in range(found.vocab_size)]
    assert config.draft.vocabulary == DraftVocabulary(
        target_ids=tuple(same), read_as=tuple(same), share_of_text=1.0
    )
    assert (
        "with 100% of the target's tokens in ordinary text, and 360 of all its 360" in caplog.text
    )


def test_a_gguf_file_drafts_for_a_directory_of_another_tokenizer(
    models: Path, tmp_path: Path
) -> None:
    draft = write_tiny_gguf(tmp_path / "draft.gguf")
    config = engine_config(prepare_pair(settings_for(models, "draft", f"draft.model={draft}")))
    assert config.draft is not None
    assert (vocabulary := config.draft.vocabulary) is not None
    assert len(vocabulary.target_ids) == NUM_TOKENS
    assert 0.5 < vocabulary.share_of_text < 1
    assert config.vocab_size == len(vocabulary.read_as) == 360


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (None, r"has no tokenizer \(tokenizer\.json or tokenizer\.model\)"),
        ("{}", "cannot load the tokenizer of .*draft"),
        ("few", "another tokenizer, with 0% of the target's tokens in ordinary text"),
        ("more", "its tokenizer has 360 tokens, but its model 300: one of the two is another mod"),
    ],
)
def test_a_draft_whose_tokenizer_cannot_be_used_is_refused(
    tokenizer: str | None, says: str, models: Path, tmp_path: Path
) -> None:
    if tokenizer == "few":
        draft = save_tiny_model_with_few_tokens(tmp_path / "draft")
    else:
        size = 300 if tokenizer == "more" else 360
        draft = save_tiny_model_with_tokenizer(tmp_path / "draft", vocab_size=size)
    if tokenizer in (None, "{}"):
        for file in draft.glob("tokenizer*"):
            file.unlink()
        if tokenizer is not None:
            (draft / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(ModelError, match=f"(?s)draft\\.model = .*{says}"):
        prepare_pair(settings_for(models, "draft", f"draft.model={draft}"))


@pytest.mark.deep
def test_another_process_prepares_the_same(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_for(models, "draft", "speculation.proposer=auto", "server.api_keys=secret")
    with caplog.at_level(logging.INFO, "outrider"):
        pair = prepare_pair(settings)
        expected = Prepared(pair.settings, engine_config(pair), pair.tokenizer)
        reported = [(record.name, record.levelno, record.message) for record in caplog.records]
        caplog.clear()
        found = asyncio.run(prepare(settings))
    assert found == expected
    assert found.settings.server.api_keys == settings.server.api_keys
    assert [(r.name, r.levelno, r.message) for r in caplog.records] == reported != []
    with pytest.raises(ModelError, match=r"draft\.model = '.*not-there': .*does not exist"):
        asyncio.run(prepare(settings_for(models, "not-there")))


def test_eos_is_what_generation_and_the_tokenizer_say(models: Path) -> None:
    path = models / "target/generation_config.json"
    before = path.read_text()
    path.write_text(json.dumps({"eos_token_id": [7, 5]}))
    try:
        assert prepare_pair(settings_for(models, "draft")).eos_token_ids == (0, 5, 7)
    finally:
        path.write_text(before)


TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% generation %}{% endgeneration %}"


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_template_of_the_settings_goes_before_the_models_own(
    encoding: str, has_own: bool, models: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(models / "target", tmp_path / "target")
    if not has_own:
        (target / "chat_template.jinja").unlink()
    plain = [f"target.model={target}", "speculation.proposer=none"]
    own = prepare_pair(load_settings(assignments=plain, environ={})).tokenizer.chat_template
    assert (own is not None) is has_own
    (tmp_path / "chat.jinja").write_text(TEMPLATE + "\n", encoding)
    given = [*plain, f"target.chat_template={tmp_path / 'chat.jinja'}"]
    found = prepare_pair(load_settings(assignments=given, environ={}))
    template = Tokenizer(found.tokenizer).chat_template
    assert template is not None
    messages = [{"role": "user", "content": "Hi"}]
    options = {"add_generation_prompt": True, "continue_final_message": False, "variables": {}}
    assert template.render(messages, tools=[], **options) == "[Hi]"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"chat\.jinja': cannot read it: No such file"),
        (b"{% for m in messages %}\n{{ m.content }", r"chat\.jinja': line 2 does not compile: "),
        (b"{{ messages | no_such_filter }}", "line 1 does not compile: No filter named"),
        (b"\xff\xfe", "it is no text"),
        (b"\n", "it is empty"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_before_any_model_is_looked_for(
    content: bytes | None, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    settings = load_settings(
        assignments=["target.model=/not-there", f"target.chat_template={file}"], environ={}
    )
    with pytest.raises(ModelError, match=rf"target\.chat_template = '.*{says}"):
        prepare_pair(settings)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("generation_config.json", "{", r"generation_config\.json is damaged"),
        ("generation_config.json", "[]", r"generation_config\.json is damaged"),
        ("generation_config.json", '{"eos_token_id": {}}', r"generation_config\.json is damaged"),
        ("model.safetensors", "{}", r"model\.safetensors is damaged"),
        (
            "tokenizer.json",
            "{}",
            r"cannot load the tokenizer of .*: one of its files is damaged \(K",
        ),
        ("config.json", "{", r"config\.json' is not a valid JSON file"),
    ],
)
def test_a_damaged_file_is_named(
    models: Path, tmp_path: Path, name: str, content: str, says: str
) -> None:
    target = shutil.copytree(models / "target", tmp_path / "target")
    (target / name).write_text(content)
    with pytest.raises(ModelError, match=says):
        prepare_pair(load_settings(assignments=[f"target.model={target}"], environ={}))


@pytest.mark.parametrize(
    "plain", ["speculation.proposer=none", "speculation.num_speculative_tokens=0"]
)
def test_without_speculation_no_draft_is_looked_for(models: Path, plain: str) -> None:
    settings = settings_for(models, "not-there", plain)
    found = prepare_pair(settings)
    config = engine_config(found)
    assert config.draft is None
    assert config.speculation.sources == () or config.speculation.num_speculative_tokens == 0


def test_ngram_needs_no_draft(models: Path) -> None:
    settings = settings_for(models, "not-there", "speculation.proposer=ngram")
    config = engine_config(prepare_pair(settings))
    assert (config.draft, config.speculation.sources) == (None, ("prediction", "grammar", "suffix"))


def test_errors_name_the_setting(models: Path) -> None:
    with pytest.raises(ModelError, match=r"draft\.model = '.*not-there': .*does not exist"):
        prepare_pair(settings_for(models, "not-there"))


def test_a_device_that_is_not_there_is_refused() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in ("cpu", "cuda")
    with pytest.raises(ModelError, match=r"'cuda:99' is not there.*`outrider doctor`"):
        resolve_device("cuda:99")
    with pytest.raises(ModelError, match="'gpu'; it is auto, cpu, cuda or cuda:N"):
        resolve_device("gpu")


def test_a_config_that_contradicts_itself_is_reported(models: Path) -> None:
    path = models / "draft/config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"layer_types": ["full_attention"] * 3}))
    try:
        with pytest.raises(ModelError, match=r"draft\.model = .*number of `layer_types` \(3\)"):
            prepare_pair(settings_for(models, "draft"))
    finally:
        path.write_text(before)


def test_every_engine_setting_reaches_the_engine(models: Path) -> None:
    settings = settings_for(
        models,
        "draft",
        "speculation.proposer=ngram",
        "speculation.num_speculative_tokens=7",
        "speculation.verification=block",
        "speculation.suffix_min_tokens=3",
        "speculation.suffix_answers_mib=6",
        "cache.page_size_tokens=8",
        "cache.memory_fraction=0.25",
        "cache.prefix_caching=false",
        "cache.state_interval_tokens=512",
        "scheduler.max_num_seqs=3",
        "scheduler.max_num_batched_tokens=33",
        "scheduler.max_queue_len=5",
        "engine.max_model_len=99",
        "engine.num_threads=1",
        "engine.enforce_eager=true",
        "engine.batch_invariant=true",
        "engine.gpu_memory_utilization=0.6",
    )
    tokenizer = TokenizerData.of(byte_level_wrapper())
    config = engine_config(Pair(settings, models, None, 10, (1,), tokenizer))
    speculation, cache, scheduler = config.speculation, config.cache, config.scheduler
    assert speculation.sources == ("prediction", "grammar", "suffix")
    assert speculation.num_speculative_tokens == 7
    assert speculation.verification == "block"
    assert (speculation.suffix_min_tokens, speculation.suffix_answers_mib) == (3, 6)
    assert (cache.page_size_tokens, cache.memory_fraction) == (8, 0.25)
    assert not cache.prefix_caching
    assert cache.state_interval_tokens == 512
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (3, 33)
    assert scheduler.max_queue_len == 5
    assert (config.max_model_len, config.num_threads) == (99, 1)
    assert config.gpu_memory_utilization == 0.6
    assert config.enforce_eager
    assert config.batch_invariant
    assert (config.vocab_size, config.eos_token_ids) == (10, (1,))


@pytest.mark.parametrize(
    ("device", "gib", "set_rows", "expected"),
    [
        ("cpu", 0, None, (32, 512)),
        ("cpu", 0, 8, (8, 8)),
        ("cuda", 24, None, (64, 2048)),
        ("cuda", 39.4, None, (256, 4096)),
        ("cuda", 141, 100, (100, 100)),
    ],
)
def test_sequences_at_once_follow_from_the_device(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    gib: float,
    set_rows: int | None,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    gpu = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    rows = () if set_rows is None else (f"scheduler.max_num_batched_tokens={set_rows}",)
    settings = settings_for(models, "draft", f"target.device={device}", *rows)
    tokenizer = TokenizerData.of(byte_level_wrapper())
    scheduler = engine_config(Pair(settings, models, None, 10, (1,), tokenizer)).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == expected


def test_gpus_that_share_the_target_are_chosen_unless_the_settings_say(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_STEP_BYTES", 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    def chosen(total_bytes: float, *given: str) -> int:
        gpu = SimpleNamespace(name="H100", total_memory=total_bytes)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
        names = f"target.model={models / 'target'}", "speculation.proposer=ngram"
        settings = load_settings(assignments=[*names, *given], environ={})
        return engine_config(prepare_pair(settings)).target.tensor_parallel

    size = (models / "target/model.safetensors").stat().st_size
    unset = "target.dtype=float32"
    assert (chosen(2 * size, unset), chosen(size, unset)) == (1, 2)
    assert chosen(size, unset, "target.quantization=fp8") == 1
    assert chosen(size, unset, "target.device=cpu") == 1
    for given in (1, 2):  # whether it fits or not
        for bytes_ in (0, 2 * size):
            assert chosen(bytes_, f"target.tensor_parallel={given}") == given
    with pytest.raises(ConfigError, match=r"target\.device names one GPU, cuda:1: set it"):
        chosen(size, unset, "target.device=cuda:1")


def test_a_head_needs_no_tokenizer_and_no_setting_but_its_name(
    models: Path, tmp_path: Path
) -> None:
    head = save_tiny_head(tmp_path / "head", models / "target", boundaries=(1, 2, 3))
    settings = settings_for(models, str(head), "target.dtype=float32")
    found = prepare_pair(settings)
    config = engine_config(found)
    assert config.draft is not None
    assert config.draft.path == str(head)
    assert "draft_model" in config.speculation.sources
    assert config.vocab_size == found.vocab_size


def test_a_head_may_come_pickled(models: Path, tmp_path: Path) -> None:
    head = save_tiny_head(tmp_path / "head", models / "target", boundaries=(0, 1, 2), pickled=True)
    assert prepare_pair(settings_for(models, str(head))).draft == head


@pytest.mark.parametrize(
    ("boundaries", "layers", "says"),
    [((1, 2, 7), None, "after layers 1, 2, 7"), ((1, 2, 7), "[1,2,3]", None)],
)
def test_a_head_of_a_deeper_target_is_refused_before_anything_is_loaded(
    models: Path, tmp_path: Path, boundaries: tuple[int, ...], layers: str | None, says: str | None
) -> None:
    head = save_tiny_head(tmp_path / "head", models / "target", boundaries=boundaries)
    settings = settings_for(models, str(head), *([f"draft.head_layers={layers}"] if layers else []))
    if says is None:
        assert prepare_pair(settings).draft == head
        return
    with pytest.raises(ModelError, match=rf"draft\.model = .*{says}"):
        prepare_pair(settings)


def test_a_head_of_an_unknown_kind_is_refused_before_anything_is_loaded(
    models: Path, tmp_path: Path
) -> None:
    head = save_tiny_head(tmp_path / "head", models / "target")
    reported = json.loads((head / "config.json").read_text()) | {"architectures": ["MedusaModel"]}
    (head / "config.json").write_text(json.dumps(reported))
    with pytest.raises(ModelError, match=r"draft\.model = .*head of kind medusa"):
        prepare_pair(settings_for(models, str(head)))


def test_what_a_draft_has_not_is_refused_before_anything_is_loaded(
    models: Path, tmp_path: Path
) -> None:
    block = save_tiny_block_head(tmp_path / "block", models / "target", boundaries=(0, 1, 2))
    head = save_tiny_head(tmp_path / "head", models / "target", boundaries=(0, 1, 2))
    window = "draft.attention_window=16"
    for draft in ("draft", str(block)):
        with pytest.raises(ModelError, match=r"draft\.attention_window is 16, .* leave it out"):
            prepare_pair(settings_for(models, draft, window))
    assert prepare_pair(settings_for(models, str(head), window)).draft == head
    layers = "draft.head_layers=[0,1,2]"
    with pytest.raises(ModelError, match=r"draft\.head_layers is \(0, 1, 2\), .* leave it out"):
        prepare_pair(settings_for(models, "draft", layers))
    assert prepare_pair(settings_for(models, str(head), layers)).draft == head


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("draft.dtype=auto", None),
        ("draft.revision=main", r"draft\.revision is main, but an MTP head has none"),
        ("draft.head_layers=[1,2]", r"draft\.head_layers is \(1, 2\), but an MTP head has none"),
    ],
)
def test_the_mtp_head_of_a_target_is_a_draft_by_the_name_of_mtp(
    setting: str, says: str | None, tmp_path: Path
) -> None:
    path = save_tiny_model_with_tokenizer(tmp_path / "mimo", has_mtp=True)
    given = [f"target.model={path}", "draft.model=mtp", "target.device=cpu", setting]
    settings = load_settings(assignments=given, environ={})
    if says is not None:
        with pytest.raises(ModelError, match=rf"draft\.model = 'mtp': {says}"):
            prepare_pair(settings)
        return
    config = engine_config(prepare_pair(settings))
    assert config.draft is not None
    assert (config.draft.path, config.draft.is_mtp) == (config.target.path, True)
    assert not config.target.is_mtp


def test_a_target_without_an_mtp_head_is_reported_before_anything_is_loaded(models: Path) -> None:
    with pytest.raises(ModelError, match=r"draft\.model = 'mtp': no MTP head is known for models"):
        prepare_pair(
            load_settings(
                assignments=[f"target.model={models / 'target'}", "draft.model=mtp"], environ={}
            )
        )


def test_an_mtp_head_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    """As `distill --kind mtp` writes it: without a tokenizer, under the name of such a head."""
    target = save_tiny_model_with_tokenizer(tmp_path / "target", has_mtp=True)
    head = save_tiny_mtp_model(tmp_path / "head", num_hidden_layers=2)
    change_config(head, architectures=["MtpHead"])
    given = [f"target.model={target}", f"draft.model={head}", "target.device=cpu"]
    config = engine_config(prepare_pair(load_settings(assignments=given, environ={})))
    assert config.draft is not None
    assert config.draft.path == str(head)
    change_tensor(head, "model.mtp_layers.0.input_proj.weight", None)
    with pytest.raises(ModelError, match="its files hold no MTP head"):
        prepare_pair(load_settings(assignments=given, environ={}))
