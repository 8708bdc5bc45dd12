"""Without a GPU the kernels run under Triton's interpreter, which must be on from the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from verification import HAS_KERNELS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(HAS_KERNELS, reason="the kernels run in this process already")
def test_kernels_pass_these_tests_under_the_interpreter() -> None:
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-m", "not slow", "-W", "ignore", here],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=here.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
