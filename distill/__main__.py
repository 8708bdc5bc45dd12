"""Distils with only torch and transformers installed: `python -m outrider.distill recipe.json`."""

import sys
from pathlib import Path

from .recipe import DistillError, Recipe
from .run import distill


def _print_progress(stage: str, done: int, total: int) -> None:
    print(f"{stage}: {done}/{total or '?'}", flush=True)


if __name__ == "__main__":
    try:
        print(distill(Recipe.load(Path(sys.argv[1])), _print_progress))
    except DistillError as error:
        sys.exit(f"distill: {error}")
    except KeyboardInterrupt:
        print("distill: stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
