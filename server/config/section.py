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
    def _fits(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic would take true for 1, and a path with a NUL, at which system calls fail."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and kinds & {int, float}:
            raise PydanticKnownError("float_type" if float in kinds else "int_type")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("no path or name has a NUL character in it")
        return value
