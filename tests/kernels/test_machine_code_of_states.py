"""What Triton and ptxas make of the kernels of states; needs no GPU."""

import re
from collections.abc import Callable

import pytest
import torch
from kernel_launches import deep, delta_nets, empty, mamba2s, states

from outrider.kernels.model.state_layer import StateHeads
from outrider.kernels.model.state_warpgroups import is_for as passes_by_warpgroups
from outrider.kernels.triton_or_none import HAS_GLUON

machine_code = pytest.importorskip("machine_code", exc_type=ImportError)
pytestmark = machine_code.MARKS


@pytest.mark.parametrize(
    ("gpu", "product"),
    [(machine_code.H100, "HGMMA" if HAS_GLUON else "HMMA"), (machine_code.RTX_4090, "HMMA")],
)
@pytest.mark.parametrize("launch", [delta_nets, deep(mamba2s)])
def test_states_stay_in_registers(
    launch: Callable[[], None], gpu: machine_code.Gpu, product: str
) -> None:
    with machine_code.launches(gpu) as kernels:
        launch()
    assert len(kernels) == 3
    through_states = machine_code.disassembled(kernels[2])
    assert re.search(rf"\b{product}\b", through_states)
    assert not re.search(r"\b(STL|LDL)\b", through_states), "registers are spilled"
    # Several programs share a multiprocessor.
    assert kernels[2].metadata.shared <= gpu.shared_bytes // 4


@pytest.mark.parametrize("launch", [delta_nets, deep(mamba2s)])
def test_convolved_rows_are_rounded_in_pairs(launch: Callable[[], None]) -> None:
    with machine_code.launches(machine_code.H100) as kernels:
        launch()
    code = machine_code.disassembled(kernels[0])
    assert len(re.findall(r"\bF2F\.BF16", code)) <= 1  # of scalars
    assert len(re.findall(r"\bF2FP\.BF16\S*PACK_AB\b", code)) >= 16


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
@pytest.mark.parametrize("launch", [delta_nets, deep(mamba2s)])
def test_warpgroups_wait_for_a_cell_s_products_few_times(launch: Callable[[], None]) -> None:
    """Not after each: ptxas does that if it cannot tell which registers they use."""
    with machine_code.launches(machine_code.H100) as kernels:
        launch()
    machine_code.check_products(kernels[2:])
    code = machine_code.disassembled(kernels[2])
    assert len(re.findall(r"\bWARPGROUP\.DEPBAR\b", code)) <= 4


@pytest.mark.skipif(not HAS_GLUON, reason="needs Gluon")
def test_many_rows_pass_states_once_the_kernel_before_has_ended() -> None:
    heads = StateHeads(2, 4, 128, 128, num_scalars=2)
    with machine_code.launches(machine_code.H100) as kernels:
        states(heads, 256)
        states(heads, 257)
    assert [kernel.metadata.launch_pdl for kernel in kernels] == [True] * 5 + [False]


def test_only_a_hopper_gpu_passes_states_by_warpgroups() -> None:
    for gpu in (machine_code.RTX_4090, machine_code.H100, machine_code.B200, machine_code.RTX_5090):
        with machine_code.launches(gpu):
            device = empty(1).device
            takes = [
                passes_by_warpgroups(dtype, dim, dim, device)
                for dtype, dim in [
                    (torch.bfloat16, 128),
                    (torch.bfloat16, 64),
                    (torch.float16, 128),
                    (torch.bfloat16, 96),
                    (torch.bfloat16, 256),
                ]
            ]
        is_hopper = HAS_GLUON and gpu is machine_code.H100
        assert takes == [is_hopper, is_hopper, False, False, False]
