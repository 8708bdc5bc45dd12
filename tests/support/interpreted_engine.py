"""Runs an engine as on a GPU, with its kernels under Triton's interpreter, on a CPU.

    TRITON_INTERPRET=1 python interpreted_engine.py FOLDER

Exits with an error if compiling kernels, which launches none, leaves a trace, or if a greedy answer
is not the target's own.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest.mock import patch

import torch
from engines import GREEDY, engine_config, is_greedy, prompts, run, tokens
from fast_interpreter import speed_up
from heads import save_tiny_head
from tiny_models import VOCAB, save_tiny_model
from triton.runtime.interpreter import InterpretedFunction

from outrider.engine import worker
from outrider.engine.api import ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models import batch_invariance, loading, proof
from outrider.engine.models.decoder import Decoder
from outrider.kernels.compiling import EmptyIsZero


def main(folder: Path) -> None:
    speed_up()
    target = save_tiny_model(folder / "target", num_hidden_layers=4)
    draft = save_tiny_model(folder / "draft", num_hidden_layers=1)
    head = save_tiny_head(folder / "head", target, draft_vocab=50)
    for config in (
        engine_config(target, draft, k=2, max_num_seqs=2),
        engine_config(target, head, k=2, max_num_seqs=2),
        engine_config(target, k=2, max_num_seqs=2, proposer="suffix"),
    ):
        check(Engine(config), target)


def check(engine: Engine, target: Path) -> None:
    assert type(engine.worker.pair.target) is Decoder, "it packed its weights for a CPU"
    state = engine.worker.slots.state
    before = [state.token_ids.clone(), state.num_tokens.clone()]
    engine.worker.compile(ignore_progress)
    assert all(map(torch.equal, before, [state.token_ids, state.num_tokens])), "slots were written"
    asked = prompts([5, 9, 23], VOCAB)
    answers = run(engine, asked, dataclasses.replace(GREEDY, max_tokens=6))
    for prompt, answer in zip(asked, answers, strict=True):
        assert is_greedy(target, prompt, tokens(answer)), f"another answer to {prompt}"


@torch.inference_mode()
def launch_nothing(warm_ups: Iterable[Callable[[], object]], device: torch.device) -> None:
    """What `compile_together` does, except that nothing is compiled either."""
    with patch.object(InterpretedFunction, "run", lambda *_, **__: None), EmptyIsZero():
        for warm_up in warm_ups:
            warm_up()


if __name__ == "__main__":
    with (
        patch.object(worker, "compile_together", launch_nothing),
        patch.object(proof, "compile_together", launch_nothing),
        patch.object(batch_invariance, "compile_together", launch_nothing),
        patch.object(loading._Loader, "_packed", lambda _, decoder: decoder),
    ):
        main(Path(sys.argv[1]))
