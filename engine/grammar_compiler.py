"""From a grammar's text to where a sequence begins in it; only this needs llguidance installed."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from outrider.engine.config import TokenTable
from outrider.engine.grammar import Grammar

_MAX_COMPILED = 32
_NUM_THREADS = 2
# A token is allowed if the text may go on with its bytes, however that text would be tokenized.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Compiles grammars on threads of its own, and keeps the latest for sequences to come.

    A grammar is a text in llguidance's dialect of Lark.
    """

    def __init__(self, tokens: TokenTable, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        if len(tokens.token_bytes) != vocab_size:
            raise ValueError(
                f"the token table describes {len(tokens.token_bytes)} of {vocab_size} tokens"
            )
        self._vocab_size = vocab_size
        self._eos_token_ids = [i for i in eos_token_ids if i < vocab_size]
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(tokens, self._eos_token_ids[0])),
            eos_token=self._eos_token_ids,
        )
        # Bounds on memory and on the time of one mask; what exceeds them fails by itself.
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._lock = Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # latest use last

    def start(self, grammar: str, stop_token_ids: Sequence[int] = ()) -> Future[Grammar]:
        """Compile for one sequence, which these ids may end where the grammar may end."""
        return self._threads.submit(self._compile, grammar, stop_token_ids)

    def _compile(self, grammar: str, stop_token_ids: Sequence[int]) -> Grammar:
        eos_mask = self._mask_of(self._eos_token_ids)
        end_mask = eos_mask | self._mask_of(stop_token_ids)
        with self._lock:
            compiled = self._compiled.get(grammar)
        # Copies share what they have learned of the grammar, and also an excess of it.
        if compiled is None or _fails_at_once(compiled.deep_copy(), eos_mask):
            compiled = LLMatcher(
                self._tokenizer, grammar + _OPTIONS, log_level=0, limits=self._limits
            )
            _fails_at_once(compiled, eos_mask)  # the first mask is the slowest
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return Grammar(compiled.deep_copy(), eos_mask, end_mask)

    def _mask_of(self, token_ids: Sequence[int]) -> np.ndarray:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
        bits[[i for i in token_ids if i < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


class _Tokens:
    """A token table as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokens: TokenTable, eos_token_id: int) -> None:
        self.tokens = list(tokens.token_bytes)
        self.special_token_ids = list(tokens.special_token_ids)
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("nothing is tokenized where nothing is forced")


def _fails_at_once(matcher: LLMatcher, like: np.ndarray) -> bool:
    mask = np.empty_like(like)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return matcher.is_error()
