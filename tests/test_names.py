"""One name, one meaning: classes and types of different modules have names of their own."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OF_A_TYPE = re.compile(r"[A-Z]\w*[a-z]\w+")  # neither CONSTANTS, nor type variables such as Ts


def types_of(module: Path) -> Iterator[str]:
    """The classes and types that a module defines for others."""
    for node in ast.parse(module.read_text()).body:
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
            ) if _OF_A_TYPE.fullmatch(name):
                yield name


def test_no_two_modules_define_types_of_one_name() -> None:
    modules_of = defaultdict(list)
    for room in ("server", "distill", "engine", "kernels"):
        for module in sorted((ROOT / room).rglob("*.py")):
            for name in types_of(module):
                modules_of[name].append(str(module.relative_to(ROOT)))
    assert {name: modules for name, modules in modules_of.items() if len(modules) > 1} == {}
