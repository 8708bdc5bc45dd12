"""Runs an engine as on a GPU, with its kernels under Triton's interpreter, on a CPU.

    TRITON_INTERPRET=1 python interpreted_engine.py FOLDER

Exits with an error if compiling kernels, which launches none, leaves a trace; if a greedy answer is
not the target's own; or if a request takes a kernel that was not compiled.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from engines import GREEDY, engine_config, is_greedy, prompts, run, tokens
from fast_interpreter import speed_up
from heads import save_tiny_head
from kernel_variants import Variants
from ranked import Budgeted
from tiny_models import VOCAB, save_tiny_model

from outrider.engine import engine as loop
from outrider.engine import worker
from outrider.engine.api import SamplingParams, ThinkingBudget, ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models import batch_invariance, loading, proof
from outrider.engine.models.decoder import Decoder
from outrider.engine.proposers import draws
from outrider.kernels.compiling import EmptyIsZero

VARIANTS = Variants()
SAMPLED = SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, logprobs=3)
SHORT = replace(GREEDY, max_tokens=4)
ASKED = [
    replace(SHORT, prompt_logprobs=2, num_speculative_tokens=1),
    replace(SHORT, prompt_logprobs=1, logprobs=0),
    replace(SAMPLED, verification="block", top_k=20, num_speculative_tokens=0),
    replace(SAMPLED, verification="match", min_p=0.1, min_tokens=3),
    replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={3: 2.0}),
    replace(SAMPLED, bad_words=((4, 5), (6,)), allowed_token_ids=tuple(range(30))),
    replace(
        SAMPLED,
        thinking=ThinkingBudget(num_tokens=2, open_token_id=0, close_token_id=9, begun=True),
    ),
]


def main(folder: Path) -> None:
    speed_up()
    target = save_tiny_model(folder / "target", num_hidden_layers=4)
    draft = save_tiny_model(folder / "draft", num_hidden_layers=1)
    head = save_tiny_head(folder / "head", target, draft_vocab=50)
    routed = save_tiny_model(folder / "routed", "mixtral", num_local_experts=8)
    for path, config in (
        (target, engine_config(target, draft, k=2, max_num_seqs=3)),
        (target, engine_config(target, head, k=2, max_num_seqs=3, adaptive=True)),
        (routed, engine_config(routed, k=2, max_num_seqs=3, proposer="suffix")),
    ):
        check(Engine(config), path)


def check(engine: Engine, target: Path) -> None:
    assert type(engine.worker.pair.target) is Decoder, "it packed its weights for a CPU"
    state = engine.worker.slots.state
    before = [state.token_ids.clone(), state.num_tokens.clone()]
    VARIANTS.compiled.clear()
    VARIANTS.late.clear()
    engine.worker.compile(ignore_progress)
    assert all(map(torch.equal, before, [state.token_ids, state.num_tokens])), "slots were written"
    asked = prompts([12, 23], VOCAB)
    answers = run(engine, asked, replace(GREEDY, max_tokens=6))
    for prompt, answer in zip(asked, answers, strict=True):
        assert is_greedy(target, prompt, tokens(answer)), f"another answer to {prompt}"
    if engine.sequences.adaptive is not None:
        assert engine.stats().drafted_per_position[0] > 0, "no draft was chosen"
    run(engine, prompts([5, 9, 1, 8, 6, 7, 4], VOCAB), ASKED)
    assert not VARIANTS.late, "\n".join(["compiled late:", *sorted(VARIANTS.late)])


@torch.inference_mode()
def launch_nothing(warm_ups: Iterable[Callable[[], object]], device: torch.device) -> None:
    """What `compile_together` does, except that nothing is compiled either."""
    with VARIANTS.only_compiled(), EmptyIsZero():
        for warm_up in warm_ups:
            warm_up()


if __name__ == "__main__":
    with (
        VARIANTS.watched(),
        patch.object(worker, "compile_together", launch_nothing),
        patch.object(proof, "compile_together", launch_nothing),
        patch.object(batch_invariance, "compile_together", launch_nothing),
        patch.object(loading._Loader, "_packed", lambda _, decoder: decoder),
        patch.object(draws, "stops_early_on", lambda device: False),
        patch.object(loop, "AdaptiveSpeculation", Budgeted),
    ):
        main(Path(sys.argv[1]))
