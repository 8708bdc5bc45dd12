"""What the target writes to learn from."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_pairs import save_tiny_model_with_tokenizer
from transformers import AutoTokenizer

from outrider.distill.prompts import TASKS, frame, load_tokenizer
from outrider.distill.recipe import DistillError, Recipe
from outrider.distill.text import Conversation, Writer, load_shards, shard_path


def written(folder: Path, **given: Any) -> tuple[Any, list[Conversation]]:
    """The tokenizer of a tiny target, and a shard that it wrote by such a recipe."""
    target = save_tiny_model_with_tokenizer(folder / "target", max_position_embeddings=512)
    path = shard_path(folder, 0)
    Writer(Recipe(target=str(target), out="", **given), "cpu").write(0, path)
    return AutoTokenizer.from_pretrained(target), load_shards([path])


def test_tokens_that_end_a_turn_are_those_that_a_server_ends_at(tmp_path: Path) -> None:
    target = save_tiny_model_with_tokenizer(tmp_path / "target")
    tokenizer = load_tokenizer(str(target))
    own = tokenizer.eos_token_id
    for name, stated in (("config.json", 5), ("generation_config.json", [7, 6])):
        path = target / name
        given = json.loads(path.read_text()) if path.exists() else {}
        (target / "generation_config.json").unlink(missing_ok=True)
        path.write_text(json.dumps(given | {"eos_token_id": stated}))
        ids = stated if isinstance(stated, list) else [stated]
        assert frame(tokenizer, str(target)).eos_token_ids == tuple(sorted({own, *ids}))
    path.write_text("{")
    with pytest.raises(DistillError, match=r"generation_config\.json is damaged"):
        frame(tokenizer, str(target))


def test_given_turns_are_taken_whole_or_begun_and_the_answer_is_known(tmp_path: Path) -> None:
    given = "how do bees find their way home"
    (tmp_path / "turns.txt").write_text(given)
    tokenizer, conversations = written(
        tmp_path,
        prompts=str(tmp_path / "turns.txt"),
        conversations_per_shard=20,
        max_prompt_tokens=64,
        max_answer_tokens=8,
    )
    texts = []
    for conversation in conversations:
        prompt, answer = conversation.token_ids.tensor_split([conversation.num_prompt_tokens])
        text = tokenizer.decode(prompt, skip_special_tokens=True)
        assert text.endswith("<assistant>")
        assert 1 <= len(answer) <= 8
        texts.append(text.partition("<user>")[2].partition("<assistant>")[0].strip())
    whole, begun = texts[:7], texts[7:14]
    assert whole == [given] * 7
    assert given not in begun
    assert any(text[:3] == given[:3] for text in begun)


def test_some_users_ask_about_a_text_that_another_conversation_ended_with(tmp_path: Path) -> None:
    tokenizer, texts = written(
        tmp_path, conversations_per_shard=10, max_prompt_tokens=160, max_answer_tokens=32
    )
    conversations = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in texts]
    first, about = conversations[:7], conversations[7:]
    assert len(about) == 3
    for conversation in about:
        turn = conversation.partition("<user>")[2].partition("<assistant>")[0]
        task = next(task for task in TASKS if task in turn)
        pasted = turn.replace(task, "").strip()[:8]
        assert pasted
        assert any(pasted in other for other in first)
