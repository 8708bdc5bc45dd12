"""GGUF files run as they are: their formats, and what the compiled layers make of them."""

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engines import engine_config, prompts, run, tokens
from gguf import GGMLQuantizationType as Type
from paged import run_prompt
from tiny_gguf import VOCAB, encoded, llama_directory, write_llama, write_out
from tiny_models import DEVICE
from transformers import AutoModelForCausalLM
from verification import HAS_KERNELS

from outrider.engine.api import RequestOutput, SamplingParams, ignore_progress
from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models import gguf_checkpoint, weights
from outrider.engine.models.compiled_decoder import CompiledDecoder
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.gguf_checkpoint import GgufCheckpoint, why_unpacked
from outrider.engine.models.gguf_file import GGML_TYPES, GgufFile, UnknownTypeError
from outrider.engine.models.loading import load_network
from outrider.kernels.cpu import layers
from outrider.kernels.cpu.layers import compiled

needs_layers = pytest.mark.skipif(
    compiled() is None or DEVICE.type != "cpu" or HAS_KERNELS,
    reason="no layers were compiled here, or they are not asked",
)
QUANTISED = [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q4_K, Type.Q6_K]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Type, Type], Path]:
    made: dict[tuple[Type, Type], Path] = {}

    def make(type_: Type, output: Type) -> Path:
        if (type_, output) not in made:
            folder = tmp_path_factory.mktemp(f"{type_.name}-{output.name}")
            made[type_, output] = llama_directory(folder, type_, output)
        return made[type_, output]

    return make


def original(folder: Path) -> Any:
    """transformers' model, of float32 weights."""
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("type_", [*QUANTISED, Type.F16, Type.BF16, Type.F32])
def test_every_format_means_what_ggml_says(type_: Type, tmp_path: Path) -> None:
    assert GGML_TYPES[int(type_)].name == type_.name
    data = encoded(type_, np.random.default_rng(1).normal(0, 1, (6, 512)).astype(np.float32))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("several", [["a", "b"], ["c", "d"]])
    writer.add_tensor("t", data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert file.shape_of("t") == (6, 512)
    truth = torch.from_numpy(gguf.quants.dequantize(data, type_))
    got = file.read("t").dequantised()
    assert (got - truth).abs().max() <= 1e-6 * truth.abs().max()


def test_a_format_that_has_no_reader_is_named(tmp_path: Path) -> None:
    file = GgufFile(write_llama(tmp_path / "m.gguf", Type.Q5_0, Type.Q8_0))
    with pytest.raises(UnknownTypeError, match=r"blk\.0\.attn_q\.weight is Q5_0, .*Q4_K"):
        why_unpacked(file)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", Type.Q4_1, Type.Q8_0)
    whole = path.read_bytes()
    for length in (3, 11, 200, 600):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="GGUF"):
            GgufFile(path)
    path.write_bytes(whole[:-100])
    file = GgufFile(path)
    with pytest.raises(ValueError, match="does not fit"):
        [file.read(name) for name in file.entries]


def test_a_layer_of_another_width_is_reported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_head_count(2)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 32), np.float32))
    writer.add_tensor("blk.0.attn_k.weight", np.zeros((8, 64), np.float32))
    write_out(writer)
    checkpoint = GgufCheckpoint(tmp_path, torch.float32, DEVICE, ignore_progress)
    sizes = {f"model.layers.0.self_attn.{name}_proj": 8 for name in "qk"}
    with pytest.raises(ValueError, match=r"k_proj.weight is 8 x 64; .* must be 8 x 32"):
        checkpoint.linear(32, sizes)


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    array, one = struct.pack("<I", 9), struct.pack("<Q", 1)  # of one array each
    value = array + (array + one) * 100_000
    key = struct.pack("<Q", 1) + b"k"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value)
    with pytest.raises(ValueError, match="broken GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize("alignment", [0, "x"])
def test_an_alignment_that_is_none_is_refused(alignment: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    type_ = gguf.GGUFValueType.STRING if alignment == "x" else gguf.GGUFValueType.UINT32
    writer.add_key_value("general.alignment", alignment, type_)
    write_out(writer)
    with pytest.raises(ValueError, match=f"broken GGUF file: .*alignment is '?{alignment}"):
        GgufFile(path)


def test_a_tensor_without_dimensions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", np.array(1.0, np.float32))
    write_out(writer)
    with pytest.raises(ValueError, match=r"broken GGUF file: .*t has no dimensions"):
        GgufFile(path)


@needs_layers
@pytest.mark.parametrize("type_", QUANTISED)
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_logits_are_those_of_the_unpacked_model(
    rounds_inputs: bool,
    type_: Type,
    directory: Callable[[Type, Type], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not rounds_inputs:  # the build for any processor
        monkeypatch.setattr(layers, "compiled", lambda: layers.builds()["_layers"])
    folder = directory(type_, Type.Q8_0)
    network = load_network(ModelConfig(path=str(folder), dtype="float32"), DEVICE)
    assert isinstance(network, CompiledDecoder)
    ids = torch.randint(0, VOCAB, (45,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        truth = original(folder)(ids[None]).logits[0]
    error = (run_prompt(network, ids).logits - truth).norm() / truth.norm()
    assert error <= (3e-4 if rounds_inputs else 1e-5)


@needs_layers
def test_the_format_of_most_numbers_is_shown(directory: Callable[[Type, Type], Path]) -> None:
    for of_layers, of_embedding, bits in ((Type.Q4_1, Type.Q8_0, 4), (Type.Q6_K, Type.Q4_K, 6)):
        folder = directory(of_layers, of_embedding)
        network = load_network(ModelConfig(path=str(folder), dtype="float32"), DEVICE)
        assert network.weight_formats == f"{bits}-bit GGUF, CPU kernels"
    bits = {each.name: each.bits for each in GGML_TYPES.values()}
    assert (bits["F32"], bits["F16"], bits["BF16"], bits["Q4_1"]) == (32, 16, 16, 4)


@needs_layers
def test_a_tied_embedding_is_kept_as_the_output_layers_codes_alone(
    directory: Callable[[Type, Type], Path],
) -> None:
    folder = directory(Type.Q4_1, Type.Q8_0)
    network = load_network(ModelConfig(path=str(folder), dtype="float32"), DEVICE)
    assert not hasattr(network, "embedding")
    truth = GgufFile(folder / "model.gguf").read("token_embd.weight").dequantised()
    assert torch.equal(network.input_embedding, truth)
    ids = torch.tensor([0, 5, VOCAB - 1])
    network.tap([-1])
    taps = run_prompt(network, ids).taps
    assert torch.equal(taps[:, 0], truth[ids])


@needs_layers
def test_an_output_layer_of_its_own_is_used_whatever_the_config_says(tmp_path: Path) -> None:
    folder = llama_directory(tmp_path, Type.Q4_1, Type.Q8_0)  # whose config has a tied embedding
    write_llama(folder / "model.gguf", Type.Q4_1, Type.Q8_0, own_output=True)
    network = load_network(ModelConfig(path=str(folder), dtype="float32"), DEVICE)
    assert isinstance(network, CompiledDecoder)
    ids = torch.arange(20)
    with torch.inference_mode():
        truth = original(folder)(ids[None]).logits[0]
    assert (run_prompt(network, ids).logits - truth).norm() <= 3e-4 * truth.norm()


@needs_layers
def test_a_tied_embedding_counts_once_as_it_loads(directory: Callable[[Type, Type], Path]) -> None:
    folder = directory(Type.Q4_1, Type.Q8_0)
    reported: list[tuple[int, int]] = []

    def report(stage: str, done: int, total: int) -> None:
        if stage == "loading the target":
            reported.append((done, total))

    load_network(ModelConfig(path=str(folder), dtype="float32"), DEVICE, report)
    total = 2 * 9 + 2  # of two layers; the embeddings and the last norm
    assert reported == [(0, 0), *((done, total) for done in range(1, total + 1))]


@needs_layers
def test_the_check_at_load_unpacks_a_weight_once_a_pass(
    directory: Callable[[Type, Type], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = directory(Type.Q4_1, Type.Q8_0)
    dequantised, times = weights.Tiles.dequantised, Counter[weights.Weight]()

    def counting(self: weights.Tiles) -> torch.Tensor:
        times[self] += 1
        return dequantised(self)

    monkeypatch.setattr(weights.Tiles, "dequantised", counting)
    network = load_network(ModelConfig(path=str(folder), dtype="float32"), DEVICE)
    assert isinstance(network, CompiledDecoder)
    # Three modules of transformers' share the weight of queries, keys and values.
    linears = [*network.blocks[0].linears, network.output_layer]
    assert len({times[linear.weight] for linear in linears}) == 1, times


@needs_layers
def test_in_bfloat16_only_kv_is_rounded(directory: Callable[[Type, Type], Path]) -> None:
    folder = directory(Type.Q4_1, Type.Q8_0)
    network = load_network(ModelConfig(path=str(folder), dtype="bfloat16"), DEVICE)
    ids = torch.randint(0, VOCAB, (45,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        truth = original(folder)(ids[None]).logits[0]
    got = run_prompt(network, ids).logits
    assert got.dtype == torch.bfloat16
    assert (got.float() - truth).norm() <= 2e-2 * truth.norm()


def test_without_compiled_layers_the_weights_are_unpacked(
    directory: Callable[[Type, Type], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gguf_checkpoint, weights):
        monkeypatch.setattr(module, "compiled", lambda: None)
    folder = directory(Type.Q4_1, Type.Q8_0)
    network = load_network(ModelConfig(path=str(folder), dtype="float32"), DEVICE)
    assert isinstance(network, Decoder)
    assert not isinstance(network, CompiledDecoder)
    ids = torch.arange(20)
    with torch.inference_mode():
        truth = original(folder)(ids[None]).logits[0]
    got = run_prompt(network, ids).logits
    assert (got - truth).norm() <= 1e-4 * truth.norm()


@needs_layers
def test_greedy_answers_are_those_of_generate(directory: Callable[[Type, Type], Path]) -> None:
    folder = directory(Type.Q4_1, Type.Q8_0)
    model = original(folder)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    given = prompts((3, 21, 40), VOCAB)
    truth = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in given
    ]
    for k in (0, 3):
        config = engine_config(folder, folder, k=k, page_size=16, max_num_batched_tokens=256)
        config = replace(config, target=ModelConfig(path=str(folder), dtype="float32"))
        assert [tokens(outputs) for outputs in run(Engine(config), given, params)] == truth


def answer(outputs: list[RequestOutput]) -> tuple[list[int], list[Any]]:
    return tokens(outputs), [entry for output in outputs for entry in output.logprobs or ()]


@needs_layers
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.deep)])
def test_answers_are_equal_to_the_bit_in_any_company(
    dtype: str, directory: Callable[[Type, Type], Path]
) -> None:
    folder = directory(Type.Q4_K, Type.Q6_K)
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, ignore_eos=True)
    given = prompts((3, 15, 70, 33), VOCAB)

    def engine(k: int, **settings: int) -> Engine:
        reported = {"page_size": 16, "num_pages": 128, "max_num_batched_tokens": 512, **settings}
        models = {
            "target": ModelConfig(path=str(folder), dtype=dtype),
            "draft": ModelConfig(path=str(folder)),
        }
        return Engine(replace(engine_config(folder, folder, k=k, **reported), **models))

    alone = engine(0)
    truth = [answer(run(alone, [prompt], params)[0]) for prompt in given]
    for k, settings in (
        (0, {"max_num_batched_tokens": 16}),
        (3, {}),
        (6, {"max_num_batched_tokens": 75, "page_size": 5, "num_pages": 200}),
        (3, {"num_pages": 12}),
    ):
        crowded = engine(k, **settings)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert list(map(answer, run(crowded, given, params))) == truth, (k, settings)
    torch.set_num_threads(1)
