"""Recipes in files: what is read, and what is refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.distill.recipe import DistillError, Recipe


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read .*No such file"),
        ('{"target": ', "cannot read"),
        ("[]", "no JSON object"),
        ('{"target": "t"}', "lacks out"),
        ('{"target": "t", "out": "o", "sise": "2x64"}', "has sise; .* size"),
        ('{"target": "t", "out": "o", "kind": "eagle"}', "kind is 'eagle'; .*'draft', 'eagle3'"),
        ('{"target": "t", "out": "o", "budget": 10}', "budget is 10; it is of str"),
        ('{"target": "t", "out": "o", "passes": true}', "passes is True; it is of int"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str | None, words: str, path: Path) -> None:
    if text is not None:
        path.write_text(text)
    with pytest.raises(DistillError, match=words):
        Recipe.load(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_recipe_names_what_it_changes(path: Path, encoding: str) -> None:
    path.write_text('{"target": "t", "out": "o", "start": null, "learning_rate": 1}', encoding)
    assert Recipe.load(path) == Recipe(target="t", out="o", learning_rate=1)


def test_a_recipe_for_a_gpu_has_its_batch_sizes(path: Path) -> None:
    path.write_text('{"target": "t", "out": "o", "device": "cuda", "batch_tokens": 4096}')
    assert Recipe.load(path) == replace(Recipe.of("cuda", target="t", out="o"), batch_tokens=4096)
