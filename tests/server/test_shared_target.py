"""A target that two processes share, behind a real socket: what a client sees if one is lost."""

import json
import time
from pathlib import Path

import psutil
import pytest
from running_server import RunningServer, events_of, running_server
from tiny_pairs import save_tiny_model_with_tokenizer

BODY = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 4000, "stream": True}


def follower_of(server: RunningServer) -> psutil.Process:
    """The process of the second rank."""
    (found,) = [
        child
        for child in server.engine.children()
        if "outrider.engine.ranks.follower" in child.cmdline()
    ]
    return found


@pytest.mark.slow
def test_a_killed_rank_ends_its_streams_and_comes_back(tmp_path: Path) -> None:
    target = save_tiny_model_with_tokenizer(tmp_path / "target", max_position_embeddings=5000)
    settings = [f"target.model={target}", "target.tensor_parallel=2", "target.device=cpu"]
    settings += ["speculation.proposer=ngram", "cache.num_pages=512"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    with running_server(tmp_path / "log", arguments) as server:
        assert server.http.get("/info").json()["engine"]["tensor_parallel"] == 2
        before = server.http.post("/v1/completions", json=BODY).json()["choices"]
        own = psutil.Process(server.process.pid)
        processes, follower = own.children(recursive=True), follower_of(server)
        with server.http.stream("POST", "/v1/completions", json=LONG) as response:
            events = events_of(response)
            next(events)
            follower.kill()
            *_, last = events
        error = json.loads(last)["error"]
        assert error["code"] == "engine_unavailable"
        assert "rank 1 of the target: killed by signal 9" in error["message"]
        assert server.http.get("/ready").json()["status"] == "restarting"
        deadline_s = time.monotonic() + 60
        while server.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert follower_of(server).pid != follower.pid
        assert server.http.post("/v1/completions", json=BODY).json()["choices"] == before
        processes += own.children(recursive=True)
        assert server.stop() == 0
    assert not [process for process in processes if process.is_running()]
