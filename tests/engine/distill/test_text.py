"""What the target writes to learn from."""

from pathlib import Path

from tiny_pairs import save_tiny_model_with_tokenizer
from transformers import AutoTokenizer

from outrider.distill.prompts import TASKS
from outrider.distill.recipe import Recipe
from outrider.distill.text import Writer, load_shards, shard_path


def test_some_users_ask_about_a_text_that_another_conversation_ended_with(tmp_path: Path) -> None:
    target = save_tiny_model_with_tokenizer(tmp_path / "target", max_position_embeddings=512)
    recipe = Recipe(
        target=str(target),
        out="",
        conversations_per_shard=10,
        max_prompt_tokens=160,
        max_answer_tokens=32,
    )
    path = shard_path(tmp_path, 0)
    Writer(recipe, "cpu").write(0, path)
    tokenizer = AutoTokenizer.from_pretrained(target)
    conversations = [tokenizer.decode(ids, skip_special_tokens=True) for ids in load_shards([path])]
    first, about = conversations[:7], conversations[7:]
    assert len(about) == 3
    for conversation in about:
        turn = conversation.partition("<user>")[2].partition("<assistant>")[0]
        task = next(task for task in TASKS if task in turn)
        pasted = turn.replace(task, "").strip()[:8]
        assert pasted
        assert any(pasted in other for other in first)
