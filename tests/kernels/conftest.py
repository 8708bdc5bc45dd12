"""Where the kernels run: on a GPU if there is one, else under Triton's interpreter."""

import pytest
from fast_interpreter import speed_up
from verification import DRAWING_ROADS

from outrider.kernels._dispatch import INTERPRET

if INTERPRET:
    speed_up()


@pytest.fixture(params=DRAWING_ROADS)
def road(request: pytest.FixtureRequest) -> str:
    """`reference`, `kernel` on a GPU or an interpreter, `compiled` on a CPU that has it."""
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under the interpreter kernels alone: without it, these tests have taken the other roads."""
    if INTERPRET:
        items[:] = [
            item
            for item in items
            if getattr(item, "callspec", None) is None
            or item.callspec.params.get("road", "kernel") == "kernel"
        ]
