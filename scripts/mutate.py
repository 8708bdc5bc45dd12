"""Break the code in known ways, one at a time, and see that the tests notice.

    python scripts/mutate.py [part of a mutation's name]

Each mutation of mutations/*.toml edits a copy of the code and runs the tests that should turn red;
one that they survive is a hole in the tests, and the exit status says so. Tests that fail without
any mutation would notice everything: they end the run.
"""

import importlib
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "engine", "distill", "server", "configs")


class Mutation(NamedTuple):
    name: str
    file: str  # of kernels/, or of the room that it names
    old: str
    new: str
    tests: str  # file, or file::names as pytest's -k takes them; found as the other file is
    interpreted: bool = False  # a kernel: needs Triton's interpreter


def mutations() -> Iterator[Mutation]:
    for path in sorted((ROOT / "scripts" / "mutations").glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutation"]:
            yield Mutation(**entry)


def run_tests(work: Path, tests: str, interpreted: bool) -> bool:
    """Whether the tests pass: in a fork of this process, so that torch is imported but once."""
    file, _, names = tests.partition("::")
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(work)
            sys.path.insert(0, str(work / "src"))
            os.environ["PYTHONPATH"] = str(work / "src")  # for processes that tests start
            if interpreted:
                os.environ["TRITON_INTERPRET"] = "1"
            arguments = ["-q", "-x", "-W", "ignore", "-p", "no:cacheprovider"]
            arguments += ["-k", names] if names else []
            status = pytest.main([*arguments, f"tests/{in_room(file)}"])
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        if os.waitstatus_to_exitcode(status) not in (0, 1):
            raise SystemExit(f"pytest could not run {tests}:\n{output.read()}")
    return status == 0


def import_what_tests_need(interpreted: bool) -> None:
    """What takes seconds, and has no code of ours. The interpreter must be chosen before Triton is
    imported, which transformers does.
    """
    importlib.import_module("torch")
    if not interpreted:
        importlib.import_module("transformers.models.llama.modeling_llama")


def in_room(file: str) -> str:
    """Where a file is; of kernels and their tests the name alone is shown."""
    if "/" in file:
        return file
    if file.startswith("test_"):
        return f"kernels/{file}"
    (found,) = (ROOT / "kernels").rglob(file)
    return str(found.relative_to(ROOT))


def copy_into(work: Path) -> Path:
    """Copy code and tests; returns where the rooms of the code are."""
    package = work / "src" / "outrider"
    ignored = shutil.ignore_patterns("__pycache__")
    for room in PACKAGES:
        shutil.copytree(ROOT / room, package / room, ignore=ignored)
    for folder in ("kernels", "engine", "server", "support"):
        shutil.copytree(ROOT / "tests" / folder, work / "tests" / folder, ignore=ignored)
    shutil.copy(ROOT / "tests" / "conftest.py", work / "tests")
    shutil.copy(ROOT / "pyproject.toml", work)
    return package


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("TRITON_INTERPRET", None)
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = []
    passes_unbroken: set[tuple[str, bool]] = set()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        package = copy_into(work)
        for mutation in sorted(mutations(), key=lambda each: not each.interpreted):
            if wanted not in mutation.name:
                continue
            import_what_tests_need(mutation.interpreted)
            tests = mutation.tests, mutation.interpreted
            if tests not in passes_unbroken and not run_tests(work, *tests):
                raise SystemExit(f"{mutation.tests} fails without any mutation")
            passes_unbroken.add(tests)
            path = package / in_room(mutation.file)
            text = path.read_text()
            if text.count(mutation.old) != 1:
                raise SystemExit(f"{mutation.name}: its text is not once in {mutation.file}")
            path.write_text(text.replace(mutation.old, mutation.new))
            survived = run_tests(work, *tests)
            path.write_text(text)
            print(f"{'SURVIVED' if survived else 'caught':<9} {mutation.name}", flush=True)
            survivors += [mutation.name] * survived
    if survivors:
        raise SystemExit(f"{len(survivors)} mutations survived: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
