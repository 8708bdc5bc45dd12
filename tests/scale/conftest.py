"""Replicas behind routers that others wrote, each of these in an environment of its own."""

from pathlib import Path

import pytest

INSTALLED = Path(__file__).parents[2] / "build/scale"  # by `make scale`


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is not installed: here, so that no server is started for it."""
    for package in (name for marker in item.iter_markers("scale") for name in marker.args):
        if not (INSTALLED / package).exists():
            pytest.skip(f"{package} is not installed: `make scale` does that")


@pytest.fixture(scope="session")
def installed() -> Path:
    """Where each package's environment is."""
    return INSTALLED
