"""Imports run one way, server → distill → engine → kernels; no modules or folders go in circles."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
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


def siblings(importer: str, imported: str) -> tuple[str, str]:
    """The two as children of the folder that holds both: each is a module, or all of a folder."""
    ours, theirs = importer.split("."), imported.split(".")
    same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return ".".join(ours[: same + 1]), ".".join(theirs[: same + 1])


def circle_of_folders(graph: dict[str, set[str]]) -> list[str]:
    """A circle among the modules and folders of one folder, if there is any."""
    by_sibling: dict[str, set[str]] = defaultdict(set)
    for module, others in graph.items():
        for other in others:
            if not (module.startswith(f"{other}.") or other.startswith(f"{module}.")):
                importer, imported = siblings(module, other)
                by_sibling[importer].add(imported)
    try:
        TopologicalSorter(by_sibling).prepare()
    except CycleError as error:
        return [str(each) for each in error.args[1]]
    return []


def test_no_folders_import_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert circle_of_folders(graph) == []


def test_circles_of_folders_are_seen_where_modules_have_none() -> None:
    graph = {"a.http.app": {"a.api.chat"}, "a.api.chat": {"a.http.errors"}, "a.http.errors": set()}
    assert set(circle_of_folders(graph)) == {"a.http", "a.api"}
    outer_from_inner = {"a.b.load": {"a.b.parts.mlp"}, "a.b.parts.mlp": {"a.b.weights"}}
    assert circle_of_folders(outer_from_inner) == []
