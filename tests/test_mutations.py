"""What `make mutate` would break is still there, and so are the tests that must notice."""

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_every_mutation_applies_to_the_code_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    mutate = import_module("mutate")
    stale = [
        mutation.name
        for mutation in mutate.mutations()
        if (ROOT / mutate.in_room(mutation.file)).read_text().count(mutation.old) != 1
        or not (ROOT / "tests" / mutate.in_room(mutation.tests.partition("::")[0])).is_file()
    ]
    assert stale == []
