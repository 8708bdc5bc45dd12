"""A target proves at load that rounding does not depend on the batch, or says that it does."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Tiny
from verification import HAS_KERNELS

from outrider.engine.config import ModelConfig
from outrider.engine.models import admission, attention, batch_invariance, decoder
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.batch_invariance import make_batch_dependent, make_batch_invariant
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network
from outrider.engine.models.network import Network
from outrider.engine.models.weights import Dense
from outrider.kernels.model import packed_linear
from outrider.kernels.model.attention_reference import RowBlock, row_blocks
from outrider.kernels.model.batch_invariant_linear import LibraryRows
from outrider.kernels.model.packed_linear import has_products

pytestmark = pytest.mark.skipif(
    HAS_KERNELS, reason="a CPU's own path; GPUs: test_batch_invariant_answers"
)


def loaded(path: Path, wanted: bool | None, dtype: str = "auto") -> Network:
    config = ModelConfig(path=str(path), dtype=dtype)
    return load_network(config, torch.device("cpu"), batch_invariant=wanted)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "opt"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_models_of_packed_products_keep_their_bits(
    architecture: str, dtype: str, tiny_model: Tiny
) -> None:
    if not has_products(getattr(torch, dtype)):
        pytest.skip(f"oneDNN has no {dtype} here")
    path = tiny_model(architecture)
    assert loaded(path, None, dtype).batch_invariant
    assert not loaded(path, False, dtype).batch_invariant  # nobody asked


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_a_dtype_that_the_processor_does_not_multiply_is_named(
    architecture: str,
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with AVX2 alone, where "auto" is float32, and keeps its bits."""
    reorder = packed_linear._reorder

    def of_float32(weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype != torch.float32:
            raise RuntimeError("needs the cpu support")
        return reorder(weight)

    monkeypatch.setattr(packed_linear, "_reorder", of_float32)
    monkeypatch.setattr(admission, "_cpu_has_bfloat16", lambda: False)
    caplog.set_level(logging.INFO)
    path = tiny_model(architecture)
    assert not loaded(path, None, "bfloat16").batch_invariant
    assert "depends on the batch: oneDNN multiplies no bfloat16 on this processor" in caplog.text
    with pytest.raises(UnsupportedModelError, match=r"batch_invariant.*no bfloat16.*target\.dtype"):
        loaded(path, True, "bfloat16")
    assert loaded(path, True).batch_invariant


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_oss"])
def test_models_with_products_of_the_librarys_own_are_named(
    architecture: str, tiny_model: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert not loaded(tiny_model(architecture), None).batch_invariant
    assert "depends on the batch: some of its products are the library's" in caplog.text
    with pytest.raises(UnsupportedModelError, match=r"batch_invariant.*library's own.*leave"):
        loaded(tiny_model(architecture), True)


def test_a_sum_in_another_order_is_found_out(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rms_norm = decoder.rms_norm

    def by_rows(x: torch.Tensor, norm: Any, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, norm, rows) * (1 + 2**-6 * (len(rows) == 3))

    monkeypatch.setattr(decoder, "rms_norm", by_rows)
    monkeypatch.setattr(batch_invariance, "_CPU_PASSES", (1, 3, 36))
    caplog.set_level(logging.INFO)
    network = loaded(tiny_model("llama"), None)
    assert not network.batch_invariant
    assert all(layer.pages is None for layer in network.attentions)
    assert "3 rows differ in bits from the same rows among 40" in caplog.text
    with pytest.raises(UnsupportedModelError, match="batch_invariant is on, but 3 rows"):
        loaded(tiny_model("llama"), True)


def test_attention_takes_rows_one_by_one_where_it_must(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = set()

    def spied(*args: Any) -> list[RowBlock]:
        blocks = row_blocks(*args)
        sizes.update(block.rows.stop - block.rows.start for block in blocks)
        return blocks

    monkeypatch.setattr(batch_invariance, "rows_at_once", lambda *_: 1)
    network = loaded(tiny_model("llama"), None)
    monkeypatch.setattr(attention, "row_blocks", spied)
    make_batch_invariant(network)
    assert network.batch_invariant
    assert sizes == {1}


def test_what_was_made_batch_invariant_becomes_batch_dependent_again(tiny_model: Tiny) -> None:
    """As a rank does whose others cannot have it so."""
    network = loaded(tiny_model(), None, "float32")
    assert isinstance(network, Decoder)
    matrices = [weight.dequantised() for weight in network.weights]
    library = LibraryRows(plain=(8,), in_parts=(8,))  # as on a GPU
    network.change_linears(
        lambda layer: layer._replace(weight=Dense(layer.weight.dequantised(), library))
    )
    assert all(weight.batch_invariant for weight in network.weights)
    make_batch_dependent(network)
    assert not network.batch_invariant
    assert not any(weight.batch_invariant for weight in network.weights)
    for weight, matrix in zip(network.weights, matrices, strict=True):
        assert torch.equal(weight.dequantised(), matrix)
