"""What tests of several packages share."""

import gc
import signal
from collections.abc import Iterator

import pytest

# A shell ignores Ctrl-C for what it runs in the background, and so would we and our children.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among parallel workers, the tests of a file that share something go to one of them, as do
    all that share the server of the default pair.
    """
    if not config.pluginmanager.hasplugin("xdist"):  # on a GPU machine
        return
    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
        if any(fixture.scope == "module" for each in fixtures.values() for fixture in each):
            file = item.nodeid.partition("::")[0]
            group = "default_server" if "default_server" in fixtures else file
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """Modules and collected tests stay. The garbage collector need not look at them, nor so often
    at what FastAPI keeps of each application.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # the last is how seldom it looks at everything


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Of tests that are coroutines."""
    return "asyncio"


@pytest.fixture
def compiled_kernels() -> Iterator[list[str]]:
    """Names of the kernels that were compiled, or read from the cache on disk, since it began."""
    import triton

    names: list[str] = []
    runtime = triton.knobs.runtime
    saved, runtime.jit_cache_hook = (
        runtime.jit_cache_hook,
        lambda *args, fn, **kwargs: names.append(str(fn.name)),
    )
    yield names
    runtime.jit_cache_hook = saved
