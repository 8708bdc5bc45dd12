"""What we use of other packages though they do not promise it: checked at import."""

import importlib.metadata
import re
from typing import Any


def check_reached(package: str, owner: Any, *names: str) -> None:
    """Raises ImportError, which names the version at hand and those that are allowed, if `owner`
    lacks one of these names. A class also has those that its `__init__` gives to its objects.
    """
    given = getattr(getattr(owner, "__init__", None), "__code__", None)
    own = given.co_names if isinstance(owner, type) and given is not None else ()
    missing = [name for name in names if not hasattr(owner, name) and name not in own]
    if missing:
        places = ", ".join(f"{owner.__name__}.{name}" for name in missing)
        raise ImportError(
            f"outrider uses {places}, which {package} {_version(package)} does not have; "
            f'install a version that has been tested: pip install "{package}{_allowed(package)}"'
        )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "as it is installed"


def _allowed(package: str) -> str:
    """The versions that our own metadata allow; nothing where we are not installed."""
    try:
        required = importlib.metadata.requires("outrider") or ()
    except importlib.metadata.PackageNotFoundError:
        return ""
    name = re.compile(rf"{re.escape(package)}([^\w;-][^;]*)")
    found = (match for match in map(name.match, required) if match)
    return next((match[1].strip() for match in found), "")
