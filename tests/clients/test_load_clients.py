"""Programs that measure servers: what they send is served, and what they show is filled in."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from running_server import RunningServer

from outrider.engine.api import ignore_progress
from outrider.server.config.pair_settings import DEFAULT_TARGET
from outrider.server.models.builtin import BUILTINS, obtain

pytestmark = [pytest.mark.model, pytest.mark.slow]

Run = Callable[..., str]


@pytest.mark.clients("aiperf")
def test_aiperf_fills_its_table_of_speculation(
    run: Run, server: RunningServer, model: str, tmp_path: Path
) -> None:
    said = run(
        *("aiperf", "aiperf", "profile", "--model", model, "--url", server.url),
        *("--endpoint-type", "chat", "--streaming", "--request-count", "4", "--concurrency", "2"),
        *("--tokenizer", obtain(BUILTINS[DEFAULT_TARGET], ignore_progress)),
        *("--isl", "32", "--osl", "16", "--ui", "none", "--artifact-dir", tmp_path),
        *("--extra-inputs", '{"speculation": {"metrics": true}, "ignore_eos": true}'),
    )
    assert "LLM Metrics: Spec Decode" in said
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 4
    assert report["total_spec_decode_steps"]["avg"] > 0
    assert report["total_draft_tokens"]["avg"] >= report["total_accepted_draft_tokens"]["avg"]
    assert report["spec_decode_overall_draft_acceptance_rate"]["avg"] == pytest.approx(
        100 * report["total_accepted_draft_tokens"]["avg"] / report["total_draft_tokens"]["avg"]
    )


@pytest.mark.clients("locust")
def test_locust_sees_no_failure(run: Run, server: RunningServer, tmp_path: Path) -> None:
    run(
        *("locust", "locust", "--headless", "--only-summary", "--host", server.url),
        *("--locustfile", Path(__file__).parent / "programs/locustfile.py"),
        *("--users", "8", "--spawn-rate", "8", "--run-time", "10s", "--stop-timeout", "60s"),
        *("--json-file", tmp_path / "s"),
    )
    (entry,) = json.loads((tmp_path / "s.json").read_text())
    assert entry["num_requests"] >= 8
    assert entry["num_failures"] == 0
