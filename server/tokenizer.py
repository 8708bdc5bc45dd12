"""Text to token ids and back, with the target's own tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as Backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """The target's tokenizer, reduced to what can be called from any thread.

    It works on the backend of the transformers tokenizer: the wrapper sets padding and truncation
    on the shared backend at every call, which fails when two threads meet there.
    """

    def __init__(self, wrapper: "PreTrainedTokenizerBase") -> None:
        backend: Backend | None = getattr(wrapper, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"the tokenizer is a {type(wrapper).__name__}, which has no `tokenizers` backend; "
                "use a model whose directory has a tokenizer.json"
            )
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, directory: Path, *, trust_remote_code: bool = False) -> "Tokenizer":
        from transformers import AutoTokenizer  # brings in torch, which takes seconds

        wrapper = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        return cls(wrapper)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token by itself, as `logprobs` names it; part of a character reads as U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text
