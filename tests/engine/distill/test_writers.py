"""Writers that share the work."""

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny_pairs import save_tiny_model_with_tokenizer

from outrider.distill import writers
from outrider.distill.recipe import Recipe


def test_writers_start_together_once_a_first_one_has_started(tmp_path: Path) -> None:
    ledger = writers.Ledger(tmp_path, None, None, shared=False)
    together = threading.Barrier(2, timeout=10)
    started: list[str] = []

    def start_beside_another() -> None:
        with ledger.first_alone():
            together.wait()
            started.append("later")

    others = [threading.Thread(target=start_beside_another) for _ in range(2)]
    with ledger.first_alone():
        for other in others:
            other.start()
        others[0].join(timeout=0.05)
        started.append("first")
    for other in others:
        other.join()
    assert started == ["first", "later", "later"]


@pytest.mark.parametrize(("weights_gb", "expected"), [(1, 6), (4, 2), (16, 1)])
def test_a_large_target_shares_its_gpu_among_few_writers(
    weights_gb: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(weights_gb * 10**9)  # takes no room on the disk
    device = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert writers.num_writers(str(tmp_path), "cuda:0") == expected
    assert writers.num_writers(str(tmp_path), "cpu") == 1


@pytest.mark.slow  # three processes that load torch
@pytest.mark.parametrize(
    "sig",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.deep),  # only its writers can see it gone
        pytest.param(signal.SIGTERM, marks=pytest.mark.sweep),  # test_run.py has a run without any
    ],
)
def test_no_writer_outlives_its_run(sig: signal.Signals, tmp_path: Path) -> None:
    recipe = Recipe(
        target=str(save_tiny_model_with_tokenizer(tmp_path / "target")),
        out=str(tmp_path / "draft"),
        budget="1B",
        conversations_per_shard=2,
        max_prompt_tokens=16,
        max_answer_tokens=24,
        writers_per_device=2,
    )
    (tmp_path / "recipe.json").write_text(json.dumps(asdict(recipe)))
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "outrider.distill", str(tmp_path / "recipe.json")], stderr=log
        )
    until_s = time.monotonic() + 240  # three processes load torch, on what may be a busy machine
    try:
        while not list(tmp_path.glob(".draft.distilling/conversations-*")):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        processes = [*psutil.Process(run.pid).children(), psutil.Process(run.pid)]
        assert len(processes) >= 3
        run.send_signal(sig)
        _, left = psutil.wait_procs(processes, timeout=15)
    finally:
        for process in psutil.Process().children(recursive=True):
            process.kill()
    assert not left
    stopped = "the same command goes on" in (tmp_path / "log").read_text()
    assert stopped == (sig == signal.SIGTERM)
