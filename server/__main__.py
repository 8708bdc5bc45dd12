"""The `outrider` command; also `python -P -m outrider.server`."""

import sys

UNSUPPORTED = (
    "Outrider runs on Linux, and on macOS without a GPU. On Windows, run it in WSL2 "
    "(`wsl --install`) or in Docker: there it is Linux, GPUs included."
)


def main() -> None:
    if sys.platform == "win32":
        sys.exit(UNSUPPORTED)
    try:
        # Imported only now: much of what it needs does not exist on Windows.
        from .cli import app
    except KeyboardInterrupt:  # Ctrl-C while that takes its half a second
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
