"""Conversions: what comes out is the model that went in."""

import importlib.util
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import TokenType
from gguf_models import save_gguf
from paged import run_prompt
from safetensors.torch import load_file
from tiny_models import DEVICE, save_tiny_model
from tiny_pairs import NUM_TOKENS, add_tokenizer, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.engine.api import ignore_progress
from outrider.engine.config import ModelConfig
from outrider.engine.models.architectures import eos_token_ids, load_config
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.gguf_file import GgufFile
from outrider.engine.models.loading import load_network
from outrider.engine.models.weight_files import GGUF
from outrider.server.models.convert import gguf_to_directory
from outrider.server.models.store import ModelError

needs_hybrids = pytest.mark.skipif(
    importlib.util.find_spec("transformers.integrations.gguf") is None,
    reason="this transformers reads no GGUF files of hybrids",
)


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def test_a_gguf_file_becomes_a_loadable_directory(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    gguf_to_directory(write_tiny_gguf(tmp_path / "m.gguf"), folder, ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    assert len(tokenizer) == weights["model.embed_tokens.weight"].shape[0]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}  # as in the file
    assert logits(folder, [1, 2, 3]).isfinite().all()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "ab123", ["ab", "1", "2", "3"]),  # digits never merge, though merges exist
        ("smollm", "ab 13", ["ab", "Ġ", "1", "3"]),
        ("gpt-2", "ab123", ["ab", "123"]),
        ("gpt-2", "ab 13", ["ab", "Ġ1", "3"]),
    ],
)
def test_a_gguf_tokenizer_splits_as_the_file_says(
    tmp_path: Path, pre: str, text: str, tokens: list[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    gguf_to_directory(write_tiny_gguf(tmp_path / "m.gguf", pre), folder, ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_gguf_tokenizer_of_unknown_splitting_is_refused(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", pre="newest-thing")
    with pytest.raises(ModelError, match=r"splits text \(newest-thing\) is not known"):
        gguf_to_directory(source, tmp_path, ignore_progress)


@pytest.mark.parametrize(
    ("architecture", "metadata", "tensors", "named"),
    [
        ("llama", {}, {"rope_freqs.weight": 4}, "rope_freqs.weight"),  # Llama 3.1 and later
        ("deci", {}, {"rope_freqs.weight": 4}, "rope_freqs.weight"),
        ("phi3", {}, {"rope_factors_long.weight": 4}, "rope_factors_long.weight"),
        *(
            (name, {f"{name}.rope.scaling.type": "yarn"}, {}, f"{name}.rope.scaling.type yarn")
            for name in ("llama", "qwen2", "qwen3", "gpt-oss")
        ),
        (
            "gemma3",
            {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
            {},
            "gemma3.rope.scaling.factor 8",
        ),
        ("llama", {"llama.rope.scale_linear": 2.0}, {}, "llama.rope.scale_linear 2"),
        ("llama", {}, {"blk.0.attn_q.bias": 32}, "blk.0.attn_q.bias"),
        ("llama", {}, {"blk.1.ffn_gate_inp.weight": 32}, "blk.1.ffn_gate_inp.weight"),  # Mixtral
    ],
)
def test_a_gguf_file_that_would_become_another_model_is_refused(
    tmp_path: Path,
    architecture: str,
    metadata: dict[str, str | float],
    tensors: dict[str, int],
    named: str,
) -> None:
    source = write_tiny_gguf(
        tmp_path / "m.gguf",
        architecture=architecture,
        metadata=metadata,
        tensors={name: np.ones(size) for name, size in tensors.items()},
    )
    with pytest.raises(ModelError, match=f"it has {re.escape(named)}, .* original directory"):
        gguf_to_directory(source, tmp_path, ignore_progress)


@pytest.mark.parametrize("stretch", [8.0, 32.0])
def test_the_rope_of_llama_3_is_known_by_its_factors(tmp_path: Path, stretch: float) -> None:
    # As llama.cpp computes them, of wavelengths in tokens.
    wavelength = 2 * np.pi * 10000.0 ** (np.arange(0, 8, 2) / 8)
    smooth = ((8192 / wavelength - 1) / 3).clip(0, 1)
    factors = 1 / ((1 - smooth) / stretch + smooth)
    source = write_tiny_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    folder = tmp_path / "out"
    folder.mkdir()
    gguf_to_directory(source, folder, ignore_progress)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = torch.from_numpy(2 * np.pi / wavelength / factors)
    got = model.model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("type_", "factor"), [("none", 4.0), ("linear", 1.0)], ids=["none", "factor 1"]
)
def test_a_gguf_file_whose_rope_is_not_scaled_is_converted(
    tmp_path: Path, type_: str, factor: float
) -> None:
    metadata = {"llama.rope.scaling.type": type_, "llama.rope.scaling.factor": factor}
    source = write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    folder = tmp_path / "out"
    folder.mkdir()
    gguf_to_directory(source, folder, ignore_progress)
    assert logits(folder, [1, 2, 3]).isfinite().all()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(ModelError, match=r"cannot convert .*m\.gguf"):
        gguf_to_directory(tmp_path / "m.gguf", tmp_path, ignore_progress)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("small_first", [False, True])
def test_all_parts_of_a_gguf_model_are_read(
    small_first: bool, tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "whole").mkdir()
    gguf_to_directory(write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "whole", ignore_progress)
    first = write_tiny_gguf(tmp_path / "m.gguf", part_tensors=6, small_first=small_first)
    assert len(list(tmp_path.glob("m-0*"))) == 4 + small_first
    gguf_to_directory(first, folder, ignore_progress)
    expected, got = (load_file(path / "model.safetensors") for path in (tmp_path / "whole", folder))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert {file.name for file in folder.iterdir()} == {
        file.name for file in (tmp_path / "whole").iterdir()
    }


def test_parts_that_stay_as_they_are_become_one_file(tmp_path: Path, folder: Path) -> None:
    whole = GgufFile(write_tiny_gguf(tmp_path / "m.gguf", type_=Type.Q8_0))
    first = write_tiny_gguf(tmp_path / "m.gguf", type_=Type.Q8_0, part_tensors=5)
    gguf_to_directory(first, folder, ignore_progress)
    file = GgufFile(folder / GGUF)
    assert file.metadata == whole.metadata
    assert [*file.entries] == [*whole.entries]
    for name in whole.entries:
        assert torch.equal(file.read(name).dequantised(), whole.read(name).dequantised())


@pytest.mark.parametrize(
    ("architecture", "pre"),
    [
        ("qwen3", "qwen2"),
        ("qwen3_moe", "qwen2"),
        pytest.param("qwen3_5_moe_text", "qwen35", marks=needs_hybrids),
    ],
)
def test_a_gguf_file_of_qwen_stays_as_it_is(
    architecture: str, pre: str, tmp_path: Path, folder: Path
) -> None:
    of_experts = {
        "mlp_only_layers": [], "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32
    }  # fmt: skip
    more = of_experts if "moe" in architecture else {}
    plain = save_tiny_model(tmp_path / "plain", architecture, vocab_size=NUM_TOKENS, **more)
    made = save_gguf(plain, tmp_path, (Type.Q8_0,), partial(add_tokenizer, pre=pre))
    gguf_to_directory(made / GGUF, folder, ignore_progress)
    assert not [*folder.glob("*.safetensors")]
    got, expected = load_config(folder), load_config(plain)
    reported = (
        "head_dim", "layer_types", "model_type", "moe_intermediate_size", "norm_topk_prob",
        "num_experts", "num_experts_per_tok", "num_hidden_layers", "tie_word_embeddings",
    )  # fmt: skip
    for name in reported:
        if hasattr(expected, name):
            assert getattr(got, name) == getattr(expected, name), name
    assert AutoTokenizer.from_pretrained(folder).tokenize("ab 1") == ["ab", "Ġ", "1"]
    network = load_network(ModelConfig(path=str(folder), dtype="float32"), DEVICE)
    given = load_network(ModelConfig(path=str(made), dtype="float32"), DEVICE)
    assert isinstance(network, Decoder)
    assert torch.equal(run_prompt(network).logits, run_prompt(given).logits)


def test_a_part_that_is_missing_or_not_the_first_is_named(tmp_path: Path, folder: Path) -> None:
    first = write_tiny_gguf(tmp_path / "m.gguf", part_tensors=6)
    second, third = (tmp_path / f"m-0000{i}-of-00004.gguf" for i in (2, 3))
    with pytest.raises(ModelError, match=r"not the first part .* give m-00001-of-00004\.gguf"):
        gguf_to_directory(second, folder, ignore_progress)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=r"part 1 of 4 by its metadata, and 1 of 1 by the names"):
        gguf_to_directory(renamed, folder, ignore_progress)
    renamed.rename(first)
    third.unlink()
    with pytest.raises(ModelError, match=r"of which 1 are missing: m-00003-of-00004\.gguf; put"):
        gguf_to_directory(first, folder, ignore_progress)


def test_parts_of_two_models_are_refused(tmp_path: Path, folder: Path) -> None:
    first = write_tiny_gguf(tmp_path / "m.gguf", part_tensors=6)
    second, third = (tmp_path / f"m-0000{i}-of-00004.gguf" for i in (2, 3))
    third.write_bytes(second.read_bytes())
    with pytest.raises(ModelError, match=r"m-00003-of-00004\.gguf is part 2 of 4 by its metadata"):
        gguf_to_directory(first, folder, ignore_progress)


@pytest.mark.parametrize("part_tensors", [0, 6])
@pytest.mark.parametrize("type_", [Type.F32, Type.Q8_0])
def test_a_gguf_file_that_is_cut_short_is_refused(
    type_: Type, part_tensors: int, tmp_path: Path, folder: Path
) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", type_=type_, part_tensors=part_tensors)
    source.write_bytes(source.read_bytes()[:-64])
    with pytest.raises(ModelError, match=rf"{source.name} is cut short: it ends before the end of"):
        gguf_to_directory(source, folder, ignore_progress)


@pytest.mark.parametrize(
    ("architecture", "type_", "missing"),
    [
        ("llama", Type.F32, "blk.1.ffn_up.weight"),
        ("llama", Type.Q8_0, "blk.1.ffn_up.weight"),
        ("llama", Type.Q8_0, "output_norm.weight"),
        ("qwen3", Type.F32, "blk.0.attn_q_norm.weight"),
    ],
)
def test_a_gguf_file_that_lacks_a_tensor_is_refused_by_name(
    architecture: str, type_: Type, missing: str, tmp_path: Path, folder: Path
) -> None:
    """transformers draws it at random, and the model answers noise."""
    source = write_tiny_gguf(
        tmp_path / "m.gguf", architecture=architecture, type_=type_, without=[missing]
    )
    name = {"blk.1.ffn_up": "layers.1.mlp.up_proj", "blk.0.attn_q_norm": "layers.0.self_attn.q_n"}
    reported = missing if type_ is Type.Q8_0 else name[missing.removesuffix(".weight")]
    with pytest.raises(
        ModelError, match=rf"cannot convert .*lacks? .*{re.escape(reported)}.* again"
    ):
        gguf_to_directory(source, folder, ignore_progress)


def test_layers_beyond_those_that_a_gguf_file_counts_are_named(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a file that stays as it is, the engine names them."""
    source = write_tiny_gguf(tmp_path / "m.gguf", tensors={"blk.2.attn_norm.weight": np.ones(32)})
    gguf_to_directory(source, folder, ignore_progress)
    (reported,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "1 of its tensors are of layers 2 to 2, and its config counts 2; they" in reported
    assert reported.endswith("blk.2.attn_norm.weight")


def test_numbers_keep_the_precision_in_which_most_of_them_are(tmp_path: Path, folder: Path) -> None:
    for type_, dtype in ((Type.F32, torch.float32), (Type.F16, torch.float16)):
        source = write_tiny_gguf(tmp_path / "m.gguf", type_=type_, file_type=None)
        made = folder / type_.name
        made.mkdir()
        gguf_to_directory(source, made, ignore_progress)
        tensors = load_file(made / "model.safetensors").values()
        assert {tensor.dtype for tensor in tensors} == {dtype}
        assert json.loads((made / "config.json").read_text())["dtype"] == str(dtype).split(".")[1]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def ends(folder: Path) -> set[str]:
    """The tokens that end an answer of a converted model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = eos_token_ids(folder, load_config(folder), tokenizer)
    return {tokenizer.convert_ids_to_tokens(i) for i in ids}


@pytest.mark.parametrize("type_", [Type.F32, Type.Q8_0])
@pytest.mark.parametrize(
    ("tokens", "ids", "expected"),
    [
        ([], {"eos": "a"}, {"a", "<|end|>"}),
        (["<a>", "<b>"], {"eos": "b", "eot": "<a>", "eom": "<b>"}, {"b", "<a>", "<b>", "<|end|>"}),
        (["<|im_end|>", "<|endoftext|>"], {}, {"<|im_end|>", "<|endoftext|>", "<|end|>"}),
        (["<end_of_turn>", "<eos>"], {"eos": "<eos>"}, {"<eos>", "<end_of_turn>", "<|end|>"}),
        (["<|eot_id|>", "<|eom_id|>", "</s>"], {}, {"<|eot_id|>", "<|eom_id|>", "</s>", "<|end|>"}),
        # gpt-oss ends a part of an answer with <|end|>, and Gemma 4 has a </s> that is none.
        (["<|return|>", "<|call|>"], {}, {"<|return|>", "<|call|>"}),
        (["<turn|>", "<|tool_response>", "</s>"], {}, {"<turn|>", "<|tool_response>", "<|end|>"}),
    ],
)
def test_every_token_that_ends_an_answer_is_known(
    tokens: list[str],
    ids: dict[str, str],
    expected: set[str],
    type_: Type,
    tmp_path: Path,
    folder: Path,
) -> None:
    source = write_tiny_gguf(
        tmp_path / "m.gguf",
        type_=type_,
        more_tokens=dict.fromkeys(tokens, TokenType.NORMAL),
        ids=ids,
    )
    gguf_to_directory(source, folder, ignore_progress)
    assert ends(folder) == expected


@pytest.mark.parametrize("type_", [Type.F32, Type.Q8_0])
def test_no_token_is_invented_for_a_file_that_names_none(
    type_: Type, tmp_path: Path, folder: Path
) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", type_=type_, ids={}, end="<no>")
    gguf_to_directory(source, folder, ignore_progress)
    assert ends(folder) == set()
    config = json.loads((folder / "config.json").read_text())
    assert [config.get(f"{role}_token_id") for role in ("bos", "eos", "pad")] == [None] * 3


@pytest.mark.parametrize("type_", [TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED])
def test_what_a_template_writes_is_one_token_whatever_its_type(
    type_: TokenType, tmp_path: Path, folder: Path
) -> None:
    markers = [
        "<|im_start|>",
        "<|im_end|>",
        "<｜User｜>",
        "<think>",
    ]  # one is not in GPT-2's letters
    source = write_tiny_gguf(
        tmp_path / "m.gguf",
        more_tokens=dict.fromkeys(markers, type_),
        chat_template=CHATML + "<｜User｜><think>",
    )
    gguf_to_directory(source, folder, ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = tokenizer.convert_tokens_to_ids(markers[0])
    for i, marker in enumerate(markers):
        assert tokenizer.encode(f"a{marker}b") == [
            *tokenizer.encode("a"),
            first + i,
            *tokenizer.encode("b"),
        ]
    assert len(tokenizer) == len(
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    )
    hidden = tokenizer.decode(tokenizer.encode("a<|im_end|><think>b"), skip_special_tokens=True)
    assert hidden == ("ab" if type_ is TokenType.CONTROL else "a<think>b")


def test_ordinary_text_in_a_template_is_no_marker(tmp_path: Path, folder: Path) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", chat_template="ab 123 {{ messages }}")
    gguf_to_directory(source, folder, ignore_progress)
    added = AutoTokenizer.from_pretrained(folder).get_added_vocab()
    assert added == {"<|end|>": 0}
