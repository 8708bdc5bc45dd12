"""The page that leads through the code names what is there."""

import ast
import re
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reading-the-code.md").read_text()
MOST_CLASSES = 36  # that one must know to follow a step: more are too many to hold


def rows_of_walk() -> list[tuple[list[Path], list[str]]]:
    """The files and the classes of each row of the first table."""
    lines = PAGE.splitlines()
    first = lines.index("| read | classes | to see |") + 2
    rows = []
    for line in takewhile(lambda line: line.startswith("|"), lines[first:]):
        _, files, classes, *_ = line.split("|")
        rows.append((paths_in(files), re.findall(r"`(\w+)`", classes)))
    return rows


def paths_in(cell: str) -> list[Path]:
    """A name without a folder is in the folder of the path before it, or below that."""
    paths: list[Path] = []
    for name in re.findall(r"`([\w/]+\.py)`", cell):
        is_whole = name.startswith(("engine/", "kernels/", "server/"))
        paths.append(ROOT / name if is_whole else paths[-1].parent / name)
    return paths


def classes_of(path: Path) -> set[str]:
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    }


def test_each_row_names_classes_of_its_files() -> None:
    for files, classes in rows_of_walk():
        assert set(classes) <= set().union(*map(classes_of, files)), files


def test_a_step_is_followed_with_few_classes() -> None:
    named = [name for _, classes in rows_of_walk() for name in classes]
    assert len(set(named)) == len(named) <= MOST_CLASSES


def test_all_files_that_the_page_names_are_there() -> None:
    tables = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {path for line in tables for path in paths_in(line.split("|")[1])}
    whole = {ROOT / name for name in re.findall(r"`((?:engine|kernels|server)/[\w/]+\.py)`", PAGE)}
    assert [path for path in sorted(named | whole) if not path.is_file()] == []
