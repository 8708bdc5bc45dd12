"""Imports run one way: server → engine → kernels, and never in a circle."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "server": {"server", "distill", "engine", "kernels"},
    "distill": {"distill", "engine", "kernels"},
    "engine": {"engine", "kernels"},
    "kernels": {"kernels"},
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(p): p for room in MAY_IMPORT for p in sorted((ROOT / room).rglob("*.py"))}


def imports_of(module: str) -> Iterator[str]:
    """The modules of ours that it imports, wherever in it; for type checkers, too."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            bases = [alias.name for alias in node.names]
            names = [""] * len(bases)
        elif isinstance(node, ast.ImportFrom):
            ancestors = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = (
                ".".join([*ancestors, node.module or ""]).rstrip(".") if node.level else node.module
            )
            bases, names = [base or ""] * len(node.names), [alias.name for alias in node.names]
        else:
            continue
        for base, name in zip(bases, names, strict=True):
            found = base.removeprefix("outrider.")
            inner = f"{found}.{name}"
            if inner in MODULES:
                yield inner
            elif found in MODULES:
                yield found


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {module: set(imports_of(module)) - {module} for module in MODULES}


def test_rooms_import_one_way(graph: dict[str, set[str]]) -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if other.partition(".")[0] not in MAY_IMPORT[module.partition(".")[0]]
    ]
    assert upward == []


def test_no_imports_go_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)
