"""Python imports this when a process of a benchmark's server starts: see serving.py.

It sets the acceptance in the engine's, before anything else there is imported.
"""

import os
import sys

if "outrider.engine.processes.process" in sys.orig_argv:
    from set_acceptance import MAX_DRAFTS, set_acceptance

    tokens_a_step, *at_k = os.environ["SET_ACCEPTANCE"].split()
    set_acceptance(float(tokens_a_step), MAX_DRAFTS, *map(int, at_k))
