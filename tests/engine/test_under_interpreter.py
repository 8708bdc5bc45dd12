"""The way that an engine takes on a GPU, without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import DEVICE

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.mark.deep
@pytest.mark.skipif(DEVICE.type == "cuda", reason="other tests take that way here")
def test_kernels_compile_at_start_without_a_trace_and_answers_are_the_targets(
    tmp_path: Path,
) -> None:
    """With drafts of every kind of source, in one process: it takes longer to start than each."""
    script = SUPPORT / "interpreted_engine.py"
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    path = os.pathsep.join((str(SUPPORT), *sys.path))  # so that it imports what this process does
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
