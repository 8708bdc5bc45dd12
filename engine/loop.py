"""The old home of `Engine`, kept for programs that import it from here."""

from .engine import Engine

__all__ = ["Engine"]
