"""Writers that share the work."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.distill import writers


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
