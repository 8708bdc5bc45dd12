"""Models that call tools, and the grammars that they follow then."""

from functools import partial
from typing import Any

import pytest
import scripted_client
from served import Served
from tool_requests import CALL_ADD, CALL_NEGATE, EOS, Allows, fits

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    size = tokenizer.backend.get_vocab_size()
    return GrammarCompiler(tokenizer.token_table(size), (EOS,), size)


@pytest.fixture(scope="module")
def allows(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Allows:
    """Whether a grammar lets a model say a text, and nothing more."""
    return partial(fits, compiler, tokenizer)


@pytest.fixture
def served(tokenizer: Tokenizer, compiler: GrammarCompiler, allows: Allows) -> Served:
    """A model that says what its grammar lets it say of a call of `add`, then one of `negate`."""

    def play(request: Any) -> Any:
        text = f"[{CALL_ADD}, {CALL_NEGATE}]"
        if not allows(request.params.grammar, text):
            text = f"[{CALL_ADD}]"
        return scripted_client.saying(tokenizer, text, sizes=(4, 1, 9), finish="stop")(request)

    return Served(play, tokenizer, compiler=compiler)
