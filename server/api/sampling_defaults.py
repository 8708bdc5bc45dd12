"""Default sampling parameters: those that the model recommends, as in vLLM."""

import functools
import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..models.store import ModelError
from .protocol import SamplingFields

FILE = "generation_config.json"

Fields = TypeVar("Fields", bound=SamplingFields)


class SamplingDefaults(BaseModel):
    """The fields of generation_config.json that are used; None: our own default applies."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, ge=1, validation_alias="max_new_tokens")

    def fill(self, fields: Fields) -> Fields:
        """The fields, with these defaults for the ones that were left out."""
        given = fields.model_fields_set
        missing = {name: value for name, value in self._values.items() if name not in given}
        return fields.model_copy(update=missing) if missing else fields

    @functools.cached_property
    def _values(self) -> dict[str, float]:
        # Not max_tokens, which depends on the prompt.
        return self.model_dump(exclude_none=True, exclude={"max_tokens"})

    def __str__(self) -> str:
        given = self.model_dump(exclude_none=True)
        return ", ".join(f"{name} {value:g}" for name, value in given.items()) or "neutral"


NEUTRAL = SamplingDefaults()


def sampling_defaults(source: str, target: Path) -> SamplingDefaults:
    """`source` is the setting server.generation_config, `target` the model's directory.

    Raises ModelError if there is no such file, or if it has impossible values.
    """
    if source == "outrider":
        return NEUTRAL
    file = (target if source == "auto" else Path(source).expanduser()) / FILE
    if not file.is_file():
        if source == "auto":
            return NEUTRAL
        raise ModelError(f"server.generation_config = {source!r}: there is no {file}")
    try:
        return SamplingDefaults.model_validate(json.loads(file.read_text()))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"])) or "the whole"
        reason = f"{name} is {problem['input']!r}: {problem['msg']}"
    except ValueError as error:
        reason = str(error)
    raise ModelError(
        f"{file} cannot be used: {reason}; --generation-config outrider starts without it"
    )
