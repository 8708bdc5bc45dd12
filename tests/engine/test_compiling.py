"""Kernels are compiled before there are requests, on threads."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch
from engines import engine_config
from tiny_models import DEVICE

from outrider.engine.engine import Engine
from outrider.kernels.compiling import CompileMode, compile_together
from outrider.kernels.triton_or_none import tl, triton


@pytest.mark.parametrize("proposer", ["draft_model", "ngram"])
def test_warming_up_touches_no_sequence(tiny_model: Callable[..., Path], proposer: str) -> None:
    target = tiny_model("llama", seed=0)
    engine = Engine(engine_config(target, target, k=2, proposer=proposer, max_num_seqs=2))
    state = engine.worker.slots.state
    state.token_ids.random_(90)
    state.num_tokens.random_(9)
    before = [field[:2].clone() for field in (state.token_ids, state.num_tokens)]
    model = engine.worker.pair.target
    logits = torch.zeros(2 * 3, model.vocab_size, dtype=model.dtype, device=DEVICE)
    with torch.inference_mode():
        for warm_up in [
            *engine.worker.proposer.warm_ups(),
            *engine.worker.verifier.warm_ups(logits),
        ]:
            warm_up()
    assert torch.equal(before[0], state.token_ids[:2])
    assert torch.equal(before[1], state.num_tokens[:2])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_what_a_thread_raises_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_together([lambda: None, fail], DEVICE)


def test_a_kernel_that_threads_submit_at_the_same_moment_is_compiled_once() -> None:
    before_s = sys.getswitchinterval()
    compiled: list[int] = []
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as compilers, ThreadPoolExecutor(8) as threads:
            mode = CompileMode(compilers)
            for key in range(50):
                at_once = Barrier(8)

                def launch(key: int = key, at_once: Barrier = at_once) -> None:
                    at_once.wait()
                    mode.submit(key, partial(compiled.append, key), print)

                for done in [threads.submit(launch) for _ in range(8)]:
                    done.result()
    finally:
        sys.setswitchinterval(before_s)
    assert sorted(compiled) == list(range(50))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_a_kernel_that_many_threads_launch_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name)
    )
    x = torch.zeros(8, device=DEVICE)
    compile_together([lambda: _add_one[(1,)](x)] * 8, DEVICE)
    assert compiled == ["_add_one"]
    assert x[0] == 8


@triton.jit
def _add_one(x_ptr):  # type: ignore[no-untyped-def]
    tl.atomic_add(x_ptr, 1.0)
