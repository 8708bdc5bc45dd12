"""What tests of several packages share."""

from collections.abc import Iterator

import pytest


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
