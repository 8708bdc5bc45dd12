"""What the tokens of a draft are to its target."""

from collections.abc import Callable

import pytest
from tokenizers_for_tests import byte_fallback_wrapper, byte_level_wrapper, unigram_wrapper
from transformers import PreTrainedTokenizerFast

from outrider.server.models.store import ModelError
from outrider.server.models.vocabulary import (
    SAMPLE,
    Vocabulary,
    draft_vocabulary,
    shared_vocab_size,
)


def vocabulary(
    tokens: list[str], width: int | None = None, special: int = 0, **more: int
) -> Vocabulary:
    """Tokens by id, the last `special` of them special; `more` are ids by role."""
    ids = {token: i for i, token in enumerate(tokens)}
    specials = frozenset(range(len(tokens) - special, len(tokens)))
    return Vocabulary(ids, specials, width or len(tokens), more, specials)


TARGET = vocabulary(["a", "b", "c", "<end>"], special=1)


def test_equal_vocabularies_share_their_size() -> None:
    assert shared_vocab_size(TARGET, vocabulary(["a", "b", "c", "<end>"])) == 4


@pytest.mark.parametrize(("target_width", "draft_width"), [(8, 4), (4, 8), (64, 128)])
def test_padded_rows_are_tolerated_and_do_not_count(target_width: int, draft_width: int) -> None:
    tokens = ["a", "b", "c", "<end>"]
    target, draft = vocabulary(tokens, target_width), vocabulary(tokens, draft_width)
    assert shared_vocab_size(target, draft) == 4


def test_a_gap_in_the_ids_counts_up_to_the_last_token() -> None:
    gapped = Vocabulary({"a": 0, "<end>": 9}, frozenset({9}), 16)
    assert shared_vocab_size(gapped, gapped) == 10


@pytest.mark.parametrize(
    "draft",
    [
        vocabulary(["a", "c", "b", "<end>"], special=1),
        vocabulary(["a", "b", "c", "<eos>"], special=1),
        vocabulary(["a", "b", "c"], width=8),
        vocabulary(["a", "b", "c", "<end>"], width=2),
    ],
    ids=["other order", "other special token", "a token is padding", "a token has no row"],
)
def test_another_token_by_an_id_of_the_target_makes_another_vocabulary(draft: Vocabulary) -> None:
    assert shared_vocab_size(TARGET, draft) is None


def test_what_the_draft_has_beyond_the_target_does_not_matter() -> None:
    assert shared_vocab_size(TARGET, vocabulary(["a", "b", "c", "<end>", "<more>"])) == 4


def test_special_tokens_without_a_row_in_the_draft_are_left_out() -> None:
    tokens = ["a", "b", "c", "<end>", "<image>"]
    target, draft = vocabulary(tokens, width=8, special=1), vocabulary(tokens, width=4, special=1)
    assert shared_vocab_size(target, draft) == 4


# ---- of another tokenizer


Make = Callable[[], PreTrainedTokenizerFast]


def text_of(vocabulary: Vocabulary, token: str) -> bytes:
    return vocabulary.texts[vocabulary.token_ids[token]][0]


def test_tokens_of_every_kind_of_tokenizer_have_the_bytes_that_they_stand_for() -> None:
    byte_level, fallback, unigram = (
        Vocabulary.of(wrapper, len(wrapper))
        for wrapper in (byte_level_wrapper(), byte_fallback_wrapper(), unigram_wrapper())
    )
    assert text_of(byte_level, "Ġover") == b" over"
    assert text_of(byte_level, "Ċ") == b"\n"
    assert text_of(byte_level, "ÿ") == b"\xff"
    assert text_of(fallback, "▁Hello") == b" Hello"
    assert text_of(fallback, "<0xFF>") == b"\xff"
    assert text_of(fallback, "ñ") == "ñ".encode()
    assert text_of(unigram, "▁") == b" "
    assert text_of(unigram, "你") == "你".encode()
    for each, ends in ((byte_level, "<eos>"), (fallback, "<eos>"), (unigram, "</s>")):
        assert each.texts[each.roles["eos_token"]] == (ends.encode(), True)
    everything = b"".join(byte_level.texts[i][0] for i in byte_level_wrapper()(SAMPLE).input_ids)
    assert everything == SAMPLE.encode()


@pytest.mark.parametrize("draft", [byte_fallback_wrapper, unigram_wrapper, byte_level_wrapper])
@pytest.mark.parametrize("target", [byte_level_wrapper, byte_fallback_wrapper, unigram_wrapper])
def test_common_tokens_have_one_text_and_others_are_read_as_the_longest_end(
    target: Make, draft: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.server.models.vocabulary.LEAST_SHARE", 0)
    wrapper = target()
    other = wrapper if draft is target else draft()  # training may order pieces otherwise
    ours, theirs = (Vocabulary.of(each, len(each)) for each in (wrapper, other))
    found = draft_vocabulary(ours, theirs, wrapper(SAMPLE).input_ids)
    drawn = [i for i in found.target_ids if i >= 0]
    assert len(set(drawn)) == len(drawn) > 20
    for own, i in enumerate(found.target_ids):
        if i >= 0 and i not in ours.special_ids:
            assert theirs.texts[own] == ours.texts[i]
            assert found.read_as[i] == own
    plain = {text for text, is_special in theirs.texts.values() if not is_special}
    for i, (text, is_special) in ours.texts.items():
        ends = [text[start:] for start in range(len(text)) if text[start:] in plain]
        if not is_special and ends:
            assert theirs.texts[found.read_as[i]][0] == ends[0]
    assert all(0 <= i < theirs.width for i in found.read_as)
    assert len(found.read_as) == ours.size
    assert len(found.target_ids) == theirs.width
    if target is draft:
        assert found.target_ids == found.read_as == tuple(range(ours.size))


def test_special_tokens_are_found_by_their_text_and_then_by_their_role() -> None:
    target = vocabulary(["a", "\n", "b", "<im_end>", "<user>", "<pad>"], special=3, eos_token=3)
    draft = vocabulary(["b", "\n", "<pad>", "<eot>", "<s>"], special=3, eos_token=3, bos_token=4)
    found = draft_vocabulary(target, draft, [1, 2])
    assert found.target_ids == (2, 1, 5, 3, -1)
    assert found.read_as == (1, 1, 0, 3, 1, 2)  # what has no counterpart is read as a line break


def test_a_special_token_is_none_of_the_text_that_is_written_alike() -> None:
    target, draft = vocabulary(["a", "<s>"], special=1), vocabulary(["<s>", "a"])
    assert draft_vocabulary(target, draft, [0]).target_ids == (-1, 0)


def test_a_letter_is_drafted_rather_than_the_byte_that_stands_for_it_too() -> None:
    both = vocabulary(["<0x61>", "<0x0A>", "a"])
    one = vocabulary(["a", "\n", "<0x0A>"])
    assert draft_vocabulary(one, both, [0]).target_ids == (-1, 1, 0)
    assert draft_vocabulary(both, one, [2]).target_ids == (2, 1, -1)
    assert draft_vocabulary(both, one, [2]).read_as == (0, 1, 0)


def test_a_few_more_tokens_leave_all_others_what_they_are() -> None:
    tokens = ["<0x61>", "a", "b", "c"]
    target, draft = vocabulary([*tokens, "<think>"]), vocabulary([*tokens, "<tool>", "<image>"])
    found = draft_vocabulary(target, draft, [1, 2, 3, 3])
    assert found.target_ids == (0, 1, 2, 3, -1, -1)
    assert found.read_as[:4] == (0, 1, 2, 3)


def test_the_share_counts_how_often_tokens_occur() -> None:
    target, draft = vocabulary(["a", "b", "c"]), vocabulary(["c", "a"])
    assert draft_vocabulary(target, draft, [0, 0, 2, 1]).share_of_text == 0.75
    with pytest.raises(
        ModelError, match=r"with 40% of .* \(it lacks 'b' and others\); below 50% drafts cannot pay"
    ):
        draft_vocabulary(target, draft, [0, 1, 1, 1, 2])


def test_a_tokenizer_of_another_model_than_the_drafts_is_refused() -> None:
    target = vocabulary(["a", "b", "c"])
    with pytest.raises(ModelError, match="its tokenizer has 3 tokens, but its model 2: one of the"):
        draft_vocabulary(target, vocabulary(["c", "a", "b"], width=2), [0])
    added = vocabulary(["c", "a", "<image>"], width=2, special=1)  # need no row
    assert draft_vocabulary(target, added, [0]).target_ids == (2, 0)
