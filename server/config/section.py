"""What all sections of the settings have in common."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticKnownError


def _not_empty(value: object) -> object:
    """An empty text is no path. Pydantic would take it for the present folder."""
    if value == "":
        raise PydanticKnownError("string_too_short", {"min_length": 1})
    return value


SettingPath = Annotated[Path, BeforeValidator(_not_empty)]


class SettingsSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
