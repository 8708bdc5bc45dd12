"""Files with API keys."""

from pathlib import Path


def read_key_file(setting: str, path: Path | None) -> list[str]:
    """The keys in the file that a setting names, one a line, without comments; raises OSError."""
    if path is None:
        return []
    try:
        text = path.read_text("utf-8-sig")  # a byte order mark is no part of the first key
    except OSError as error:
        raise OSError(f"server.{setting}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OSError(f"server.{setting}: {path} is no UTF-8 text") from None
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise OSError(f"server.{setting}: {path} has no keys in it")
    return found
