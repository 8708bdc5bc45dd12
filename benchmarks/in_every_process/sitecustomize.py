"""Python imports this when a process of a benchmark's server starts: see serving.py.

It sets the acceptance in the engine's, before anything else there is imported.
"""

import importlib.util
import os
import sys
import traceback
from pathlib import Path

# Its folder is not on the path: the benchmark of kernels there has the name of a package that
# transformers looks for.
FILE = Path(__file__).parents[1] / "set_acceptance.py"

if "outrider.engine.processes.process" in sys.orig_argv:
    try:
        spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tokens_a_step, *at_k = os.environ["SET_ACCEPTANCE"].split()
        if tokens_a_step == "seed":
            module.set_acceptance_by_seed()
        else:
            module.set_acceptance(float(tokens_a_step), module.MAX_DRAFTS, *map(int, at_k))
    except BaseException:  # which Python would report and forget
        traceback.print_exc()
        os._exit(1)
