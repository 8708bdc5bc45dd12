"""What the tokens of a draft are to its target: the same by every id, or some of them by others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outrider.engine.config import DraftVocabulary

from ..text.tokenizer import BYTE_OF_CHAR, BYTE_PIECE
from .store import ModelError

# Of the target's tokens in ordinary text, those that a draft must have, too. Counted with the
# default pair at temperature 0, k = 1, and tokens left out at random: 70% of drafts were accepted
# with all tokens in common, 48% with 79% of the answers' tokens, 31% with 57%, 20% with 45%. One in
# four, as at 0.5, is worth a quarter of a step, and a small draft's pass costs a tenth to a fifth.
LEAST_SHARE = 0.5
_SHOWN = 5
SAMPLE = """\
The old ferry leaves at half past seven, and it doesn't wait for anybody. "You should have been
here earlier," said Anna, who had carried both suitcases all the way from the station; her brother
only shrugged. In 1987 the crossing took about 45 minutes. Today, with newer engines, it takes 30.

Yes, of course! Here are three ways to cook rice that doesn't stick:

1. **Rinse it first.** Cold water removes most of the starch.
2. Use twice as much water as rice, and don't lift the lid for 12-15 minutes.
3. Let it rest before serving.

Researchers at the university have shown that the temperature of a lake changes faster than the air
above it. This matters because many species can't adapt to a difference of more than 2.5 degrees.

```python
def count_words(path: str, least: int = 2) -> dict[str, int]:
    \"\"\"Return how often each word occurs in a file.\"\"\"
    counts = {}
    with open(path) as file:
        for line in file:
            for word in line.lower().split():
                counts[word] = counts.get(word, 0) + 1
    return {word: n for word, n in counts.items() if n >= least}
```

{"name": "Oslo", "country": "Norway", "population": 709000, "rivers": ["Akerselva", "Alna"]}

const total = items.filter((item) => item.price > 10).map((item) => item.count);
if (total.length === 0) { console.log("nothing found"); }
"""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a model reads and writes."""

    token_ids: Mapping[str, int]  # including added and special tokens
    special_ids: frozenset[int]
    width: int  # rows of the embedding and logits of the head, including padding
    roles: Mapping[str, int] = field(default_factory=dict)  # special tokens, such as eos_token
    added_ids: frozenset[int] = frozenset()  # tokens that are written as what they stand for
    is_byte_level: bool = False  # whether other tokens are written as GPT-2's are

    @classmethod
    def of(cls, tokenizer: Any, width: int) -> "Vocabulary":
        """Of a tokenizer as transformers has it."""
        token_ids, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        roles = tokenizer.special_tokens_map.items()
        return cls(
            token_ids=token_ids,
            special_ids=frozenset(tokenizer.all_special_ids)
            | {i for i, token in added.items() if token.special},
            width=width,
            roles={
                role: token_ids[t] for role, t in roles if isinstance(t, str) and t in token_ids
            },
            added_ids=frozenset(added),
            is_byte_level="ByteLevel" in repr(decoder),
        )

    @property
    def size(self) -> int:
        """One more than the highest id that is a token and has a row."""
        return min(max(self.token_ids.values(), default=-1) + 1, self.width)

    @cached_property
    def texts(self) -> dict[int, tuple[bytes, bool]]:
        """What each token stands for, and whether it is special, by the ids that have a row."""
        kept = (item for item in self.token_ids.items() if item[1] < self.width)
        return {i: (self._text(token, i), i in self.special_ids) for token, i in kept}

    @cached_property
    def first_ids(self) -> dict[tuple[bytes, bool], int]:
        """The token for each text; rather a letter than the byte that stands for it, too."""
        of_bytes = {self.token_ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)}
        ids = sorted(self.texts, reverse=True)
        last = [i for i in ids if i not in of_bytes]
        return {self.texts[i]: i for i in (*ids, *last)}

    def _text(self, token: str, token_id: int) -> bytes:
        is_added = token_id in self.added_ids
        if self.is_byte_level and not is_added and BYTE_OF_CHAR.keys() >= set(token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if not is_added and (byte := BYTE_PIECE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return (token if self.is_byte_level else token.replace("▁", " ")).encode()


def shared_vocab_size(target: Vocabulary, draft: Vocabulary) -> int | None:
    """The vocabulary size at which both models can run as a pair by the same ids.

    Rows without a token (padding) may differ, and the draft may have more ids than the target.
    None if an id of the target means another token to the draft, or none.
    """
    size = target.size
    if size > draft.width:
        # Gemma 3's text-only sizes lack the row of the image token that their tokenizer still has.
        beyond = {i for i in target.token_ids.values() if draft.width <= i < size}
        if not beyond <= target.special_ids:
            return None
        size = draft.width
    in_target = {i: token for token, i in target.token_ids.items() if i < size}
    in_draft = {i: token for token, i in draft.token_ids.items() if i < size}
    return size if in_target == in_draft else None


def draft_vocabulary(
    target: Vocabulary, draft: Vocabulary, sample_ids: Sequence[int]
) -> DraftVocabulary:
    """How a draft can take part whose ids mean other tokens; `sample_ids` are the target's.

    Raises ModelError if its tokenizer is not that of its model, or too few tokens are common.
    """
    num_own = max(set(draft.token_ids.values()) - draft.added_ids, default=-1) + 1
    if num_own > draft.width:
        raise ModelError(
            f"its tokenizer has {num_own} tokens, but its model {draft.width}: one of the two is "
            "another model's; put the model's own tokenizer into its directory"
        )
    common = _common(target, draft)
    counts = Counter(sample_ids)
    share = sum(n for i, n in counts.items() if i in common) / max(1, counts.total())
    if share < LEAST_SHARE:
        missing = [i for i, _ in counts.most_common() if i in target.texts and i not in common]
        texts = ", ".join(
            repr(target.texts[i][0].decode(errors="replace")) for i in missing[:_SHOWN]
        )
        raise ModelError(
            f"it has another tokenizer, with {share:.0%} of the target's tokens in ordinary text "
            f"(it lacks {texts} and others); below {LEAST_SHARE:.0%} drafts cannot pay: take a "
            "draft whose tokenizer has more in common with the target's, best of its family"
        )
    target_ids = [-1] * draft.width
    for i, own in common.items():
        target_ids[own] = i
    read_as = (common[i] if i in common else _read_as(target, draft, i) for i in range(target.size))
    return DraftVocabulary(
        target_ids=tuple(target_ids), read_as=tuple(read_as), share_of_text=share
    )


def _common(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """The draft's id for each id of the target that is the same token; no two share one."""
    ids = draft.first_ids
    common = {i: ids[text] for text, i in target.first_ids.items() if text in ids}
    taken = set(common.values())
    # Tokens of the same text, such as bytes beside letters, and then of the same role.
    named = [(i, draft.token_ids.get(token, -1)) for token, i in target.token_ids.items()]
    same = [(i, own) for i, own in named if target.texts.get(i) == draft.texts.get(own, 0)]
    roles = [(i, draft.roles.get(role, -1)) for role, i in target.roles.items()]
    for i, own in (*same, *roles):
        if i in target.texts and own in draft.texts and i not in common and own not in taken:
            common[i] = own
            taken.add(own)
    return common


def _read_as(target: Vocabulary, draft: Vocabulary, token_id: int) -> int:
    """As which of its tokens the draft reads one of the target's that it lacks.

    The end of the text that is a token, or for special tokens what has the same role. This is but
    context: it makes drafts better or worse, and no answer other.
    """
    text, is_special = target.texts.get(token_id, (b"", True))
    if not is_special:
        ends = (draft.first_ids.get((text[i:], False)) for i in range(len(text)))
        if (found := next((i for i in ends if i is not None), None)) is not None:
            return found
    own = (draft.roles.get(role) for role, i in target.roles.items() if i == token_id)
    instead = (*own, draft.first_ids.get((b"\n", False)), draft.roles.get("eos_token"), 0)
    return next(i for i in instead if i is not None and i < draft.width)
