"""The activation of MLPs without a gate, against plain torch."""

import pytest
import torch
from random_tensors import normals

from outrider.kernels.model.relu_squared import relu_squared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7), (3, 4096), (5, 1000)])
def test_it_is_that_of_torch_to_the_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = normals(0, dtype)(*shape)
    x[0, :4] = torch.tensor([torch.nan, -torch.inf, torch.inf, -0.0])
    expected = x.clone().relu_().square_()
    assert relu_squared(x) is x
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
