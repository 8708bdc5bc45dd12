"""A hook of mkdocs: files outside docs/ that belong to the site, and the links to them.

In the repository every link is relative to its file, so that it works there. The site has what is
outside docs/ under repository/, except for the README, which is its first page. Links are rewritten
as the files moved.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("*.md", "docker/README.md", "benchmarks/*.md", "benchmarks/*.png", "benchmarks/log/*.md")
FOLDER = "repository"
README, FIRST_PAGE = "README.md", "index.md"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)")


def on_files(files: Files, config: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = _site(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    folder = posixpath.dirname(place)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(_source(place)), link[1]))
        return posixpath.relpath(_site(target), folder or ".")

    return _LINK.sub(moved, markdown)


def _source(place: str) -> str:
    """Where a file of the site is in the repository."""
    if place == FIRST_PAGE:
        return README
    inside = place.removeprefix(f"{FOLDER}/")
    return f"docs/{place}" if inside == place else inside


def _site(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path == README:
        return FIRST_PAGE
    inside = path.removeprefix("docs/")
    return f"{FOLDER}/{path}" if inside == path else inside
