"""Grammars of answers that think first: the answer must follow a grammar, the thoughts nothing."""

from collections.abc import Callable

from ..text.message_format import ThoughtsFirst
from .structured_outputs import GrammarText

# Models break the line after their thoughts; without an end, one at a loss would go on so.
_BREAK = r"/\s{0,4}/"


def after_thoughts(answer: str, first: ThoughtsFirst, id_of: Callable[[str], int]) -> GrammarText:
    """A grammar of thoughts and then the answer, whose grammar is given as Lark.

    The markers are tokens: so the answer begins right after the one that ends the thoughts,
    wherever in a step that is. Text never matches a marker, nor may it spell one.
    """

    def token(marker: str) -> str:
        return f"<[{id_of(marker)}]>"

    if first.thoughts is None:
        channel, message = token("<|channel|>"), token("<|message|>")
        end = f'{token("<|end|>")} {token("<|start|>")} "assistant"'
        close = "<|end|>"
        begin = [
            f'start: thoughts* {channel} "final" (" "? {token("<|constrain|>")} "json")? '
            f"{message} answer",
            f'thoughts: {channel} ("analysis" | "commentary") {message} THOUGHT? {end}',
        ]
    else:
        (open, close), text = first.thoughts.tokens, first.thoughts.open
        begun = token(open) + "".join(f" {_quoted(rest)}" for rest in [text[len(open) :]] if rest)
        thought = f"THOUGHT? {token(close)} {_BREAK}"
        begin = [f"start: {thought if first.begun else f'({begun} {thought})?'} answer"]
    return GrammarText(
        "lark",
        "\n".join([*begin, f"THOUGHT: {text_without(close)}", f"answer: %lark {{\n{answer}\n}}"]),
    )


def text_without(marker: str) -> str:
    """A terminal for text that does not spell out the marker: that would be read as a marker."""
    for char in "/[]|":
        marker = marker.replace(char, rf"\{char}")
    return f"/(?s:.+)/ & ~/(?s:.*){marker}(?s:.*)/"


def _quoted(text: str) -> str:
    return '"' + text.replace("\n", r"\n") + '"'
