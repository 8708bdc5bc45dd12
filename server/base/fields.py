"""The types of request fields, which check and bound the values."""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticKnownError
from typing_extensions import TypeAliasType

from outrider.engine.api import MAX_LOGPROBS

from ..config.server_settings import MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_PROMPTS, MAX_STOP_STRINGS
from .errors import cut

MAX_STOP_CHARS = 1024
MAX_INT = 2**63 - 1
MAX_BAD_WORD_CHARS = 256
MAX_CACHE_SALT_CHARS = 1024
MAX_LOGITS_PROCESSORS = 16
MAX_REGISTERED_NAME_CHARS = 256  # of a processor, or of a source of drafts
MAX_TOOLS = 1024
MAX_NAME_CHARS = 64  # shown of an unknown field's name
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _whole_number(value: object) -> object:
    """JSON has one kind of number, of any size: accept 16.0 as an integer, and refuse 2**64."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value > MAX_INT:
        raise PydanticKnownError("less_than_equal", {"le": MAX_INT})
    if isinstance(value, int) and value < -MAX_INT - 1:
        raise PydanticKnownError("greater_than_equal", {"ge": -MAX_INT - 1})
    return value


Int = Annotated[int, BeforeValidator(_whole_number)]


def _no_limit(value: int) -> int | None:
    return None if value == -1 else value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("expected at least 1, or -1 for as many tokens as fit")
    return value


# How many tokens to write, at most; -1, which becomes None: as many as fit.
MaxTokensOrZero = Annotated[Int, Field(ge=-1), AfterValidator(_no_limit)]
MaxTokens = Annotated[
    Int,
    Field(ge=-1, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
    AfterValidator(_no_limit),
]
# -1: as many as this server reports.
NumLogprobs = Annotated[int, BeforeValidator(_whole_number), Field(ge=-1, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
# Lists and dicts stop at the first wrong item: a body of 4 MB may hold millions of them, and each
# error that pydantic collects takes a kilobyte. It has a name because a bare FailFast cannot be
# part of a union.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast(), Field(max_length=MAX_PROMPTS)])


def _whole_numbers(value: object) -> object:
    """Like `_whole_number`, for lists so long that a call for each item would be slow."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [_whole_number(item) for item in value]
    return value


TokenIdList = Annotated[
    list[Annotated[int, Field(ge=0)]], FailFast(), BeforeValidator(_whole_numbers)
]
TokenIds = TypeAliasType("TokenIds", Annotated[TokenIdList, Field(min_length=1)])
LogprobTokenIds = TypeAliasType(
    "LogprobTokenIds", Annotated[TokenIdList, Field(min_length=1, max_length=MAX_LOGPROBS)]
)
TokenIdLists = TypeAliasType(
    "TokenIdLists", Annotated[list[TokenIds], FailFast(), Field(max_length=MAX_PROMPTS)]
)
StopStringList = TypeAliasType(
    "StopStringList", Annotated[list[StopString], FailFast(), Field(max_length=MAX_STOP_STRINGS)]
)
# By the kind that it has, so that what is wrong is reported once, not once a kind.
Stop = Annotated[
    Annotated[StopString, Tag("<text>")] | Annotated[StopStringList, Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]


def _token_key(key: object) -> object:
    """Keys of JSON objects are strings, even if they are token ids."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


LogitBias = TypeAliasType(
    "LogitBias",
    Annotated[
        dict[Annotated[int, BeforeValidator(_token_key), Field(ge=0)], float],
        FailFast(),
        Field(
            max_length=MAX_LOGIT_BIASES,
            json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
        ),
    ],
)
BadWordList = TypeAliasType(
    "BadWordList",
    Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
        FailFast(),
        Field(max_length=MAX_BAD_WORDS),
    ],
)


# Tags of unions are in angle brackets, so that error messages can leave them out of a path.
def _prompt_kind(value: object) -> str | None:
    """Decide by the first element, so that a wrong prompt is reported once, not for each kind."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "<texts>"
    return "<id_lists>" if isinstance(first, list) else "<ids>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[TokenIdLists, Tag("<id_lists>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="expected a string, a list of strings, a list of token ids, or a "
        "list of lists of token ids",
    ),
]


def _describe_fields(schema: dict[str, Any]) -> None:
    """Allow null for fields that may be left out, and name the limits of optional numbers."""
    for name, field in schema.get("properties", {}).items():
        variants = field.get("anyOf", [])
        for variant in variants:
            for ours, theirs in (("ge", "minimum"), ("le", "maximum")):
                if ours in variant:
                    variant[theirs] = variant.pop(ours)
        if name not in schema.get("required", ()) and {"type": "null"} not in variants:
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class UnknownField(NamedTuple):
    """A field that no part of the API knows, by its path in the body."""

    path: str
    nearest: str | None  # the known name that is most similar


class APIRequest(BaseModel):
    """Fields keep their JSON types, null stands for a default, unknown fields are kept aside."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=_describe_fields
    )

    # Fields that other servers know in such an object, and that have no effect here.
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    # Names that other servers have for fields of this one.
    other_names: ClassVar[dict[str, str]] = {}
    # Fields that would change the answer, with the values that ask for nothing.
    refused_fields: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        if not isinstance(data, dict):
            raise ValueError("expected an object")
        given = {key: value for key, value in data.items() if value is not None}
        for theirs, ours in cls.other_names.items():
            if theirs in given:
                given = {ours: given.pop(theirs)} | given
        if cls.model_config["extra"] == "forbid":
            # Not left to pydantic, which would report each of a million unknown fields.
            for unknown in unknown_names(given, _known_names(cls)):
                raise ValueError(f"no such field: {unknown.path}{did_you_mean(unknown)}")
        return given

    def unknown_fields(self, path: str = "") -> Iterator[UnknownField]:
        """The unknown fields in this object, which is at `path`, and in the objects inside it."""
        if self.model_extra:
            ignored = self.ignored_fields | self.refused_fields.keys()
            yield from unknown_names(self.model_extra, _known_names(type(self)), ignored, path)
        yield from self._unknown_inside(path)

    def refused(self, path: str = "") -> Iterator[str]:
        """Paths of those refused fields that ask for something, here and in the objects inside."""
        if given := self.model_extra:
            for name, neutral in self.refused_fields.items():
                if name in given and given[name] not in neutral:
                    yield path + name
        for name, value in self._given():
            if isinstance(value, APIRequest):
                yield from value.refused(f"{path}{name}.")

    def _unknown_inside(self, path: str) -> Iterator[UnknownField]:
        for name, value in self._given():
            if isinstance(value, APIRequest):
                yield from value.unknown_fields(f"{path}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], APIRequest):
                for i, item in enumerate(value):
                    yield from item.unknown_fields(f"{path}{name}[{i}].")

    def _given(self) -> Iterator[tuple[str, Any]]:
        """The known fields that the client set: a default holds nothing that is unknown."""
        given = self.model_fields_set
        return ((name, value) for name, value in vars(self).items() if name in given)


def unknown_names(
    given: Iterable[str],
    known: frozenset[str],
    ignored: frozenset[str] = frozenset(),
    path: str = "",
) -> Iterator[UnknownField]:
    """The given names that are neither known nor ignored, escaped and cut so that they are safe."""
    for name in given:
        if name not in known and name not in ignored:
            nearest = difflib.get_close_matches(name[:MAX_NAME_CHARS], known, n=1)
            yield UnknownField(path + _shown(name), nearest[0] if nearest else None)


def did_you_mean(unknown: UnknownField) -> str:
    return f" (did you mean {unknown.nearest}?)" if unknown.nearest else ""


@functools.cache
def _known_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _shown(name: str) -> str:
    """A name that a client made up, made safe for headers and log lines."""
    return name if _PLAIN_NAME.fullmatch(name) else ascii(cut(name, MAX_NAME_CHARS))
