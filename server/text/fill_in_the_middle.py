"""Prompts for the text between two others, for models that were trained to write it."""

from dataclasses import dataclass
from typing import Literal

from .tokenizer import Tokenizer

# Marks before the text in front of the gap, before the text after it, and before the filling.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral, which reads the text after the gap first
)
# Tokens that end the filling, besides the end of a text.
_ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<file_sep>", "▁<EOT>")


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """The marks of a model, as token ids."""

    begin: list[int]  # the tokens that every text of this tokenizer begins with
    prefix: int
    suffix: int
    middle: int | None
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "FillInTheMiddle | None":
        """The marks of a tokenizer; None if its vocabulary has none."""
        id_of = tokenizer.backend.token_to_id
        for marks in _MARKS:
            known = [mark for mark in marks if mark is not None]
            ids = [token_id for mark in known if (token_id := id_of(mark)) is not None]
            if len(ids) == len(known):
                prefix, suffix, *middle = ids
                return cls(
                    begin=tokenizer.encode("", add_special_tokens=True),
                    prefix=prefix,
                    suffix=suffix,
                    middle=middle[0] if middle else None,
                    ends=[token_id for end in _ENDS if (token_id := id_of(end)) is not None],
                )
        return None

    def prompt(
        self,
        before: list[int],
        behind: list[int],
        *,
        most: int | None = None,
        side: Literal["left", "right"] = "left",
    ) -> list[int]:
        """The prompt for the text between these two, of at most so many tokens.

        What does not fit is cut off far from the gap, first on this side. The marks always stay.
        """
        if most is not None:
            room = max(0, most - len(self.prompt([], [])))
            if side == "left":
                behind = behind[:room]
                room -= len(behind)
                before = before[max(0, len(before) - room) :]
            else:
                before = before[max(0, len(before) - room) :]
                behind = behind[: room - len(before)]
        if self.middle is None:
            return [*self.begin, self.suffix, *behind, self.prefix, *before]
        return [*self.begin, self.prefix, *before, self.suffix, *behind, self.middle]
