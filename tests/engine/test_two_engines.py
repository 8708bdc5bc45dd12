"""Two engines in one process, in the midst of each other's passes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import GREEDY, engine_config, prompts, run, tokens
from tiny_models import VOCAB

from outrider.engine.engine import Engine
from outrider.engine.models.attention import PagedAttention

PROMPTS = prompts((9, 21, 5), VOCAB)


def test_engines_of_one_process_keep_their_batches_apart(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One runs to its end while the other stands between the layers of a pass."""
    first = Engine(engine_config(tiny_model("gpt_neox")))
    second = Engine(engine_config(tiny_model("gpt2"), num_pages=64, page_size=8))
    truth = [list(map(tokens, run(each, PROMPTS, GREEDY))) for each in (first, second)]

    is_inside, may_go_on = threading.Event(), threading.Event()
    attend = PagedAttention.__call__
    stops = iter([False, True])  # at the second layer of the first pass

    def halting(*arguments: Any) -> Any:
        if threading.current_thread() is thread and next(stops, False):
            is_inside.set()
            assert may_go_on.wait(60)
        return attend(*arguments)

    monkeypatch.setattr(PagedAttention, "__call__", halting)
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.extend(map(tokens, run(first, PROMPTS, GREEDY))))
    thread.start()
    assert is_inside.wait(60)
    assert list(map(tokens, run(second, PROMPTS, GREEDY))) == truth[1]
    may_go_on.set()
    thread.join(60)
    assert got == truth[0]
