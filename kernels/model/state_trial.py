"""Tries at load whether `pass_cells_by_warpgroups` works on the GPU at hand. If not, rows pass
through states by `pass_cells`, which sums in the same order.
"""

import functools
from functools import partial

import torch

from ..compiling import compile_together
from .state_cells import CELL, CellPass, pass_cells
from .state_layer import StateHeads, rows_kept
from .state_warpgroups import failed, is_for, pass_cells_by_warpgroups
from .warpgroups import works

_ROWS = 70  # of a pass, after some that S does not cover, and with drafts at its end
_BEFORE, _DRAFTS = 5, 3
_MOST_ERROR = 0.01  # relative; outputs are rounded to bfloat16


@functools.cache
@torch.inference_mode()
def try_cells(heads: StateHeads, dtype: torch.dtype, device: torch.device) -> None:
    """If it is for such layers, pass a few cells through a state by both; if that fails, log why,
    and let it be for none. To be called where kernels run: in no capture.
    """
    if is_for(dtype, heads.key_dim, heads.value_dim, device):
        otherwise = "rows pass through states by a slower kernel"
        if not works(partial(_error, heads, device), _MOST_ERROR, otherwise):
            failed.add(device)


def _error(heads: StateHeads, device: torch.device) -> float:
    """The relative difference of outputs and states, by all kinds of numbers that cells have."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, device=device).to(dtype)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    ring, num_heads = rows_kept(1, _DRAFTS), heads.num_value_heads
    extra = 2
    num_cells = _ROWS // CELL + extra
    cells = randn(num_cells, num_heads, 2 * CELL + 8, CELL, scale=0.3, dtype=torch.float32)
    matrices = cells[:, :, : 2 * CELL].view(torch.bfloat16)
    matrices.copy_(randn(*matrices.shape, scale=0.1))
    convolved = randn(_ROWS + ring, heads.num_channels, scale=0.3)
    skip = None if heads.corrects else randn(num_heads, dtype=torch.float32)
    seq_len = CELL + _BEFORE + _ROWS
    sizes = {
        "RING": ring,
        "KEY_HEADS": heads.num_key_heads,
        "VALUE_HEADS": num_heads,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "CORRECTS": heads.corrects,
        "EXTRA": extra,
    }
    before = randn(1, num_heads, heads.key_dim, heads.value_dim, dtype=torch.float32)
    ours, theirs = ((randn(_ROWS, num_heads, heads.value_dim), before.clone()) for _ in range(2))
    sequences = integers(0), integers(seq_len), integers(0, _ROWS)
    calls = [
        partial(through, CellPass(
            out, convolved, cells, skip, state, integers(CELL), sequences,
            integers(seq_len - _DRAFTS), sizes,
        ))
        for through, (out, state) in ((pass_cells_by_warpgroups, ours), (pass_cells, theirs))
    ]  # fmt: skip
    compile_together(calls, device)
    for call in calls:
        call()
    # No number, if one of the two is none.
    return sum(
        float((x.float() - y.float()).norm() / y.float().norm())
        for x, y in zip(ours, theirs, strict=True)
    )
