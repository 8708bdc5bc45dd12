"""Break verification in known ways, one at a time, and see that the tests notice.

    python scripts/mutate.py [part of a mutation's name]

Each mutation edits a copy of kernels/ and runs the tests that should turn red; a mutation that
they survive is a hole in the tests, and the exit status says so.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BREAKPOINTS = "test_breakpoints.py"
EDGES = "test_edges.py"
FILTERS = "test_filters.py"
EDITS = "test_logit_edits.py"


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str  # file, or file::test
    interpreted: bool = False  # a kernel: needs Triton's interpreter


MUTATIONS = [
    Mutation(
        "draft and recovery share noise",
        "draw.py",
        "torch.full_like(b, step.purpose)",
        "torch.full_like(b, Purpose.DRAFT)",
        f"{EDGES}::test_draft_and_recovery_do_not_share_noise",
    ),
    Mutation(
        "recovery reuses the acceptance draw",
        "draw.py",
        "torch.full_like(b, step.purpose)",
        "torch.full_like(b, Purpose.ACCEPT)",
        f"{EDGES}::test_recovery_does_not_reuse_the_acceptance_draw",
    ),
    Mutation(
        "block stops at its first failure",
        "settle.py",
        "    return torch.maximum(accepted, passed.amax(-1))",
        "    standing = ((passed > 0) | (offset <= accepted[:, None])).long().cumprod(-1)\n"
        "    return torch.maximum(accepted, (passed * standing).amax(-1))",
        BREAKPOINTS,
    ),
    Mutation(
        "residual without P_tau",
        "residual.py",
        "(p * scale.reshape(lead) - q).clamp_min(0.0)",
        "(p - q).clamp_min(0.0)",
        BREAKPOINTS,
    ),
    Mutation(
        "q at another temperature, in the residual",
        "residual.py",
        "log_prob_reference(draft, token_ids, draft_state, inv_t)",
        "log_prob_reference(draft, token_ids, draft_state, torch.ones_like(inv_t))",
        BREAKPOINTS,
    ),
    Mutation(
        "q at another temperature, in the accept test",
        "decide.py",
        "log_q = log_prob_reference(raw, safe_ids, drafts.state, inv_t)",
        "log_q = log_prob_reference(raw, safe_ids, drafts.state, torch.ones_like(inv_t))",
        BREAKPOINTS,
    ),
    Mutation(
        "recovery from p instead of the residual",
        "residual.py",
        "(p * scale.reshape(lead) - q).clamp_min(0.0)",
        "(p * scale.reshape(lead))",
        BREAKPOINTS,
    ),
    Mutation(
        "P_i not capped at 1",
        "decide.py",
        "(scale + ratio[:, i]).clamp_max(0.0)",
        "(scale + ratio[:, i])",
        BREAKPOINTS,
    ),
    Mutation(
        "h_i without Z",
        "settle.py",
        "h = z / (z + 1.0 - plan.log_scale[:, 1:-1].exp())",
        "h = plan.log_scale[:, 1:-1].exp()",
        BREAKPOINTS,
    ),
    Mutation(
        "draws keyed by position, drafts and accept tests",
        "decide.py",
        "philox_reference(seed, anchor, offset, purpose, zero)",
        "philox_reference(seed, anchor + offset, zero, zero, zero)",
        "test_many_steps.py",
    ),
    Mutation(
        "an impossible draft is accepted",
        "decide.py",
        "valid & (log_p > -torch.inf) & (log_q > -torch.inf)",
        "valid & (log_p > -torch.inf)",
        EDGES,
    ),
    Mutation(
        "top-p drops the token that crosses it",
        "row_state.py",
        "(total - weight).double(), top_p * mass",
        "total.double(), top_p * mass",
        FILTERS,
    ),
    Mutation(
        "every tie at the boundary is kept",
        "row_state.py",
        "if num_ties < len(tied) else vocab_size",
        "if False else vocab_size",
        FILTERS,
    ),
    Mutation(
        "top-p over the whole row instead of what top-k leaves",
        "row_state.py",
        "float(total[-1]) if top_k < vocab_size else float(z) * FIXED_ONE",
        "float(z) * FIXED_ONE",
        FILTERS,
    ),
    Mutation(
        "NaN goes unnoticed",
        "row_state.py",
        "bad = ~row_max.isfinite()",
        "bad = row_max == -torch.inf",
        EDGES,
    ),
    Mutation(
        "log(1 - v) where log1p is needed",
        "philox.py",
        "torch.where(v < 0.1, series, -torch.log(1.0 - v))",
        "-torch.log(1.0 - v)",
        "test_philox.py",
    ),
    Mutation(
        "match keyed by the step instead of the position",
        "draw.py",
        "(step.position[pairs, None] + offset).flatten()",
        "(step.position[pairs, None] + 0 * offset).flatten()",
        "test_invariance.py",
    ),
    Mutation(
        "match: the others of a group do not exceed its least",
        "match.py",
        "return noise + torch.where(is_least, 0.0, excess)",
        "return torch.where(is_least, noise, excess)",
        "test_match.py",
    ),
    Mutation(
        "noise keyed by the batch row",
        "draw.py",
        "w = philox_reference(own.seed, start, offset,",
        "w = philox_reference(own.seed + b, start, offset,",
        "test_invariance.py",
    ),
    Mutation(
        "penalties ignore the drafts",
        "penalties.py",
        "2 * (offset < lag[:, None]).int()",
        "0 * (offset < lag[:, None]).int()",
        EDITS,
    ),
    Mutation(
        "min_tokens off by one",
        "token_bias.py",
        "rows.position[:, None] < banned_until",
        "rows.position[:, None] <= banned_until",
        EDITS,
    ),
    Mutation(
        "bad words begin in the prompt",
        "bad_words.py",
        "token_ids[slot, int(bad_words.output_start[slot]) : position]",
        "token_ids[slot, :position]",
        EDITS,
    ),
    Mutation(
        "kernel: draft and recovery share noise",
        "draw.py",
        "one * PURPOSE",
        "one * 0",
        "test_kernel_equals_reference.py::test_mixed_batch",
        True,
    ),
    Mutation(
        "kernel: block stops at its first failure",
        "settle.py",
        "accepted = tl.where(passed, i, accepted)",
        "accepted = tl.where(passed & (i == accepted + 1), i, accepted)",
        BREAKPOINTS,
        True,
    ),
    Mutation(
        "kernel: residual without P_tau",
        "residual.py",
        "weight = probs(x, ids, state, log_scale, inv_t)",
        "weight = probs(x, ids, state, 0.0, inv_t)",
        BREAKPOINTS,
        True,
    ),
    Mutation(
        "kernel: q at another temperature",
        "decide.py",
        "log_prob(raw_q, token, q_state[0], q_state[1], q_state[2], q_state[3], inv_t)",
        "log_prob(raw_q, token, q_state[0], q_state[1], q_state[2], q_state[3], 1.0)",
        BREAKPOINTS,
        True,
    ),
    Mutation(
        "kernel: padding can win",
        "scan.py",
        "    if first + _BLOCK > vocab_size:",
        "    if first > vocab_size:",
        EDGES,
        True,
    ),
    Mutation(
        "kernel: NaN goes unnoticed",
        "scan.py",
        '(block_max != block_max) | (block_max == float("inf"))',
        'block_max == float("inf")',
        EDGES,
        True,
    ),
    Mutation(
        "kernel: candidates lose their tie order",
        "candidates.py",
        "(0x7FFFFFFF - ids)",
        "ids",
        FILTERS,
        True,
    ),
    Mutation(
        "kernel: bisection counts a tie too many",
        "bisection.py",
        "tied + tl.cumsum(is_tie, 0) == num_ties",
        "tied + tl.cumsum(is_tie, 0) == num_ties + 1",
        FILTERS,
        True,
    ),
    Mutation(
        "kernel: programs that share a row leave its last block",
        "residual.py",
        "range(part, num_blocks, parts)",
        "range(part, num_blocks - 1, parts)",
        "test_invariance.py::test_programs_that_share",
        True,
    ),
    Mutation(
        "kernel: the first row to settle speaks for its request",
        "row_outcome.py",
        "    if num_before == k:",
        "    if num_before == 0:",
        "test_kernel_equals_reference.py::test_mixed_batch",
        True,
    ),
    Mutation(
        "kernel: recovery among candidates ignores the draft",
        "draw.py",
        "weight = fixed(token_weights(x, y, ids, row, inv_t, HAS_Q))",
        "weight = fixed(probs(x, ids, row[2], 0.0, inv_t))",
        "test_kernel_equals_reference.py::test_mixed_batch",
        True,
    ),
    Mutation(
        "kernel: P_i not capped at 1",
        "decide.py",
        "return tl.minimum(total, cap), u",
        "return total, u",
        BREAKPOINTS,
        True,
    ),
    Mutation(
        "kernel: candidates of too little mass",
        "candidates.py",
        "mass >= top_p.to(tl.float64)",
        "mass >= 0.0 * top_p.to(tl.float64)",
        FILTERS,
        True,
    ),
    Mutation(
        "kernel: match looks at the likeliest groups alone",
        "match.py",
        "for start in range(0, num_left, _TILE)",
        "for start in range(0, 0, _TILE)",
        "test_kernel_equals_reference.py::test_match_looks_past",
        True,
    ),
    Mutation(
        "kernel: penalties ignore the drafts",
        "penalties.py",
        "tl.load(num_counted_ptr + slot), tl.load(position_ptr + i)",
        "tl.load(num_counted_ptr + slot), tl.load(num_counted_ptr + slot)",
        EDITS,
        True,
    ),
    Mutation(
        "kernel: min_tokens off by one",
        "token_bias.py",
        "position < tl.load(",
        "position <= tl.load(",
        EDITS,
        True,
    ),
    Mutation(
        "kernel: bad words begin in the prompt",
        "bad_words.py",
        "begin >= tl.load(output_start_ptr + slot)",
        "begin >= 0",
        EDITS,
        True,
    ),
]


def run_tests(work: Path, tests: str, interpreted: bool) -> bool:
    """Whether the tests pass."""
    file, _, name = tests.partition("::")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-W", "ignore"]
    command += ["-k", name] if name else []
    environment = os.environ | {"PYTHONPATH": str(work / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [*command, f"tests/kernels/{file}"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {tests}:\n{run.stdout}{run.stderr}")
    return run.returncode == 0


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        package = work / "src" / "outrider" / "kernels"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "kernels", package, ignore=ignored)
        shutil.copytree(ROOT / "tests" / "kernels", work / "tests" / "kernels", ignore=ignored)
        shutil.copytree(ROOT / "tests" / "support", work / "tests" / "support", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", work)
        for mutation in MUTATIONS:
            if wanted not in mutation.name:
                continue
            path = package / mutation.file
            text = path.read_text()
            if text.count(mutation.old) != 1:
                raise SystemExit(f"{mutation.name}: its text is not once in {mutation.file}")
            path.write_text(text.replace(mutation.old, mutation.new))
            survived = run_tests(work, mutation.tests, mutation.interpreted)
            path.write_text(text)
            print(f"{'SURVIVED' if survived else 'caught':<9} {mutation.name}", flush=True)
            survivors += [mutation.name] * survived
        if not wanted and not run_tests(work, EDGES, False):
            raise SystemExit("the tests fail without any mutation")
    if survivors:
        raise SystemExit(f"{len(survivors)} mutations survived: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
