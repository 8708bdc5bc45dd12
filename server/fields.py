"""What fields of requests are made of: types that check and bound what comes."""

from typing import Annotated, Any

from pydantic import (
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

from outrider.server.settings import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
)

MAX_STOP_CHARS = 1024
MAX_INT = 2**63 - 1
MAX_LOGPROBS = 20
MAX_BAD_WORD_CHARS = 256
MAX_CACHE_SALT_CHARS = 1024
MAX_LOGITS_PROCESSORS = 16


def _whole_number(value: object) -> object:
    """JSON knows one kind of number, of any size: 16.0 is an integer, and 2**64 none of ours."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value > MAX_INT:
        raise PydanticKnownError("less_than_equal", {"le": MAX_INT})
    if isinstance(value, int) and value < -MAX_INT - 1:
        raise PydanticKnownError("greater_than_equal", {"ge": -MAX_INT - 1})
    return value


Int = Annotated[int, BeforeValidator(_whole_number)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
# Lists stop at their first wrong item. Named, because a bare FailFast cannot be part of a union.
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
TokenIds = TypeAliasType(
    "TokenIds", Annotated[list[Annotated[int, Field(ge=0)]], FailFast(), Field(min_length=1)]
)
TokenIdLists = TypeAliasType("TokenIdLists", Annotated[list[TokenIds], FailFast()])
StopStrings = TypeAliasType(
    "StopStrings", Annotated[list[StopString], FailFast(), Field(max_length=MAX_STOP_STRINGS)]
)


def _token_key(key: object) -> object:
    """Keys of JSON objects are texts, also those that are token ids."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


LogitBias = TypeAliasType(
    "LogitBias",
    Annotated[
        dict[Annotated[int, BeforeValidator(_token_key), Field(ge=0)], float],
        Field(
            max_length=MAX_LOGIT_BIAS,
            json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
        ),
    ],
)
BadWords = TypeAliasType(
    "BadWords",
    Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
        FailFast(),
        Field(max_length=MAX_BAD_WORDS),
    ],
)


# Tags of unions stand in angle brackets: error messages leave them out of a field's path.
def _prompt_kind(value: object) -> str | None:
    """Judge by the first element, so that a wrong prompt is reported once, not once a kind."""
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
    """Null is as good as leaving a field out; and limits of optional numbers have names in JSON."""
    for name, field in schema.get("properties", {}).items():
        variants = field.get("anyOf", [])
        for variant in variants:
            for ours, theirs in (("ge", "minimum"), ("le", "maximum")):
                if ours in variant:
                    variant[theirs] = variant.pop(ours)
        if name not in schema.get("required", ()) and {"type": "null"} not in variants:
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class APIRequest(BaseModel):
    """Fields keep their JSON types, null stands for a default, unknown fields are kept aside."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=_describe_fields
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data
