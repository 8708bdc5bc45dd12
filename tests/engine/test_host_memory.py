"""What memory is left inside a container, by files as the kernel shows them, and what it holds."""

import importlib
import re
import sys
from pathlib import Path

import psutil
import pytest
import torch
from engines import engine_config
from tiny_models import Tiny

from outrider.engine import host_memory, seats
from outrider.engine.config import ConfigError
from outrider.engine.engine import Engine

MB = 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group inside another one; this process is in the inner one."""
    inner = tmp_path / "pod/app"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/pod/app\n")
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN", tmp_path / "own")
    return tmp_path


def limit(group: Path, limit_mb: int | None, used_mb: int, unused_files_mb: int) -> None:
    most = "max" if limit_mb is None else str(limit_mb * MB)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used_mb * MB}\n")
    stat = f"anon 1\ninactive_file {unused_files_mb * MB}\n"
    (group / "memory.stat").write_text(stat)


@pytest.mark.parametrize(
    ("outer", "inner", "left_mb"),
    [
        ((None, 90, 0), (64, 24, 4), 44),
        ((48, 40, 8), (64, 24, 4), 16),
        ((48, 60, 0), (None, 24, 4), 0),
    ],
)
def test_the_tightest_limit_counts(
    groups: Path,
    outer: tuple[int | None, int, int],
    inner: tuple[int | None, int, int],
    left_mb: int,
) -> None:
    limit(groups / "pod", *outer)
    limit(groups / "pod/app", *inner)
    assert host_memory.available_bytes() == left_mb * MB


@pytest.mark.parametrize("own", [None, "9:name=systemd:/\n8:pids:/\n", "0::/\n"])
def test_without_limits_the_machine_counts(groups: Path, own: str | None) -> None:
    (groups / "own").unlink() if own is None else (groups / "own").write_text(own)
    left = host_memory.available_bytes()
    assert left == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it in a file")
def test_linux_needs_no_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)  # as if it were not installed
    assert importlib.reload(host_memory).available_bytes() > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the cache is not in host memory")
def test_more_pages_than_memory_are_refused_with_the_most(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model("llama", seed=0)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * MB)
    says = r"cache.num_pages is 6000, which .* 0\.0 GiB, .* room for (\d+): set it to that at most"
    with pytest.raises(ConfigError, match=says) as refused:
        Engine(engine_config(target, num_pages=6000))
    most = int(re.search(says, str(refused.value))[1])  # type: ignore[index]
    info = Engine(engine_config(target, num_pages=most)).info
    assert 2.9 * MB < info.cache_bytes <= 3 * MB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there sequences keep nothing in host memory")
@pytest.mark.parametrize("architecture", ["llama", "nemotron_h"])
def test_more_sequences_than_memory_are_refused_with_the_most(
    architecture: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model(architecture, seed=0)
    monkeypatch.setattr(seats, "available_bytes", lambda: 3 * MB)
    says = r"scheduler.max_num_seqs is 9000, .* room for what (\d+) sequences keep"
    with pytest.raises(ConfigError, match=says) as refused:
        Engine(engine_config(target, proposer="suffix", max_num_seqs=9000))
    most = int(re.search(says, str(refused.value))[1])  # type: ignore[index]
    engine = Engine(engine_config(target, proposer="suffix", max_num_seqs=most))
    slots = engine.worker.slots
    tables = (slots.token_ids, slots.block_tables)
    num_bytes = sum(each.numel() * each.element_size() for each in tables)
    assert 2.8 * MB < num_bytes + engine.worker.state_bytes < 3.1 * MB
