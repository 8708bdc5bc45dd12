"""What the target writes to learn from."""

from pathlib import Path

from tiny_pairs import save_tiny_model_with_tokenizer
from transformers import AutoTokenizer

from outrider.distill.prompts import TASKS
from outrider.distill.recipe import Recipe
from outrider.distill.text import Writer, load_shards, shard_path


def test_given_turns_are_taken_whole_or_begun_and_the_answer_is_known(tmp_path: Path) -> None:
    target = save_tiny_model_with_tokenizer(tmp_path / "target", max_position_embeddings=512)
    given = "how do bees find their way home"
    (tmp_path / "turns.txt").write_text(given)
    recipe = Recipe(
        target=str(target),
        out="",
        prompts=str(tmp_path / "turns.txt"),
        conversations_per_shard=20,
        max_prompt_tokens=64,
        max_answer_tokens=8,
    )
    path = shard_path(tmp_path, 0)
    Writer(recipe, "cpu").write(0, path)
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = []
    for conversation in load_shards([path]):
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
    conversations = [
        tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in load_shards([path])
    ]
    first, about = conversations[:7], conversations[7:]
    assert len(about) == 3
    for conversation in about:
        turn = conversation.partition("<user>")[2].partition("<assistant>")[0]
        task = next(task for task in TASKS if task in turn)
        pasted = turn.replace(task, "").strip()[:8]
        assert pasted
        assert any(pasted in other for other in first)
