"""What is said in a message, whatever the API: a string, or a list of parts."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

from pydantic import Discriminator, FailFast, Tag
from typing_extensions import TypeAliasType

from .fields import APIRequest


class HasText(Protocol):
    @property
    def text(self) -> str: ...


Parts = TypeVar("Parts")


def _kind(value: object) -> str | None:
    """Decide between the two first, so that what is wrong is reported once, not once a kind."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


TextOr = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<list>")],
    Discriminator(
        _kind,
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
