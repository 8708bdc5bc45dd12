"""What a request asks for, in whatever API, once its prompts are tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.api import ThinkingBudget

from ..text.message_reader import MessageReader
from .protocol import ChoiceFields


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    fields: ChoiceFields
    prompts: list[list[int]]
    param: str  # the field that the prompts came from
    max_tokens: int
    logprobs: int | None  # alternatives reported beside each token; None: no logprobs
    # The same of the prompt's tokens, for each place of the answer that may list them.
    prompt_logprobs: Sequence[int | None]
    salt: str  # as `Service.cache_salt` returns it
    grammar: str | None = None
    thinking: Sequence[ThinkingBudget | None] = ()  # none, or one for each prompt
    predicted: Sequence[int] = ()  # tokens that the client expects
    readers: Sequence[MessageReader] = ()  # of what the text says: none, or one a sample
    shown_special_ids: frozenset[int] = frozenset()  # part of the text in every case
