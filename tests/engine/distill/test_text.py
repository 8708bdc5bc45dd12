"""What the target writes to learn from."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_pairs import save_tiny_model_with_tokenizer
from transformers import AutoTokenizer

from outrider.distill.prompts import RAW_OPENINGS, TASKS, frame, load_tokenizer, words
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
        raw_share=0.0,
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
        tmp_path,
        raw_share=0.0,
        conversations_per_shard=10,
        max_prompt_tokens=160,
        max_answer_tokens=32,
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


def test_a_share_of_the_texts_goes_on_from_a_few_words_without_the_template(tmp_path: Path) -> None:
    tokenizer, texts = written(
        tmp_path,
        raw_share=0.5,
        conversations_per_shard=40,
        max_prompt_tokens=48,
        max_answer_tokens=8,
    )
    openings = {
        opening.format(word.capitalize() if opening.startswith("{}") else word)
        for kind in RAW_OPENINGS
        for opening in kind
        for word in words(tokenizer)
    }
    prompts = []
    for text in texts:
        prompt, answer = text.token_ids.tensor_split([text.num_prompt_tokens])
        assert 1 <= len(answer) <= 8
        prompts.append(tokenizer.decode(prompt))
    chats = [prompt for prompt in prompts if "<assistant>" in prompt]
    raw = [prompt for prompt in prompts if "<assistant>" not in prompt]
    assert len(chats) == len(raw) == 20
    assert prompts[14:34] == raw
    for prompt in raw:
        assert any(prompt.startswith(opening) for opening in openings)
        assert prompt not in openings  # the target has continued it
    assert len(set(raw)) == len(raw)


def test_words_are_those_that_the_vocabulary_has_whole() -> None:
    class Vocabulary:
        def get_vocab(self) -> dict[str, int]:
            names = [
                "\u0120Paris",
                "\u0120helmet",
                "ship",
                "\u2581river",
                "\u0120of",
                "",
                "\u0120caf\u00e9",
            ]
            return {name: id_ for id_, name in enumerate(names)}

    assert words(Vocabulary()) == ["helmet", "river"]
