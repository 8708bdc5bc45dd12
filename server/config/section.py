"""What all sections of the settings have in common."""

from pathlib import Path
from typing import Annotated, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError


def _not_empty(value: object) -> object:
    """An empty text is no path. Pydantic would take it for the present folder."""
    if value == "":
        raise PydanticKnownError("string_too_short", {"min_length": 1})
    return value


SettingPath = Annotated[Path, BeforeValidator(_not_empty)]


class SettingsSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic would take it for 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and kinds & {int, float}:
            raise PydanticKnownError("float_type" if float in kinds else "int_type")
        return value
