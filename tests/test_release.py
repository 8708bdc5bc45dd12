"""One version in all places, and notes of it."""

import shutil
import sys
import tarfile
from pathlib import Path
from subprocess import PIPE, run

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import release  # noqa: E402

CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-28\n\nFast.\n\n## [0.1.0]\n\nOld.\n"
)


def test_the_chart_has_the_projects_version() -> None:
    chart = (ROOT / "deploy/helm/Chart.yaml").read_text()
    assert release.chart_of(release.project_version(), chart) == chart
    assert release.chart_of("9.8.7", chart).count("9.8.7") == 2


def test_notes_are_those_of_the_version() -> None:
    assert release.notes_of("0.2.0", CHANGELOG) == "Fast."
    assert release.notes_of("0.1.0", CHANGELOG) == "Old."
    with pytest.raises(ValueError, match=r"no section \[0.3.0\]"):
        release.notes_of("0.3.0", CHANGELOG)
    with pytest.raises(ValueError, match="Unreleased"):
        release.notes_of("Unreleased", CHANGELOG)


def test_no_release_is_built_without_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "project_version", lambda: "9.8.7")
    monkeypatch.setattr(release, "build", lambda folder: pytest.fail("it was built"))
    with pytest.raises(SystemExit, match=r"no release yet: CHANGELOG.md has no section \[9.8.7\]"):
        release.main()


@pytest.mark.deep
def test_a_source_archive_can_be_built_from(tmp_path: Path) -> None:
    """It holds the rooms' Python in src/ alone, and what is compiled at the top alone."""
    tree = tmp_path / "tree"
    rooms = ("configs", "distill", "engine", "kernels", "server", "src", "docs")
    for name in rooms:
        ignored = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, tree)
    program = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    run([sys.executable, "-P", "-c", program], cwd=tree, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    shown = run(
        [sys.executable, "-P", "setup.py", "--version"], cwd=source, check=True, stdout=PIPE
    )
    assert shown.stdout.decode().split()[-1] == release.project_version()


def test_images_are_given_the_version() -> None:
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    assert "org.opencontainers.image.version=$VERSION" in dockerfile
    left = release.LEFT.format(version="9.8.7", archive="", wheel="", dated="")
    assert left.count("--build-arg VERSION=9.8.7") == 1
