"""Random models of published shapes, as benchmarks time them: with as many weights, and served."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, run, tokens
from torch import Tensor

from outrider.engine.engine import Engine
from outrider.engine.models.decoder import Decoder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def published() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import published_shapes  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(BENCHMARKS))
    return published_shapes


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("qwen3-8b", 8.19),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3.6-27b", 27.32),  # text and MTP head
        ("qwen3.6-35b-a3b", 35.51),
        ("gpt-oss-20b", 20.91),
        ("llama-3.1-70b", 70.55),
        ("llama-3.2-1b", 1.24),
    ],
)
def test_a_shape_has_as_many_weights_as_was_published(
    shape: str, billions: float, published: Any
) -> None:
    class Sizes:
        def weight(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        def constant(
            self, value: float, *shape: int, dtype: torch.dtype = torch.bfloat16
        ) -> Tensor:
            return self.weight(*shape, dtype=dtype)

    model = published.Checkpoint(published.config_of(shape), Sizes())
    model.model()
    if "mtp_num_hidden_layers" in model.config:
        model.mtp_head()
    counted = [
        tensor.numel() * (2 if name.endswith("_blocks") else 1)  # of 4 bits
        for name, tensor in model.tensors.items()
        if not name.endswith("_scales")
    ]
    assert sum(counted) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("shape", "fp8"),
    [
        pytest.param("qwen3-8b", False, marks=pytest.mark.deep),
        pytest.param("qwen3-30b-a3b", True, marks=pytest.mark.deep),
        pytest.param("qwen3.6-27b", True, marks=pytest.mark.deep),
        ("qwen3.6-35b-a3b", True),
        pytest.param("qwen3.6-35b-a3b", False, marks=pytest.mark.deep),
        pytest.param("gpt-oss-20b", False, marks=pytest.mark.deep),
        pytest.param("llama-3.1-70b", False, marks=pytest.mark.deep),
    ],
)
def test_a_narrow_one_answers_with_its_head(
    shape: str, fp8: bool, published: Any, tmp_path: Path
) -> None:
    published.save(shape, tmp_path, published.config_of(shape, fp8=fp8, tiny=True))
    head = next((path for path in tmp_path.iterdir() if path.is_dir()), None)
    config = engine_config(tmp_path, head or tmp_path, k=2, max_num_seqs=2)
    assert config.draft is not None
    draft = replace(config.draft, is_mtp=head is not None and head.name == "mtp")
    engine = Engine(replace(config, draft=draft))
    assert isinstance(engine.worker.pair.target, Decoder)  # not as transformers has it
    assert engine.info.proposer == (head.name if head else "draft_model")
    (answer,) = run(engine, [list(range(2, 40))], GREEDY)
    assert len(tokens(answer)) == GREEDY.max_tokens


def test_what_is_published_in_one_format_has_no_other(published: Any) -> None:
    with pytest.raises(ValueError, match="gpt-oss-20b is in mxfp4"):
        published.config_of("gpt-oss-20b", fp8=True)
