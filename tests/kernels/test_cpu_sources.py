"""Compiled layers that are not of the C++ beside them are left out."""

import ctypes
import logging
from pathlib import Path

import pytest

from outrider.kernels.cpu import layers
from outrider.kernels.cpu.sources import digest_of_sources

FOLDER = Path(layers.__file__).parent
COMPILED = sorted(FOLDER.glob("*.so"))
needs_compiled = pytest.mark.skipif(not COMPILED, reason="no layers were compiled here")


@needs_compiled
def test_what_was_compiled_here_is_of_these_sources() -> None:
    """Else tests of compiled layers would be left out without a word: install Outrider again."""
    for file in COMPILED:
        assert layers._sources_of(ctypes.CDLL(str(file))) == digest_of_sources(FOLDER), file


@needs_compiled
def test_layers_of_other_sources_are_left_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert layers.builds()
    assert caplog.messages == []
    monkeypatch.setattr(layers, "digest_of_sources", lambda folder: "of others")
    with caplog.at_level(logging.WARNING):
        assert layers.builds() == {}
    (warning,) = caplog.messages
    assert "compiled from other C++ than is there" in warning
    assert "make serve" in warning


@needs_compiled
def test_where_no_sources_are_there_is_nothing_to_compare(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As where a wheel was installed."""
    expected = list(layers.builds())
    monkeypatch.setattr(layers, "digest_of_sources", lambda _: digest_of_sources(tmp_path))
    assert list(layers.builds()) == expected
    assert caplog.messages == []


def test_layers_of_an_older_version_do_not_say_of_which_sources_they_are() -> None:
    assert layers._sources_of(ctypes.CDLL(None)) == ""


def test_any_change_of_the_sources_changes_the_digest(tmp_path: Path) -> None:
    def digest(**texts: str) -> str:
        for name, text in texts.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        return digest_of_sources(tmp_path)

    changes = [{}, {"a_cpp": "1"}, {"b_h": "2"}, {"a_cpp": "3"}, {"b_h": "4"}, {"b_h": ""}]
    digests = [digest(**change) for change in changes]
    assert digests[0] == ""
    assert len(set(digests)) == len(changes)
    assert digest(c_py="5") == digests[-1]
