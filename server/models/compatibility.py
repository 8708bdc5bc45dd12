"""Checks that a draft and its target mean the same token by every id."""

from collections.abc import Mapping
from dataclasses import dataclass

from .store import ModelError

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a model reads and writes."""

    token_ids: Mapping[str, int]  # including added and special tokens
    special_ids: frozenset[int]
    width: int  # rows of the embedding and logits of the head, including padding

    @property
    def size(self) -> int:
        """One more than the highest id that is a token and has a row."""
        return min(max(self.token_ids.values(), default=-1) + 1, self.width)


def shared_vocab_size(target: Vocabulary, draft: Vocabulary) -> int:
    """The vocabulary size at which both models can run as a pair.

    Rows without a token (padding) may differ, and the draft may have more ids than the target.
    Raises ModelError, naming tokens, if an id of the target means another token to the draft, or
    none.
    """
    size = target.size
    if size > draft.width:
        # Gemma 3's text-only sizes lack the row of the image token that their tokenizer still has.
        beyond = {i for i in target.token_ids.values() if draft.width <= i < size}
        if not beyond <= target.special_ids:
            raise ModelError(
                f"the draft has {draft.width} token ids and the target {size}; they need the same "
                "tokenizer: take a draft of the target's family"
            )
        size = draft.width
    in_target = {i: token for token, i in target.token_ids.items() if i < size}
    in_draft = {i: token for token, i in draft.token_ids.items() if i < size}
    differing = sorted(
        i for i in in_target.keys() | in_draft.keys() if in_target.get(i) != in_draft.get(i)
    )
    if differing:
        examples = "; ".join(
            f"id {i} is {in_target.get(i)!r} to the target and {in_draft.get(i)!r} to the draft"
            for i in differing[:_SHOWN]
        )
        raise ModelError(
            f"the tokenizers differ in {len(differing)} of {size} tokens: {examples}. A pair needs "
            "one tokenizer: take a draft of the target's family"
        )
    return size
