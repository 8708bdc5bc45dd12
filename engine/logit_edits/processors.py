"""Custom logits processors: the operator registers them, a request chooses among them by name."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from torch import Tensor

from ..api import InvalidRequestError, SamplingParams

ENTRY_POINT_GROUP = "outrider.logits_processors"


class LogitsProcessor(Protocol):
    """Edits one row. The call is that of transformers' LogitsProcessor, so its classes fit.

    The result must follow from the arguments alone: a processor is called for the rows of both
    models, in any order, and for drafts that are rejected afterwards.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [1, n] int64, prompt, output and the drafts before the row;
        scores: [1, V] float32. Returns the edited scores, [1, V].
        """
        ...


# Makes the processor of one request, from the arguments that the request gives.
Factory = Callable[..., LogitsProcessor]


class ProcessorRegistry:
    """What requests may choose: `name`, an entry point of the group above that is installed beside
    the engine, or `name = module:attribute`, written as in an entry point.
    """

    def __init__(self, specs: tuple[str, ...]) -> None:
        installed = entry_points(group=ENTRY_POINT_GROUP)
        self._factories: dict[str, Factory] = {}
        for spec in specs:
            name, _, value = (part.strip() for part in spec.partition("="))
            if value:
                entry = EntryPoint(name, value, ENTRY_POINT_GROUP)
            elif name in installed.names:
                entry = installed[name]
            else:
                raise ValueError(
                    f"logits_processors: {name!r} is no entry point of {ENTRY_POINT_GROUP}; "
                    f"installed: {', '.join(sorted(installed.names)) or 'none'}. Install the "
                    "package that has it, or write `name = module:attribute`"
                )
            self._factories[name] = entry.load()

    def build(self, params: SamplingParams) -> list[tuple[str, LogitsProcessor]]:
        """The request's processors, by name and in its order; raises InvalidRequestError."""
        built = []
        for choice in params.logits_processors:
            factory = self._factories.get(choice.name)
            if factory is None:
                raise InvalidRequestError(
                    f"logits_processors: {choice.name!r} is not registered; "
                    f"registered: {', '.join(self._factories) or 'none'}"
                )
            try:
                built.append((choice.name, factory(**choice.args)))
            except Exception as error:
                raise InvalidRequestError(
                    f"logits_processors: {choice.name!r} refuses its arguments: {error}"
                ) from error
        return built
