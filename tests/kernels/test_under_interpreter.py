"""Without a GPU the kernels run under Triton's interpreter, which must be on from the start."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verification import HAS_KERNELS

HERE = Path(__file__).parent
# In two parts, for workers beside each other; of the slowest files each has as many seconds.
# More shapes and types are a sweep here: `make gpu-kernels` runs them all.
SLOWEST = ["batch_invariance", "scaled_product", "kernel_equals_reference", "invariance", "edges"]
SLOWEST += ["breakpoints", "filters", "paged_attention", "narrow_linear", "experts"]
# Without a Triton kernel.
NOT_TRITON = {"batch_invariance_cpu", "cpu_layers", "exact_rules", "verify_cpu"}
OTHERS = {path.stem[5:] for path in HERE.glob("test_*.py")} - {*SLOWEST} - NOT_TRITON
FILES = [HERE / f"test_{name}.py" for name in (*SLOWEST, *sorted(OTHERS))]
PARTS: list[Any] = [("not slow and not deep and not sweep", FILES[i::2]) for i in range(2)]
PARTS += [pytest.param("deep or sweep", FILES, marks=pytest.mark.sweep)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(HAS_KERNELS, reason="the kernels run in this process already")
@pytest.mark.parametrize(("cases", "files"), PARTS)
def test_kernels_pass_these_tests_under_the_interpreter(cases: str, files: list[Path]) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "-m", cases, *map(str, files)]
    run = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    nothing_selected = run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run.returncode == 0 or nothing_selected, run.stdout[-4000:]
