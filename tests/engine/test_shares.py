"""Every kind of layer and of weights that two ranks share: the logits are those of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import FORMATS, quantise, quantise_experts, quantise_stacked
from rank_group import JoinedRanks, load, rank_group, whole
from tiny_models import Tiny, change_tensor

from outrider.engine.config import ModelConfig
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.checkpoint import Checkpoint
from outrider.engine.models.families import FAMILIES
from outrider.engine.models.shares import Share
from outrider.engine.ranks import scales
from outrider.engine.ranks.admission import Sharing

LIKE_OTHERS = {"cwm": "qwen2", "ministral": "qwen2"}  # the same code reads them
# A Granite hybrid has one group of heads, as published ones have, which ranks cannot share.
SHARED = sorted(FAMILIES.keys() - {*LIKE_OTHERS, "gpt_oss", "granitemoehybrid"})
# These have layers stored as one, norms over all heads, experts, one that all rows share, and delta
# nets.
SOME = {"olmo2", "phi3", "qwen3_next"}
SOME_FORMATS = {"awq", "ct 4 bits", "fp8 of blocks", "fp8 of tensors", "gptq", "gptq, act-order"}


@pytest.fixture(scope="module")
def pair() -> Iterator[JoinedRanks]:
    with rank_group(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.deep) for name in SHARED],
)
def test_two_ranks_compute_what_one_process_does(
    architecture: str, tiny_model: Tiny, pair: JoinedRanks
) -> None:
    path = tiny_model(architecture, seed=1)
    ours, theirs = pair.run(str(path)), whole(path)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    halves = {axis: size // 2 for axis, size in theirs.bytes_by_axis.items() if axis}
    assert {axis: ours.bytes_by_axis[axis] for axis in halves} == halves


# As wide as groups of 128 inputs in each half.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.deep
def test_two_ranks_fill_up_experts_in_mxfp4(
    tiny_model: Tiny, tmp_path: Path, pair: JoinedRanks
) -> None:
    """192 inner numbers in half are three groups of 32; kernels take pairs of groups."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "num_key_value_heads": 2}
    torch.manual_seed(0)
    path = quantise_experts(tiny_model("gpt_oss", **sizes), tmp_path)
    ours, theirs = pair.run(str(path)), whole(path)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "awq",
        *(
            pytest.param(name, marks=pytest.mark.deep)
            for name in ("fp8 of blocks, inputs too", "ct int8, inputs too", "ct nvfp4")
        ),
    ],
)
def test_two_ranks_share_quantised_weights(
    name: str, tiny_model: Tiny, tmp_path: Path, pair: JoinedRanks
) -> None:
    torch.manual_seed(0)
    path = quantise(tiny_model("qwen3", scale=0.1, **WIDE), tmp_path, name)
    ours, theirs = pair.run(str(path)), whole(path)
    # A rank rounds its own inputs, by a scale of their own. Another share would be off by 1.
    off = 0.2 if "inputs too" in name else 1e-4
    assert (ours.logits - theirs.logits).norm() < off * theirs.logits.norm()


@pytest.mark.deep
def test_two_ranks_round_the_inputs_of_experts_alike(
    tiny_model: Tiny, tmp_path: Path, pair: JoinedRanks
) -> None:
    """A rank's inner numbers are whole groups, so the codes are those of one rank."""
    torch.manual_seed(0)
    sizes = WIDE | {"moe_intermediate_size": 256}
    path = quantise(
        tiny_model("qwen3_moe", scale=0.1, **sizes), tmp_path, "fp8 of blocks, inputs too"
    )
    ours, theirs = pair.run(str(path)), whole(path)
    assert (ours.logits - theirs.logits).norm() < 1e-2 * theirs.logits.norm()


@pytest.mark.deep
def test_two_ranks_round_plain_weights_alike(tiny_model: Tiny, pair: JoinedRanks) -> None:
    path = tiny_model("qwen3", scale=0.1, **WIDE)
    ours, theirs = pair.run(str(path), quantization="fp8"), whole(path, quantization="fp8")
    assert (ours.logits - theirs.logits).norm() < 0.2 * theirs.logits.norm()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "fp8 of blocks",
            "128 inputs share a scale, which 192 inputs would cut$",
        ),
        ("gptq, act-order", "its inputs have an order of their own "),
    ],
)
def test_scales_that_ranks_would_cut_are_refused(
    name: str, reason: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    sizes = WIDE | {"intermediate_size": 384}
    path = quantise(tiny_model("qwen3", scale=0.1, **sizes), tmp_path, name)
    with pytest.raises(UnsupportedModelError, match=rf"_proj cannot be shared by 2: {reason}"):
        load(str(path), Share(0, 2))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SOME_FORMATS else pytest.mark.deep)
        for name in FORMATS
    ],
)
@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("mixtral", marks=pytest.mark.deep)])
def test_they_are_known_by_the_headers_of_files(
    architecture: str, name: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Before weights are read, in the same words."""
    sizes = WIDE | {"intermediate_size": 192}
    check_headers(quantise(tiny_model(architecture, scale=0.1, **sizes), tmp_path, name))


@pytest.mark.parametrize(
    "name", ["fp8 of blocks", pytest.param("fp8 of tensors", marks=pytest.mark.deep)]
)
def test_those_of_stacked_experts_are_too(name: str, tiny_model: Tiny, tmp_path: Path) -> None:
    sizes = WIDE | {"moe_intermediate_size": 192}
    check_headers(quantise_stacked(tiny_model("qwen3_moe", scale=0.1, **sizes), tmp_path, name))


@pytest.mark.parametrize("shape", [(), (3,), (0, 0)])
def test_files_that_are_not_as_expected_are_left_to_the_loader(
    shape: tuple[int, ...], tiny_model: Tiny, tmp_path: Path
) -> None:
    path = quantise(tiny_model("qwen3", **WIDE), tmp_path, "awq")
    change_tensor(path, "model.layers.0.self_attn.o_proj.qzeros", torch.zeros(shape))
    assert Sharing(ModelConfig(path=str(path))).why_not(2) is None


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.deep) for name in SHARED],
)
def test_the_layers_whose_inputs_ranks_share_are_known_by_name(
    architecture: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, found = Checkpoint.weight, {True: set[str](), False: set[str]()}

    def noted(tensors: Any, num_inputs: int, sizes: Any, axis: Any = None, **options: Any) -> Any:
        found[axis == "inputs"] |= {name for name in sizes if name.startswith("model.layers.")}
        return weight(tensors, num_inputs, sizes, axis, **options)

    monkeypatch.setattr(Checkpoint, "weight", noted)
    load(str(tiny_model(architecture)))
    for is_shared, names in found.items():
        assert {bool(scales.SHARED.fullmatch(name)) for name in names} == {is_shared}


def check_headers(path: Path) -> None:
    """What is said before weights are read is what loading would say, and how many could."""
    for size in (2, 4):
        late = None
        try:
            load(str(path), Share(0, size))
        except UnsupportedModelError as refused:
            late = str(refused).partition(" cannot be served: ")[2]
        early = Sharing(ModelConfig(path=str(path))).why_not(size)
        assert (early and early.partition(": set it to ")[0]) == late
