"""How long a request lets the model think."""

from collections.abc import Sequence

from outrider.engine.api import ThinkingBudget

from ..base.errors import invalid_value
from .service import Service


def thinking_budget(
    service: Service, num_tokens: int | None, *, begun: bool = False
) -> ThinkingBudget | None:
    """The budget of an answer, whose prompt may have `begun` a thought; None: it is not bounded.

    Raises APIError if the model does not think between two tokens.
    """
    if num_tokens is None:
        return None
    form, tokenizer = service.message_format, service.tokenizer
    thoughts = form.thoughts_between_tokens(tokenizer.has_tokens)
    if thoughts is None:
        why = (
            "does not think between two tokens of its vocabulary, such as <think> and </think>, so "
            "the server cannot end its thinking"
            if form.has_reasoning
            else "shows no thinking: its chat template has no markers for it, or "
            "server.reasoning_content is false"
        )
        raise invalid_value(
            "thinking_token_budget",
            f"thinking_token_budget is not possible here: the model {service.model_name!r} {why}. "
            "Leave it out.",
        )
    opening, close = thoughts.tokens
    rest = thoughts.open[len(opening) :]
    return ThinkingBudget(
        num_tokens=min(num_tokens, service.engine_info.max_model_len),  # no answer has more
        open_token_id=tokenizer.id_of(opening),
        close_token_id=tokenizer.id_of(close),
        num_opening=len(tokenizer.encode(rest, add_special_tokens=False)) if rest else 0,
        begun=begun,
    )


def can_bound_thinking(service: Service) -> bool:
    return service.message_format.thoughts_between_tokens(service.tokenizer.has_tokens) is not None


def ends_in_thought(prompt: Sequence[int], budget: ThinkingBudget) -> bool:
    """Whether the prompt's last marker of a thought opens one."""
    markers = budget.open_token_id, budget.close_token_id
    last = next((token for token in reversed(prompt) if token in markers), None)
    return last == budget.open_token_id
