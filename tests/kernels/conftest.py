"""Where the kernels run: on a GPU if there is one, else under Triton's interpreter."""

import pytest
import torch
from fast_interpreter import speed_up
from verification import DEVICE, DRAWING_ROADS

from outrider.kernels._dispatch import INTERPRET

if INTERPRET:
    speed_up()


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(params=DRAWING_ROADS)
def road(request: pytest.FixtureRequest) -> str:
    """`reference`, `kernel` on a GPU or an interpreter, `compiled` on a CPU that has it."""
    return str(request.param)
