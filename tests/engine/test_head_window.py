"""The layers of a head can be made to attend to the last tokens alone."""

from dataclasses import replace
from pathlib import Path

import pytest
from block_heads import save_tiny_block_head
from engines import GREEDY, engine_config, is_greedy, lagging, prompts, run, tokens
from heads import save_tiny_head
from tiny_models import VOCAB

from outrider.engine.config import ConfigError, EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.models.heads.config import HeadError

WINDOW = 8


def windowed(config: EngineConfig) -> EngineConfig:
    assert config.draft is not None
    return replace(config, draft=replace(config.draft, attention_window=WINDOW))


def test_a_head_drafts_from_the_last_tokens_alone(target: Path, tmp_path: Path) -> None:
    head = save_tiny_head(tmp_path, target, boundaries=(0, 1, 2))
    config = engine_config(target, head, k=3, max_num_seqs=2, max_num_batched_tokens=16)
    engine = lagging(windowed(config))
    groups = engine.worker.pair.groups
    assert [group.window for group in groups] == [None, WINDOW]
    assert [len(group.layers) for group in groups] == [2, 1]
    for prompt in prompts([50, 7], VOCAB):
        answer = tokens(run(engine, [prompt], GREEDY)[0])
        assert is_greedy(target, prompt, answer)
    assert sum(engine.stats().accepted_per_position) > 0
    assert engine.info.saved_by_windows_bytes > 0


def test_a_draft_model_and_a_block_head_have_no_such_window(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"draft.attention_window is 8, but .* leave it out"):
        Engine(windowed(engine_config(target, draft)))
    head = save_tiny_block_head(tmp_path, target, boundaries=(0, 1, 2))
    with pytest.raises(HeadError, match=r"draft.attention_window is 8, but .* leave it out"):
        Engine(windowed(engine_config(target, head, k=3)))
