"""What a grammar lets a sequence say next, in token ids. llguidance does the parsing."""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from outrider.engine.config import TokenTable

_MAX_COMPILED = 32
_NUM_THREADS = 2
# A token is allowed if the text may go on with its bytes, however that text would be tokenized.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class Grammar:
    """Where one sequence stands in its grammar: behind its known tokens, or some drafts further.

    `drafts` are those of the current step, as far as the host knows them, and `masks[j]` is what
    may follow j of them: [words] int32, token x being bit x % 32 of word x // 32. Where the text is
    complete that includes the ids that end it. `error` says why nothing may follow any more.
    """

    def __init__(self, matcher: LLMatcher, eos_mask: np.ndarray, end_mask: np.ndarray) -> None:
        self.num_known = 0  # output tokens that it has followed
        self.drafts: list[int] = []
        self.masks: list[np.ndarray] = []
        self.num_words = len(eos_mask)
        self._matcher = matcher
        self._eos_mask, self._end_mask = eos_mask, end_mask
        self._num_ahead = 0  # of the drafts, followed
        self._is_over = False  # an id that ends the text is among the known tokens
        self._is_over_ahead = False

    @property
    def error(self) -> str | None:
        if not self._matcher.is_error():
            return None
        said = self._matcher.get_error().partition("\n<non-verbose/>")[0]
        return "no token can go on with the text" if said == "NoExtensionBias" else said

    def follow(self, token_ids: list[int]) -> None:
        """Forget the step's drafts, and go on by the tokens that became known."""
        if self._num_ahead:
            self._matcher.rollback(self._num_ahead)
        self.drafts, self.masks, self._num_ahead = [], [], 0
        self.num_known += len(token_ids)
        if not self._is_over:
            self._is_over = self._matcher.try_consume_tokens(token_ids) < len(token_ids)
        self._is_over_ahead = self._is_over

    def fitting(self, token_ids: list[int]) -> list[int]:
        """As many of these as may follow the known tokens; they become the step's drafts."""
        num_fitting = 0 if self._is_over else self._matcher.validate_tokens(token_ids)
        self.drafts = token_ids[:num_fitting]
        return self.drafts

    def go_behind(self, num_drafts: int) -> LLMatcher | None:
        """Stand behind that many drafts; None where the text is over or the grammar has failed."""
        for token_id in self.drafts[self._num_ahead : num_drafts]:
            if not self._is_over_ahead:
                num_consumed = self._matcher.try_consume_tokens([token_id])
                self._num_ahead += num_consumed
                self._is_over_ahead = num_consumed == 0
        return None if self._is_over_ahead or self._matcher.is_error() else self._matcher

    def add_mask(self, mask: np.ndarray) -> None:
        """Keep what the matcher said of the place behind `len(masks)` drafts."""
        if self._matcher.is_error():
            mask[:] = 0
        elif self._is_over_ahead:
            mask[:] = self._end_mask
        elif (mask & self._eos_mask).any():
            mask |= self._end_mask
        self.masks.append(mask)


def compute_masks(grammars: list[Grammar]) -> None:
    """The next mask of each, behind one draft more; in parallel."""
    if not grammars:
        return
    masks = np.zeros((len(grammars), grammars[0].num_words), dtype=np.int32)
    matchers = [
        (matcher, i)
        for i, grammar in enumerate(grammars)
        if (matcher := grammar.go_behind(len(grammar.masks))) is not None
    ]
    if matchers:
        _executor().unsafe_compute_mask_ptr(
            matchers, masks.ctypes.data, masks.strides[0], len(masks)
        )
    for grammar, mask in zip(grammars, masks, strict=True):
        grammar.add_mask(mask)


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor()


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
        bits[list(token_ids)] = 1
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
