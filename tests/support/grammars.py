"""Ask a grammar what it allows."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outrider.engine.config import TokenTable
from outrider.engine.grammars.grammar import Grammar, compute_masks, fit_drafts
from outrider.engine.grammars.grammar_compiler import GrammarCompiler


def compile_grammar(
    compiler: GrammarCompiler, text: str, stop_token_ids: Sequence[int] = ()
) -> Grammar:
    grammar = compiler.start(text, stop_token_ids)
    grammar.process.begun.result()
    return grammar


def allowed(grammar: Grammar, num_drafts: int = 0) -> set[int]:
    """Token ids that may follow this many of the grammar's drafts; ask in order."""
    while len(grammar.masks) <= num_drafts:
        compute_masks([grammar])
    bits = np.unpackbits(grammar.masks[num_drafts].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def fitting(grammar: Grammar, token_ids: list[int]) -> list[int]:
    """The leading ones of these tokens that it allows."""
    fit_drafts([grammar], [token_ids])
    return grammar.drafts


def stands_for(*pieces: str) -> TokenTable:
    """A token table of these texts and, last, eos."""
    return TokenTable(
        token_bytes=(*(piece.encode() for piece in pieces), b"<eos>"),
        special_token_ids=(len(pieces),),
    )


def follows(grammar: Grammar, tokens: TokenTable, pieces: Sequence[str]) -> bool:
    """Go on by these pieces; whether each was allowed."""
    for piece in pieces:
        token_id = tokens.token_bytes.index(piece.encode())
        if token_id not in allowed(grammar):
            return False
        grammar.follow([token_id])
    return True


@dataclass(eq=False)
class Language:
    """What a grammar allows, by brute force: texts of three letters, which stand for tokens."""

    grammar: str
    pattern: str
    letters: str
    tokens: TokenTable

    @cached_property
    def texts(self) -> set[str]:
        return {
            text
            for length in range(10)
            for text in map("".join, itertools.product(self.letters, repeat=length))
            if re.fullmatch(self.pattern, text)
        }

    @cached_property
    def beginnings(self) -> set[str]:
        return {text[:i] for text in self.texts for i in range(len(text) + 1)}

    def mask(self, output: list[int]) -> list[bool]:
        """Which tokens, the end last, may follow these."""
        text = "".join(self.letters[token_id] for token_id in output)
        return [*(text + letter in self.beginnings for letter in self.letters), text in self.texts]
