"""What `make mutate` would break is still there, and so are the tests that must notice."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("mutate")


def test_every_mutation_applies_to_the_code_as_it_is(mutate: Any) -> None:
    stale = [
        mutation.name
        for mutation in mutate.mutations()
        if (ROOT / mutate.in_room(mutation.file)).read_text().count(mutation.old) != 1
        or not (ROOT / "tests" / mutate.in_room(mutation.tests.partition("::")[0])).is_file()
    ]
    assert stale == []


def test_mutated_code_is_still_code(mutate: Any) -> None:
    """Any test would notice code that cannot be imported."""
    broken = []
    for mutation in mutate.mutations():
        text = (ROOT / mutate.in_room(mutation.file)).read_text()
        try:
            ast.parse(text.replace(mutation.old, mutation.new))
        except SyntaxError:
            broken += [mutation.name] * mutation.file.endswith(".py")
    assert broken == []
