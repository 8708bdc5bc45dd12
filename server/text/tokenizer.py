"""Text to token ids and back, with the target's own tokenizer."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLTokenizer
from tokenizers import Tokenizer as Backend

from outrider.engine.config import TokenTable

from .chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # stands for a part of a character
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_char() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as themselves, others from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerData:
    """A tokenizer that transformers has loaded, as data that can be sent to any process.

    Loading it needs transformers and torch, which take seconds and hundreds of megabytes; the HTTP
    processes have neither.
    """

    backend: str  # the JSON of the `tokenizers` library
    class_name: str
    special_tokens: dict[str, Any]  # by their roles, such as eos_token
    chat_template: str | dict[str, str] | None
    response_template: dict[str, Any] | None
    model_type: str = ""  # of the target, by its config

    @classmethod
    def of(cls, wrapper: "PreTrainedTokenizerBase", model_type: str = "") -> "TokenizerData":
        """Raises ValueError if the tokenizer is not based on the `tokenizers` library."""
        backend: Backend | None = getattr(wrapper, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"the tokenizer is a {type(wrapper).__name__}, which has no `tokenizers` backend; "
                "use a model whose directory has a tokenizer.json"
            )
        return cls(
            backend=backend.to_str(),
            class_name=type(wrapper).__name__,
            special_tokens=wrapper.special_tokens_map,
            chat_template=wrapper.chat_template,
            response_template=getattr(wrapper, "response_template", None),
            model_type=model_type,
        )


class Tokenizer:
    """The target's tokenizer; can be called from any thread."""

    def __init__(self, data: TokenizerData) -> None:
        # Not transformers' wrapper, which sets padding and truncation on the backend at every call:
        # that fails if two threads do it at the same time.
        backend = Backend.from_str(data.backend)
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.chat_template = (
            ChatTemplate(data.chat_template, data.special_tokens)
            if data.chat_template is not None
            else None
        )
        self.info: dict[str, Any] = {
            "tokenizer_class": data.class_name,
            **data.special_tokens,
            "chat_template": data.chat_template,
        }
        self.data = data
        # In characters of the text, or in bytes, of which there are at least as many.
        self.longest_token = max(map(len, backend.get_vocab()))
        self._token_texts: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one, because `encode` would hold the GIL, and so block the event loop.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def special_ids_of(self, texts: Collection[str] | None) -> frozenset[int]:
        """The ids of special tokens with these texts; None: all special tokens."""
        if texts is None:
            return self.special_ids
        return frozenset(i for i in self.special_ids if self.backend.id_to_token(i) in texts)

    def has_tokens(self, texts: Collection[str]) -> bool:
        """Whether each of these texts is one added token, which no other tokens spell."""
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        return added.issuperset(texts)

    def id_of(self, text: str) -> int:
        """The id of a text that is a token."""
        token_id: int | None = self.backend.token_to_id(text)
        assert token_id is not None
        return token_id

    def token_table(self, size: int) -> TokenTable:
        """What the first `size` token ids stand for in the middle of a text."""
        # Not `token_bytes`: alone, a token may lose the space that it begins with.
        tokenizer = LLTokenizer(self.backend.to_str(), slices=[])
        known = range(min(size, tokenizer.vocab_size))
        token_bytes = [tokenizer.decode_bytes([token_id]) for token_id in known]
        return TokenTable(
            token_bytes=(*token_bytes, *[b""] * (size - len(known))),
            special_token_ids=tuple(filter(tokenizer.is_special_token, known)),
        )

    def pieces(self, token_ids: list[int]) -> list[str]:
        """Tokens as the vocabulary writes them."""
        pieces = [self.backend.id_to_token(token_id) for token_id in token_ids]
        return cast(list[str], pieces)

    def token_text(self, token_id: int) -> str:
        """One token by itself, as `logprobs` names it; part of a character reads as U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also where they are only part of a character."""
        text = self.token_text(token_id)
        piece = self.backend.id_to_token(token_id)
        if INCOMPLETE in text and piece is not None:
            if found := BYTE_PIECE.fullmatch(piece):
                return bytes.fromhex(found[1])
            if all(char in BYTE_OF_CHAR for char in piece):
                return bytes(BYTE_OF_CHAR[char] for char in piece)
        return text.encode()
