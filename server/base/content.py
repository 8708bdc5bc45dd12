"""What is said in a message, whatever the API: a string, or a list of parts."""

from collections.abc import Callable, Iterable
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

from pydantic import Discriminator, FailFast, Tag
from typing_extensions import TypeAliasType

from .fields import APIRequest


class HasText(Protocol):
    @property
    def text(self) -> str: ...


Parts = TypeVar("Parts")


def by_class(kinds: dict[type, str]) -> Callable[[object], str | None]:
    """Decides between kinds first, so that what is wrong is reported once, not once a kind."""
    return lambda value: kinds.get(type(value))


def by_type(*kinds: str) -> Callable[[object], str | None]:
    """The same by the type that parts say that they have."""
    return lambda value: f"<{kind}>" if (kind := type_of(value)) in kinds else None


TextOr = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<list>")],
    Discriminator(
        by_class({str: "<text>", list: "<list>"}),
        custom_error_type="content_type",
        custom_error_message="expected a string or a list of parts",
    ),
]


def text_of(content: str | Iterable[HasText]) -> str:
    """The content as one text, which every chat template of a text model can take."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def type_of(value: object) -> object:
    """The `type` of a part, which may be a model already or still a dict of JSON."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


class RefusalPart(APIRequest):
    """What an assistant said in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(value: object) -> str | None:
    kind = type_of(value)
    if kind == "refusal":
        return "<refusal>"
    # All kinds of text are called so.
    return "<other>" if not isinstance(kind, str) or "text" in kind else None


OtherPart = TypeVar("OtherPart")
OrRefusal = Annotated[
    Annotated[OtherPart, Tag("<other>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(
        _part_kind,
        custom_error_type="part_type",
        custom_error_message="expected a part with text; images, audio and files are not supported",
    ),
]


class TextPart(APIRequest):
    """The only kind of content part that a text model can read, besides refusals.

    Chats call it `text`, responses by several names; clients mix them.
    """

    ignored_fields: ClassVar = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text"]
    text: str


TextParts = TypeAliasType("TextParts", Annotated[list[OrRefusal[TextPart]], FailFast()])
