"""Systems without Triton, and such as have nothing that the server needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from running_server import running_server
from tiny_pairs import save_tiny_model_with_tokenizer

ROOT = Path(__file__).parents[2]
# As on macOS: no file of that name on any path, for this process and all that it starts.
WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path = [WithoutTriton if finder is PathFinder else finder for finder in sys.meta_path]
"""
IMPORT_ALL = """
import importlib, pkgutil, sys
import outrider.kernels

for module in pkgutil.walk_packages(outrider.kernels.__path__, "outrider.kernels."):
    if "._layers" not in module.name:  # compiled, and no module of Python's
        importlib.import_module(module.name)
assert "triton" not in sys.modules
from outrider.kernels.no_triton import jit

def kernel(): ...

try:
    jit(do_not_specialize=["n"])(kernel)[(1,)](2)
except RuntimeError as error:
    print(error)
"""
# Of the packages that pyproject.toml names, a GPU machine may have no others than these.
COLLECT = """
import importlib.metadata, re, sys
from importlib.machinery import PathFinder
import pytest

HAS = {"torch", "triton", "transformers", "safetensors", "tokenizers", "jinja2", "psutil"}
HAS |= {"huggingface-hub", "typing-extensions", "numpy", "regex"}
named = [each for each in importlib.metadata.requires("outrider") if "extra" not in each]
missing = {re.match("[a-z-]+", each)[0] for each in named} - HAS
missing = {name.replace("-", "_") for name in missing} | {"zmq"}

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else super().find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
assert "fastapi" in missing
sys.exit(pytest.main(["--collect-only", "-q", "-p", "pytest_timeout", *sys.argv[1:]]))
"""
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 3}
EDITED = {"logit_bias": {"60": 2}, "bad_words": ["a"], "min_tokens": 4, "logprobs": 3, "echo": True}


@pytest.fixture
def no_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TRITON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("no_triton")
def test_kernels_can_be_imported_without_triton_and_say_so_when_they_run() -> None:
    command = [sys.executable, "-P", "-c", IMPORT_ALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the kernel kernel needs Triton, and a GPU\n"


@pytest.mark.deep
def test_gpu_tests_need_no_package_of_the_server() -> None:
    """`make gpu` sets nothing up, so its tests must be found without what only servers need."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    names = re.search(r"test_%.py,([^)]+)\)", makefile)
    assert names is not None
    files = [f"tests/engine/test_{name}.py" for name in names[1].split()]
    files += ["tests/kernels", "tests/engine/test_losslessness.py"]
    command = [sys.executable, "-P", "-c", COLLECT, *files]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.deep
@pytest.mark.usefixtures("no_triton")
def test_the_server_runs_without_triton(tmp_path: Path) -> None:
    for name, layers in (("target", 3), ("draft", 1)):
        save_tiny_model_with_tokenizer(tmp_path / name, num_hidden_layers=layers)
    pair = [str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "-k", "3"]
    settings = ["--set", "cache.num_pages=256", "--set", "target.dtype=float32"]
    with running_server(tmp_path / "log", [*pair, *settings]) as server:
        for fields in ({"temperature": 0}, SAMPLED, SAMPLED | EDITED):
            body = {"prompt": "one two", "max_tokens": 12, **fields}
            replies = [
                httpx.post(
                    f"{server.url}/v1/completions", json=body | {"speculation": each}, timeout=60
                )
                for each in ({"num_speculative_tokens": 3}, {"enabled": False})
            ]
            assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
            drafted, plain = (reply.json()["choices"][0]["text"] for reply in replies)
            assert drafted == plain
        assert server.metric("outrider_draft_tokens_total") > 0
        assert server.stop() == 0


def test_windows_is_shown_what_works() -> None:
    script = "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None\n"
    script += "from outrider.server.__main__ import main; main()"
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "WSL2" in done.stderr
    assert "Docker" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["Windows_NT", None])
def test_make_says_what_works_on_windows(name: str | None) -> None:
    command = ["make", "--dry-run", "help", *([f"OS={name}"] if name else [])]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ("WSL2" in done.stderr) is (name is not None)
    assert (done.returncode == 0) is (name is None)
