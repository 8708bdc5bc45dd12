"""Text comes out whole characters at a time, and stops where it must."""

import random

import pytest
from tokenizers.decoders import DecodeStream
from tokenizers_for_tests import EOS, byte_fallback_tokenizer

from outrider.server.text.detokenizer import Detokenizer, StopStrings
from outrider.server.text.tokenizer import Tokenizer


def pieces_of(
    tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, skip: bool = True
) -> list[str]:
    skipped = tokenizer.special_ids if skip else frozenset[int]()
    detokenizer = Detokenizer(tokenizer, prompt or [], skipped_ids=skipped)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def test_characters_are_not_split(tokenizer: Tokenizer) -> None:
    text = "ü 語 🐙🦀 end"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)  # some characters take several tokens
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_make_up_the_text_of_any_tokens(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.backend.get_vocab_size()) for _ in range(30)]
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces_of(tokenizer, ids, skip=skip)) == expected


def test_incomplete_last_character_is_flushed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🐙", add_special_tokens=False)[:-1]
    assert pieces_of(tokenizer, ids)[-1] == "\ufffd"


def test_special_tokens_are_skipped_only_if_asked(tokenizer: Tokenizer) -> None:
    eos = tokenizer.backend.token_to_id(EOS)
    ids = [*tokenizer.encode("a", add_special_tokens=False), eos]
    assert "".join(pieces_of(tokenizer, ids)) == "a"
    assert "".join(pieces_of(tokenizer, ids, skip=False)) == "a<eos>"


def test_first_token_keeps_its_space_after_a_prompt() -> None:
    tokenizer = byte_fallback_tokenizer()
    prompt = tokenizer.encode("the capital is", add_special_tokens=False)
    ids = tokenizer.encode("Paris Hello", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, prompt)) == " Paris Hello"
    assert "".join(pieces_of(tokenizer, ids)) == "Paris Hello"


def test_spaces_are_kept_however_long_the_text() -> None:
    tokenizer = byte_fallback_tokenizer()
    text = " ".join(["Hello world"] * 40)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == text


@pytest.mark.parametrize("num_completing", [0, 1])
def test_prompt_that_ends_within_a_character_changes_nothing(
    tokenizer: Tokenizer, num_completing: int
) -> None:
    octopus = tokenizer.encode("🐙", add_special_tokens=False)
    prompt = octopus * 3 + octopus[:-1]
    ids = octopus[-1:] * num_completing + tokenizer.encode("abc", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, prompt)) == tokenizer.decode(
        ids, skip_special_tokens=True
    )


def test_byte_fallback_survives_bytes_that_are_no_characters() -> None:
    tokenizer = byte_fallback_tokenizer()
    vocab = tokenizer.backend.get_vocab()
    broken = [vocab["▁Hello"], vocab["<0xC3>"], vocab["<0xA9>"], vocab["<0xC3>"], vocab["▁world"]]
    text = "".join(pieces_of(tokenizer, broken))
    assert text.startswith("Hello")
    assert text.endswith(" world")


def stopped(stops: list[str], text: str, sizes: list[int], include: bool = False) -> str:
    matcher = StopStrings(stops, include=include)
    shown, done = "", 0
    for size in sizes:
        shown += matcher.push(text[done : done + size])
        done += size
    shown += matcher.push(text[done:])
    return shown + matcher.flush()


def test_stop_string_before_it_may_stop_is_text() -> None:
    text = "one<stop>two<stop>three"
    for size in range(len(text)):
        matcher = StopStrings(["<stop>", "o"], include=False)
        shown = matcher.push(text[:size], may_stop=False)
        shown += matcher.push(text[size:]) + matcher.flush()
        starts = {stop: text.find(stop, max(0, size - len(stop) + 1)) for stop in ("<stop>", "o")}
        found = [(start + len(stop), start) for stop, start in starts.items() if start >= 0]
        assert shown == text[: min(found)[1] if found else None]


def test_only_what_could_become_a_stop_is_held_back() -> None:
    matcher = StopStrings(["<stop>"], include=False)
    assert matcher.push("a<") == "a"
    assert matcher.push("st") == ""
    assert matcher.push("ay<") == "<stay"
    assert matcher.flush() == "<"


@pytest.mark.parametrize("include", [True, False])
def test_stops_match_a_plain_search(include: bool) -> None:
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randrange(12)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        end, start = min(ends, default=(len(text), len(text)))
        sizes = rng.choices(range(4), k=6)
        assert stopped(stops, text, sizes, include) == text[: end if include else start]


def test_the_stream_of_tokenizers_is_not_exact() -> None:
    """If this fails, it may take the place of ours: compare them on random tokens."""
    tokenizer = byte_fallback_tokenizer()
    vocab, stream = tokenizer.backend.get_vocab(), DecodeStream([], skip_special_tokens=True)
    ids = [vocab[piece] for piece in ("<0x4D>", "<0x8D>", "▁Paris")]
    with pytest.raises(Exception, match="Invalid prefix"):
        assert [stream.step(tokenizer.backend, token_id) for token_id in ids]
