"""Custom logits processors: the operator registers them, and requests choose them by name."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Protocol

from torch import Tensor

from .api import InvalidRequestError, SamplingParams
from .config import ConfigError

ENTRY_POINT_GROUP = "outrider.logits_processors"


class LogitsProcessor(Protocol):
    """Edits one row. Called like transformers' LogitsProcessor, so its classes fit.

    The result must depend on the arguments alone: a processor is called for rows of both models,
    in any order, and for drafts that are rejected later.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [1, n] int64: prompt, output, and the drafts before the row;
        scores: [1, V] float32. Returns the edited scores, [1, V].
        """
        ...


# Builds the processor of one request from the request's arguments.
Factory = Callable[..., LogitsProcessor]


class ProcessorRegistry:
    """The processors that requests may choose.

    A spec is the `name` of an installed entry point of the group above, or
    `name = module:attribute`, written as in an entry point.
    """

    def __init__(self, specs: tuple[str, ...]) -> None:
        installed = entry_points(group=ENTRY_POINT_GROUP) if specs else EntryPoints()
        self._factories: dict[str, Factory] = {}
        for spec in specs:
            name, _, value = (part.strip() for part in spec.partition("="))
            if value:
                entry = EntryPoint(name, value, ENTRY_POINT_GROUP)
            elif name in installed.names:
                entry = installed[name]
            else:
                raise ConfigError(
                    f"engine.logits_processors: {name!r} is no entry point of {ENTRY_POINT_GROUP}; "
                    f"installed: {', '.join(sorted(installed.names)) or 'none'}. Install the "
                    "package that has it, or write `name = module:attribute`"
                )
            try:
                self._factories[name] = entry.load()
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"engine.logits_processors: {spec!r} cannot be loaded: {error}; "
                    "write `name = module:attribute`, of a module that Python finds"
                ) from error

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
