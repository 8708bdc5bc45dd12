"""Where the kernels run: on a GPU if there is one, else under Triton's interpreter."""

import pytest
import torch
from fast_interpreter import speed_up
from verification import DEVICE, ROADS

from outrider.kernels._dispatch import INTERPRET

if INTERPRET:
    speed_up()


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest) -> str:
    """`reference` or `kernel`; without GPU and interpreter only the former."""
    return str(request.param)
