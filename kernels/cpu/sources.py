"""Tells whether compiled layers are of the C++ beside them. `setup.py` runs this file alone."""

from hashlib import sha256
from pathlib import Path


def digest_of_sources(folder: Path) -> str:
    """Of the C++ in a folder; empty if there is none, as where a wheel was installed."""
    files = [*sorted(folder.glob("*.cpp")), *sorted(folder.glob("*.h"))]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""
