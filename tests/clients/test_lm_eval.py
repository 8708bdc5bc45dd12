"""lm-eval's `local-completions`, whose scores are to be those of the model itself."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from from_pretrained import transformers_arguments
from running_server import RunningServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.engine.api import ignore_progress
from outrider.server.config.pair_settings import DEFAULT_TARGET
from outrider.server.models.builtin import BUILTINS, obtain

pytestmark = [pytest.mark.model, pytest.mark.slow]

TASKS = Path(__file__).parent / "tasks"


@torch.inference_mode()
def own_scores() -> list[tuple[float, bool]]:
    """Log-likelihood of every choice of the task, and whether it is the greedy continuation."""
    path = obtain(BUILTINS[DEFAULT_TARGET], ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, **transformers_arguments(path)
    ).eval()
    scores = []
    for line in (TASKS / "capitals.jsonl").read_text().splitlines():
        question = json.loads(line)
        context = tokenizer(f"The capital of {question['country']} is")["input_ids"]
        for city in question["cities"]:
            ids = torch.tensor([context + tokenizer(f" {city}")["input_ids"]])
            logprobs = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
            chosen = ids[0, len(context) :]
            total = logprobs.gather(1, chosen[:, None]).sum().item()
            scores.append((total, bool((logprobs.argmax(-1) == chosen).all())))
    return scores


@pytest.mark.clients("lm-eval")
def test_lm_eval_scores_as_the_model_does(
    run: Callable[..., str],
    server: RunningServer,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = f"model={model},base_url={server.url}/v1/completions,num_concurrent=4"
    run(
        *("lm-eval", "lm_eval", "--model", "local-completions", "--model_args", arguments),
        *("--include_path", ".", "--tasks", "capitals,written"),
        *("--log_samples", "--output_path", tmp_path),
        cwd=TASKS,
    )
    (written,) = tmp_path.glob("*/samples_written_*.jsonl")
    answers = [json.loads(line)["filtered_resps"] for line in written.read_text().splitlines()]
    assert answers[:2] == [[" Paris"], [" Tokyo"]]

    (capitals,) = tmp_path.glob("*/samples_capitals_*.jsonl")
    seen = [
        (float(score), greedy == "True")
        for line in capitals.read_text().splitlines()
        for score, greedy in json.loads(line)["filtered_resps"]
    ]
    expected = own_scores()
    assert [greedy for _, greedy in seen] == [greedy for _, greedy in expected]
    # A CPU multiplies a GGUF file's codes with inputs of 16 bits; transformers has float32.
    assert [score for score, _ in seen] == pytest.approx([s for s, _ in expected], rel=1e-3)
