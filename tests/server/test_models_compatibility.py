"""Which drafts a target takes: the same token behind every id."""

import pytest

from outrider.server.models.compatibility import Vocabulary, shared_vocab_size
from outrider.server.models.store import ModelError


def vocabulary(tokens: list[str], width: int | None = None, special: int = 0) -> Vocabulary:
    """Tokens by id, the last `special` of them special."""
    ids = {token: i for i, token in enumerate(tokens)}
    return Vocabulary(
        ids, frozenset(range(len(tokens) - special, len(tokens))), width or len(tokens)
    )


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


def test_same_size_with_other_contents_is_refused_naming_tokens() -> None:
    with pytest.raises(ModelError, match=r"differ in 2 of 4 tokens: id 1 is 'b' .* and 'c'"):
        shared_vocab_size(TARGET, vocabulary(["a", "c", "b", "<end>"]))


def test_a_differing_special_token_is_refused() -> None:
    with pytest.raises(ModelError, match=r"id 3 is '<end>' to the target and '<eos>'"):
        shared_vocab_size(TARGET, vocabulary(["a", "b", "c", "<eos>"], special=1))


def test_a_token_that_the_draft_lacks_is_refused() -> None:
    with pytest.raises(ModelError, match=r"id 3 is '<end>' to the target and None to the draft"):
        shared_vocab_size(TARGET, vocabulary(["a", "b", "c"], width=8))


def test_what_the_draft_has_beyond_the_target_does_not_matter() -> None:
    assert shared_vocab_size(TARGET, vocabulary(["a", "b", "c", "<end>", "<more>"])) == 4


def test_special_tokens_without_a_row_in_the_draft_are_left_out() -> None:
    tokens = ["a", "b", "c", "<end>", "<image>"]
    target, draft = vocabulary(tokens, width=8, special=1), vocabulary(tokens, width=4, special=1)
    assert shared_vocab_size(target, draft) == 4


def test_ordinary_tokens_without_a_row_in_the_draft_are_refused() -> None:
    tokens = ["a", "b", "c", "d", "<image>"]
    with pytest.raises(ModelError, match="the draft has 3 token ids and the target 5"):
        shared_vocab_size(vocabulary(tokens, special=1), vocabulary(tokens, width=3))
