"""Distils without the server's dependencies: `python -m outrider.distill recipe.json`."""

import argparse
import sys
from pathlib import Path

from outrider.engine.models.admission import UnsupportedModelError

from .recipe import DistillError, Recipe
from .run import distill


def _print_progress(stage: str, done: int, total: int) -> None:
    print(f"{stage}: {done}/{total or '?'}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m outrider.distill")
    parser.add_argument(
        "recipe",
        type=Path,
        help="a file with a JSON object: `target` and `out`, two directories, and any other field "
        "of distill/recipe.py; run it again to resume",
    )
    try:
        print(distill(Recipe.load(parser.parse_args().recipe), _print_progress))
    except (DistillError, UnsupportedModelError) as error:
        sys.exit(f"distill: {error}")
    except KeyboardInterrupt:
        print("distill: stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
