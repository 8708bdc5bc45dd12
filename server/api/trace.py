"""The steps that produced an answer: what each of them drafted, and what was accepted."""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.engine.api import SourceName

from .protocol import DraftedToken, TokenKind, TracedStep, TracedToken


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step of one sequence, in token ids."""

    number: int  # 1 is the sequence's first
    draft_token_ids: list[int]
    num_accepted: int
    token_ids: list[int]  # accepted drafts, then one more
    texts: list[str]  # the text that each of these added
    source: SourceName | None  # of the drafts

    def kind(self, position: int) -> TokenKind:
        """The kind of the token at this position of `token_ids`."""
        if position < self.num_accepted:
            return "accepted"
        if not self.draft_token_ids:
            return "plain"
        return "bonus" if self.num_accepted == len(self.draft_token_ids) else "recovered"

    def traced(self, proposer: str | None, token_text: Callable[[int], str]) -> TracedStep:
        """The step as the API reports it; `proposer` is what draws drafts."""
        source = proposer if self.source == "draft_model" else self.source
        return TracedStep(
            step=self.number,
            source=source,
            drafts=[DraftedToken(token_text(i), i) for i in self.draft_token_ids],
            num_accepted=self.num_accepted,
            tokens=[
                TracedToken(token_text(token_id), token_id, text, self.kind(position))
                for position, (token_id, text) in enumerate(
                    zip(self.token_ids, self.texts, strict=True)
                )
            ],
        )
