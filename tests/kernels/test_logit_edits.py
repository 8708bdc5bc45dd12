"""Edits of single rows, against loops that are written to be read; other rows stay as they were."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from grids import pairwise
from verification import DEVICE, DRAWING_ROADS, ROADS, on_road

from outrider.kernels.edits.bad_words import BadWordsState, apply_bad_words
from outrider.kernels.edits.bitmask import apply_bitmask
from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.edited_rows import put_back, take_rows
from outrider.kernels.edits.penalties import PenaltyState, apply_penalties, count_tokens
from outrider.kernels.edits.thinking import NO_LIMIT, ThinkingState, count_thoughts, end_thoughts
from outrider.kernels.edits.token_bias import BiasState, apply_token_bias
from outrider.kernels.edits.token_mask import num_words, token_mask

PROMPT, KNOWN, WIDTH = 3, 6, 16  # tokens of the prompt, known tokens, room
SHAPES = [(5, 5), (33, 40), (1500, 1500), (2100, 2049)]  # vocabulary, logits of a row
EXACT = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # relative, one rounding


class Case(NamedTuple):
    """Logits of 7 rows, of which 4 are edited; slot 1 has two of them, a draft apart."""

    logits: torch.Tensor
    rows: EditRows
    token_ids: torch.Tensor  # [S, WIDTH]


def make_case(vocab: int, width: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(7, width + 3, generator=generator) * 4).to(DEVICE, dtype)[:, :width]
    token_ids = torch.randint(0, min(vocab, width), (4, WIDTH), generator=generator)
    token_ids[2, 3:] = token_ids[2, 2]  # one token over and over
    columns = ([6, 0, 3, 4], [1, 1, 2, 0], [KNOWN, KNOWN + 1, 9, KNOWN])
    rows = EditRows(*(torch.tensor(column, device=DEVICE) for column in columns))
    return Case(logits, rows, token_ids.int().to(DEVICE))


def prefixes(case: Case) -> list[tuple[int, int, list[int]]]:
    """(row, slot, prefix) of every edited row."""
    listed = zip(*(field.tolist() for field in case.rows), strict=True)
    return [(row, slot, case.token_ids[slot, :end].tolist()) for row, slot, end in listed]


def assert_equal(found: torch.Tensor, truth: torch.Tensor, case: Case) -> None:
    assert torch.allclose(found.float(), truth.float(), rtol=EXACT[found.dtype], atol=1e-6)
    others = [i for i in range(len(found)) if i not in case.rows.row.tolist()]
    assert torch.equal(found[others], case.logits[others])


def table(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def penalties_of(case: Case, vocab: int, num_counted: int) -> PenaltyState:
    seen = torch.zeros(4, vocab, dtype=torch.int32)
    for slot, tokens in enumerate(case.token_ids.tolist()):
        for token in set(tokens[:PROMPT]):
            seen[slot, token] += 1
        for token in tokens[PROMPT:num_counted]:
            seen[slot, token] += 2
    return PenaltyState(
        table(1.0, 1.7, 0.6, 1.0),
        table(0.0, 0.5, -0.3, 0.0),
        table(0.0, -0.4, 1.1, 0.0),
        seen.to(DEVICE),
        table(*[num_counted] * 4, dtype=torch.int64),
    )


@pytest.mark.parametrize(("shape", "dtype", "road"), pairwise(SHAPES, [*EXACT], DRAWING_ROADS))
def test_penalties_count_the_prefix_of_each_row(
    shape: tuple[int, int], dtype: torch.dtype, road: str
) -> None:
    vocab, width = shape
    case = make_case(vocab, width, dtype)
    penalties = penalties_of(case, vocab, KNOWN)
    truth = case.logits.clone()
    for row, slot, prefix in prefixes(case):
        counts = Counter(prefix[PROMPT:])
        for token in set(prefix):
            logit = float(truth[row, token])
            factor = float(penalties.repetition[slot])
            logit = logit / factor if logit > 0 else logit * factor
            logit -= float(penalties.frequency[slot]) * counts[token]
            logit -= float(penalties.presence[slot]) * (counts[token] > 0)
            truth[row, token] = logit
    found = case.logits.clone()
    with on_road(road):
        apply_penalties(found, case.rows, penalties, case.token_ids)
    assert_equal(found, truth, case)
    assert not torch.equal(found, case.logits)


def test_penalties_do_not_depend_on_how_much_is_counted(road: str) -> None:
    case = make_case(40, 40, torch.float32)
    results = []
    for num_counted in (PROMPT, KNOWN - 1, KNOWN):
        found = case.logits.clone()
        with on_road(road):
            apply_penalties(found, case.rows, penalties_of(case, 40, num_counted), case.token_ids)
        results.append(found)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("known", [PROMPT, KNOWN, KNOWN + 3])
def test_what_is_counted_is_what_a_recount_gives(known: int, road: str) -> None:
    """Of slots with penalties; one has a token several times over."""
    case = make_case(40, 40, torch.float32)
    num_tokens = table(known, known, known, known, dtype=torch.int64)
    counted, truth = penalties_of(case, 40, PROMPT), penalties_of(case, 40, known)
    with on_road(road):
        for _ in range(2):  # the second time nothing is new
            count_tokens(counted, table(3, 1, 3, 2).int(), case.token_ids, num_tokens)
    assert torch.equal(counted.seen[1:3], truth.seen[1:3])
    assert counted.num_counted.tolist() == [PROMPT, known, known, PROMPT]
    assert torch.equal(counted.seen[[0, 3]], penalties_of(case, 40, PROMPT).seen[[0, 3]])


def test_an_answer_is_counted_at_once_however_long_it_is(road: str) -> None:
    num_tokens = 200  # more than the lanes of one pass
    token_ids = torch.randint(0, 9, (1, num_tokens + 7), dtype=torch.int32, device=DEVICE)
    seen = torch.zeros(1, 9, dtype=torch.int32, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    penalties = PenaltyState(2 * one, one, one, seen, table(5, dtype=torch.int64))
    with on_road(road):
        known = table(num_tokens, dtype=torch.int64)
        count_tokens(penalties, table(0).int(), token_ids, known)
    assert seen[0].tolist() == (2 * token_ids[0, 5:num_tokens].bincount(minlength=9)).tolist()


def test_a_banned_token_stays_banned_whatever_the_penalty(road: str) -> None:
    case = make_case(40, 40, torch.float32)
    found = torch.full_like(case.logits, -torch.inf)
    with on_road(road):
        apply_penalties(found, case.rows, penalties_of(case, 40, KNOWN), case.token_ids)
    assert bool((found == -torch.inf).all())


@pytest.mark.parametrize(("shape", "dtype", "road"), pairwise(SHAPES, [*EXACT], DRAWING_ROADS))
def test_biases_are_added_and_early_ends_are_banned(
    shape: tuple[int, int], dtype: torch.dtype, road: str
) -> None:
    vocab, width = shape
    case = make_case(vocab, width, dtype)
    num_entries = [0, min(vocab, 300), 2, 0]
    token_ids = torch.stack([torch.randperm(max(vocab, 300)) for _ in num_entries])[:, :300]
    bias = torch.randn(4, 300)
    banned_until = torch.randint(KNOWN - 1, KNOWN + 2, (4, 300))
    token_bias = BiasState(
        token_ids.int().to(DEVICE),
        bias.to(DEVICE),
        banned_until.to(DEVICE),
        table(*num_entries, dtype=torch.int32),
    )
    truth = case.logits.clone()
    for row, slot, prefix in prefixes(case):
        own = [e for e in range(num_entries[slot]) if int(token_ids[slot, e]) < min(vocab, width)]
        banned = [e for e in own if len(prefix) < int(banned_until[slot, e])]
        if len(banned) == min(vocab, width):
            banned = []
        for entry in own:
            added = -torch.inf if entry in banned else bias[slot, entry]
            truth[row, int(token_ids[slot, entry])] += added
    found = case.logits.clone()
    with on_road(road):
        apply_token_bias(found, case.rows, token_bias, vocab)
    assert_equal(found, truth, case)


@pytest.mark.parametrize(("shape", "dtype", "road"), pairwise(SHAPES, [*EXACT], DRAWING_ROADS))
@pytest.mark.parametrize("num_others", [0, 1])
def test_a_ban_of_early_ends_never_takes_the_last_token(
    num_others: int, shape: tuple[int, int], dtype: torch.dtype, road: str
) -> None:
    """Earlier edits may have left nothing but the ends: a grammar whose text is complete."""
    vocab, width = shape
    case = make_case(vocab, width, dtype)
    shared = min(vocab, width)
    ends, other = [shared - 1, 1, 0], shared - 2  # the last end is banned already
    left = [*ends[:2], *[other] * num_others]
    found = torch.full_like(case.logits, -torch.inf)
    found[:, shared:] = case.logits[:, shared:]  # padding, which is no token
    found[:, left] = case.logits[:, left]
    entries = [*ends, other]
    token_bias = BiasState(
        table(*entries).int().expand(4, 4).contiguous(),
        table(0.5, 0.0, 1.0, -0.25).expand(4, 4).contiguous(),
        table(*[WIDTH] * 3, 0, dtype=torch.int64).expand(4, 4).contiguous(),
        table(4, 4, 4, 4, dtype=torch.int32),
    )
    truth = found.clone()
    for row, *_ in prefixes(case):
        truth[row, ends[0]] += -torch.inf if num_others else 0.5
        truth[row, ends[1]] += -torch.inf if num_others else 0.0
        truth[row, other] += -0.25
    before = found.clone()
    with on_road(road):
        apply_token_bias(found, case.rows, token_bias, vocab)
    assert_equal(found, truth, case._replace(logits=before))


def test_neither_a_bias_nor_a_ban_hides_nan(road: str) -> None:
    case = make_case(40, 40, torch.float32)
    ids, bias, until = table(3, 5).int(), table(1.0, 1.0), table(KNOWN + 9, 0, dtype=torch.int64)
    token_bias = BiasState(
        *(field.expand(4, 2).contiguous() for field in (ids, bias, until)),
        table(2, 2, 2, 2, dtype=torch.int32),
    )
    found = torch.full_like(case.logits, torch.nan)
    with on_road(road):
        apply_token_bias(found, case.rows, token_bias, 40)
    assert bool(found.isnan().all())


@pytest.mark.parametrize(("shape", "dtype", "road"), pairwise(SHAPES, [*EXACT], DRAWING_ROADS))
def test_bad_words_ban_what_would_complete_them_in_the_output(
    shape: tuple[int, int], dtype: torch.dtype, road: str
) -> None:
    vocab, width = shape
    case = make_case(vocab, width, dtype)
    words: list[list[list[int]]] = [[], [[1], [4, 2]], [], []]
    for _, slot, prefix in prefixes(case):
        if slot:
            # Those that begin in the prompt are no words of the output, and ban no 4.
            begins = [(prefix[-n:], n > len(prefix) - PROMPT) for n in range(1, len(prefix) + 1)]
            words[slot] += [[*before, 4 if in_prompt else 3] for before, in_prompt in begins]
            words[slot] += [[*prefix[-2:-1], prefix[-1] ^ 1, 0]]
    words[2] *= 12  # more than the lanes of one pass
    flat = [[token for word in of for token in word] for of in words]
    token_ids = torch.zeros(4, max(map(len, flat)) + 1, dtype=torch.int32)
    end = torch.zeros(4, max(map(len, words)) + 1, dtype=torch.int32)
    for slot, of in enumerate(words):
        token_ids[slot, : len(flat[slot])] = torch.tensor(flat[slot])
        end[slot, : len(of)] = torch.tensor([len(word) for word in of]).cumsum(0)
    truth = case.logits.clone()
    for row, slot, prefix in prefixes(case):
        output = prefix[PROMPT:]
        for *before, last in words[slot]:
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                truth[row, last] = -torch.inf
    found = case.logits.clone()
    bad_words = BadWordsState(
        token_ids.to(DEVICE),
        end.to(DEVICE),
        table(*map(len, words), dtype=torch.int32),
        table(*[PROMPT] * 4, dtype=torch.int64),
    )
    with on_road(road):
        apply_bad_words(found, case.rows, bad_words, case.token_ids)
    assert_equal(found, truth, case)
    assert bool((found[[6, 0, 3], 3] == -torch.inf).all())


@pytest.mark.parametrize(("shape", "dtype", "road"), pairwise(SHAPES, [*EXACT], DRAWING_ROADS))
def test_a_bitmask_keeps_what_it_names(
    shape: tuple[int, int], dtype: torch.dtype, road: str
) -> None:
    vocab, width = shape
    case = make_case(vocab, width, dtype)
    generator = torch.Generator().manual_seed(width)
    kept = torch.rand(3, vocab, generator=generator) < 0.5
    ids = [[*row.nonzero().flatten().tolist(), vocab] for row in kept]
    bitmask = torch.from_numpy(np.stack([token_mask(each, vocab) for each in ids]))
    assert bitmask.shape == (3, num_words(vocab))
    of = table(2, 0, 2, 1, dtype=torch.int64)
    truth = case.logits.clone()
    for row, mask in zip(case.rows.row.tolist(), of.tolist(), strict=True):
        shared = min(vocab, width)
        banned = ~kept[mask, :shared].to(DEVICE)
        truth[row, :shared] = truth[row, :shared].masked_fill(banned, -torch.inf)
    found = case.logits.clone()
    with on_road(road):
        apply_bitmask(found, case.rows._replace(slot=of), bitmask.to(DEVICE), vocab)
    assert torch.equal(found, truth)


OPEN, CLOSE = 3, 4


def thinking_case(width: int, dtype: torch.dtype) -> tuple[Case, list[list[int]]]:
    """Rows 6 and 0 are a draft apart, and row 3 is of another sequence; row 4 is of the dummy."""
    case = make_case(5, width, dtype)
    prefixes = [
        [0] * 9,
        [0, 1, OPEN, 2, 2, 0, 1],  # 3 tokens of thinking, and 4 behind the draft
        [OPEN, 0, 1, CLOSE, 0, 0, OPEN, 1, OPEN],  # 2 in one thought, 2 more in the next
        [0] * 9,
    ]
    for slot, tokens in enumerate(prefixes):
        case.token_ids[slot, : len(tokens)] = table(*tokens).int()
    return case, prefixes


@pytest.mark.parametrize("num_counted", [0, 2, KNOWN])
@pytest.mark.parametrize(("shape", "dtype", "road"), pairwise(SHAPES, [*EXACT], DRAWING_ROADS))
def test_a_thought_ends_once_its_tokens_are_spent(
    num_counted: int, shape: tuple[int, int], dtype: torch.dtype, road: str
) -> None:
    vocab, width = shape
    case, prefixes = thinking_case(width, dtype)
    for num_tokens in range(6):
        for num_opening in (0, 1):
            states = [
                ThinkingState(OPEN, CLOSE, num_opening, 0, 0, num_tokens).after(each[:num_counted])
                for each in prefixes
            ]
            truth = case.logits.clone()
            # By row: the tokens of all its thoughts, and how many thoughts it has begun.
            for row, spent, begun in ((6, 3, 1), (0, 4, 1), (3, 4, 2)):
                if spent - begun * num_opening >= num_tokens:
                    truth[row, : min(vocab, width)] = -torch.inf
                    truth[row, CLOSE] = case.logits[row, CLOSE]
            found, thoughts = case.logits.clone(), torch.tensor(states, device=DEVICE)
            with on_road(road):
                end_thoughts(found, case.rows, thoughts, case.token_ids, vocab)
            assert torch.equal(found, truth)


def test_nothing_ends_where_no_thought_is_open_or_its_end_is_banned(road: str) -> None:
    case, prefixes = thinking_case(40, torch.float32)
    ended = [[*tokens[:5], CLOSE] for tokens in prefixes]
    states = [ThinkingState(OPEN, CLOSE, 0, len(each), 0, 9).after(each) for each in ended]
    states[1] = ThinkingState(0, CLOSE, 0, KNOWN + 1, 0, 0)  # nothing opened
    states[2] = ThinkingState(OPEN, CLOSE, 0, 9, 1, -1)
    for hidden in (-torch.inf, torch.nan):
        logits = case.logits.clone()
        logits[:, CLOSE] = hidden
        found = logits.clone()
        with on_road(road):
            thoughts = torch.tensor(states, device=DEVICE)
            end_thoughts(found, case.rows, thoughts, case.token_ids, 40)
        assert torch.equal(found.nan_to_num(7.0), logits.nan_to_num(7.0))


@pytest.mark.parametrize("road", ROADS)
def test_thoughts_are_counted_as_far_as_tokens_are_known(road: str) -> None:
    case, prefixes = thinking_case(40, torch.float32)
    begun = [ThinkingState(OPEN, CLOSE, 1, 2, 0, 5), *[NO_LIMIT] * 3]
    begun[1] = ThinkingState(OPEN, CLOSE, 1, 0, 0, 5).after(prefixes[1][:3])
    begun[2] = ThinkingState(OPEN, CLOSE, 0, 0, 0, 5).after(prefixes[2][:1])
    thoughts = torch.tensor(begun, device=DEVICE)
    num_tokens = table(2, 7, 9, 0, dtype=torch.int64)
    with on_road(road):
        for _ in range(2):  # the second time nothing is new
            count_thoughts(thoughts, table(3, 1, 3, 0, 2).int(), case.token_ids, num_tokens)
    truth = [begun[0], begun[1].after(prefixes[1][3:7]), begun[2].after(prefixes[2][1:9]), NO_LIMIT]
    assert thoughts.tolist() == [[*each] for each in truth]


@pytest.mark.parametrize("road", ROADS)
def test_a_slot_without_a_limit_ends_no_thought(road: str) -> None:
    case, _ = thinking_case(40, torch.float32)
    thoughts, found = torch.tensor([NO_LIMIT] * 4, device=DEVICE), case.logits.clone()
    with on_road(road):
        end_thoughts(found, case.rows, thoughts, case.token_ids, 40)
    assert torch.equal(found, case.logits)


@pytest.mark.parametrize(("shape", "dtype", "road"), pairwise(SHAPES, [*EXACT], ROADS))
def test_rows_of_edited_slots_alone_are_taken_and_put_back(
    shape: tuple[int, int], dtype: torch.dtype, road: str
) -> None:
    case = make_case(*shape, dtype)
    is_edited = table(0, 1, 0, 0, dtype=torch.bool)  # that of rows 6 and 0
    truth, found = case.logits.clone(), case.logits.clone()
    truth[[6, 0]] *= -2  # which rounds nothing: the interpreter rounds in another way
    with on_road(road):
        copies = take_rows(found, case.rows, is_edited)
        assert copies.dtype == torch.float32
        assert torch.equal(copies[:2], case.logits[[6, 0]].float())
        copies[:2] *= -2
        copies[2:] = torch.nan
        put_back(found, case.rows, is_edited, copies)
    assert torch.equal(found, truth)
