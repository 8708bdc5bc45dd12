"""What we use of other packages though they do not promise it is there, or its lack is named."""

import importlib.metadata

import pytest

from outrider.kernels.reached import check_reached


class Protocol:
    def __init__(self) -> None:
        self.held = 1

    def kept(self) -> None: ...


def test_what_is_there_passes() -> None:
    check_reached("uvicorn", Protocol, "kept", "held")
    check_reached("uvicorn", importlib.metadata, "version")


def test_what_is_missing_is_named_with_the_versions_that_have_it() -> None:
    with pytest.raises(ImportError) as raised:
        check_reached("uvicorn", Protocol, "kept", "dropped", "lost")
    version = importlib.metadata.version("uvicorn")
    assert str(raised.value).startswith(
        f"outrider uses Protocol.dropped, Protocol.lost, which uvicorn {version} does not have; "
        'install a version that has been tested: pip install "uvicorn'
    )
    assert "<1" in str(raised.value)


def test_a_package_that_ours_does_not_name_is_named_without_versions() -> None:
    with pytest.raises(ImportError, match=r'pip install "no-such-package"$'):
        check_reached("no-such-package", Protocol, "dropped")
