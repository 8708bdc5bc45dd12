"""What a grammar lets a sequence say next, and how it goes ahead with drafts and back."""

import json
import random

import pytest
from grammars import allowed, compile_grammar, fitting, follows, stands_for

from outrider.engine.config import TokenTable
from outrider.engine.grammars.grammar import fit_drafts
from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.engine.grammars.grammar_process import GrammarProcess

A, B, AB, EOS, NEWLINE, NOTHING = range(6)
TOKENS = TokenTable(token_bytes=(b"a", b"b", b"ab", b"<eos>", b"\n", b""), special_token_ids=(EOS,))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENS, (EOS,), len(TOKENS.token_bytes))


def test_what_may_follow_is_what_the_text_can_go_on_with(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, 'start: "a" "b"*')
    assert allowed(grammar) == {A, AB}
    grammar.follow([AB])
    assert allowed(grammar) == {B, EOS}


def test_names_of_control_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    assert allowed(compile_grammar(compiler, "start: /(.|\n)*/")) == {A, B, AB, NEWLINE, EOS}


def test_masks_behind_drafts_follow_the_drafts(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, 'start: "a" "b" "a" "\\n"')
    grammar.drafts = [AB, A, NEWLINE]
    assert [allowed(grammar, j) for j in range(4)] == [{A, AB}, {A}, {NEWLINE}, {EOS}]


@pytest.mark.parametrize("num_accepted", range(4))
def test_rejected_drafts_are_taken_back(compiler: GrammarCompiler, num_accepted: int) -> None:
    grammar = compile_grammar(compiler, 'start: ("a" "b" "\\n")*')
    drafts = [A, B, NEWLINE]
    for _ in range(3):
        grammar.drafts = [*drafts, EOS]
        assert [allowed(grammar, j) for j in range(5)] == [
            {A, AB, EOS},
            {B},
            {NEWLINE},
            {A, AB, EOS},
            {EOS},
        ]
        grammar.follow(drafts[:num_accepted])
        assert allowed(grammar) == [{A, AB, EOS}, {B}, {NEWLINE}][num_accepted % 3]
        grammar.follow(drafts[num_accepted:])


def test_drafts_that_were_drawn_but_not_scored_are_taken_back(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, 'start: "a" "b" "a"')
    grammar.drafts = [A, B]
    assert allowed(grammar, 0) == {A, AB}
    assert allowed(grammar, 1) == {B}
    grammar.follow([])
    assert allowed(grammar) == {A, AB}


def test_drafts_are_cut_where_they_leave_the_grammar(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, 'start: "abab"')
    assert fitting(grammar, [A, B, B, A]) == [A, B]
    assert [allowed(grammar, j) for j in range(3)] == [{A, AB}, {B}, {A, AB}]
    grammar.follow([AB, AB])
    assert fitting(grammar, [A]) == []


def test_drafts_of_all_sequences_are_cut_in_one_question_a_process(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (compile_grammar(compiler, f"start: {text}") for text in ('"abab"', '"ba"'))
    again = compile_grammar(compiler, 'start: "abab"')
    assert again.process is one.process
    asked = []
    ask = GrammarProcess.ask
    monkeypatch.setattr(
        GrammarProcess, "ask", lambda self, questions: (asked.append(self), ask(self, questions))
    )
    again.follow([A])
    fit_drafts([one, other, again], [[A, B, B], [A, B], [B, A, A]])
    assert [each.drafts for each in (one, other, again)] == [[A, B], [], [B, A]]
    assert asked == [one.process, other.process]


def test_few_tokens_are_listed_where_the_text_cannot_end(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, 'start: "b" "ab" "b"?')
    for known, few in (([], {B}), ([B], {A, AB}), ([A], {B}), ([B], set())):
        grammar.follow(known)
        allowed(grammar)
        assert set(grammar.few_allowed()) == few
        assert grammar.few_allowed(most=0) == []


def test_a_complete_text_can_only_end(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, 'start: "a"')
    grammar.follow([A])
    assert allowed(grammar) == {EOS}
    grammar.follow([EOS])  # which a sequence that ignores eos goes beyond
    assert allowed(grammar) == {EOS}
    grammar.drafts = [EOS, EOS]
    assert [allowed(grammar, j) for j in range(1, 3)] == [{EOS}, {EOS}]
    assert grammar.error is None


def test_stop_ids_end_a_text_where_eos_may(compiler: GrammarCompiler) -> None:
    grammar = compile_grammar(compiler, 'start: "ab"+', stop_token_ids=[NEWLINE])
    assert allowed(grammar) == {A, AB}
    grammar.drafts = [AB, NEWLINE, A]
    assert allowed(grammar, 1) == {A, AB, NEWLINE, EOS}
    assert allowed(grammar, 2) == {NEWLINE, EOS}
    assert allowed(grammar, 3) == {NEWLINE, EOS}
    grammar.follow([AB])
    assert allowed(grammar) == {A, AB, NEWLINE, EOS}


def test_sequences_of_one_grammar_go_their_own_ways(compiler: GrammarCompiler) -> None:
    one, other = (compile_grammar(compiler, 'start: "aab"') for _ in range(2))
    one.follow([A, A])
    assert allowed(one) == {B}
    assert allowed(other) == {A}


def test_tokens_of_the_same_bytes_are_allowed_together() -> None:
    twins = TokenTable(token_bytes=(b"a", b"a", b"<eos>"), special_token_ids=(2,))
    assert allowed(compile_grammar(GrammarCompiler(twins, (2,), 3), 'start: "a"')) == {0, 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: nobody", "unknown name"),
        ("start: /(?=a)b/", "look-around"),
        ('start: "xyz"', "no token"),  # no token can spell it
        ('start: a::0\na::_: "a" a::incr(_)?', "panic"),
    ],
)
def test_a_wrong_grammar_says_what_is_wrong(
    compiler: GrammarCompiler, text: str, message: str
) -> None:
    grammar = compile_grammar(compiler, text)
    assert message in (grammar.error or "")
    assert "<state>" not in (grammar.error or "")
    assert "<backtrace>" not in (grammar.error or "")
    assert allowed(grammar) == set()
    assert fitting(grammar, [A]) == []


def test_gbnf_may_name_characters_by_number() -> None:
    texts = {
        r'root ::= "\u0061" [\u0000-\u0062]': "ab",
        r'root ::= "\u00e9\U0001F642" [^\u0000-\U000000ff]': "é🙂\u2028",
        r'root ::= "\u0022\u005c" "\\u0061" [\u005d]': '"\\\\u0061]',
    }
    characters = set().union(*texts.values())
    table = stands_for(*characters)
    compiler = GrammarCompiler(table, (len(characters),), len(characters) + 1)
    for rules, text in texts.items():
        verdict = compiler.check("gbnf", rules, 10).result()
        assert verdict.error is None
        assert follows(compile_grammar(compiler, verdict.lark), table, text)


def test_a_regex_must_end_its_last_escape(compiler: GrammarCompiler) -> None:
    assert compiler.check("regex", r"a\\", 10).result().error is None
    assert "backslash" in (compiler.check("regex", "a\\", 10).result().error or "")


@pytest.fixture(scope="module")
def small_compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENS, (EOS,), len(TOKENS.token_bytes), max_lexer_states=400)


def test_a_grammar_that_outgrew_its_limits_is_compiled_anew(
    small_compiler: GrammarCompiler,
) -> None:
    # Every letter doubles what the automaton has to remember.
    compiler, text = small_compiler, "start: /(a|b)*a(a|b){30}/"
    grammar = compile_grammar(compiler, text)
    letters = random.Random(0)
    for _ in range(600):
        grammar.follow([letters.choice([A, B])])
        allowed(grammar)
    assert grammar.error is not None
    assert allowed(compile_grammar(compiler, text)) == {A, B, AB}


def test_limits_that_are_hit_behind_rejected_drafts_do_not_fail_the_text(
    small_compiler: GrammarCompiler,
) -> None:
    grammar = compile_grammar(small_compiler, "start: /(a|b)*a(a|b){40}/")
    letters = random.Random(0)
    for _ in range(60):  # ever other drafts, so that all sequences' automaton fills again and again
        grammar.drafts = [letters.choice([A, B]) for _ in range(30)]
        allowed(grammar, 30)
        grammar.follow([])
        assert allowed(grammar) == {A, B, AB}
        assert grammar.error is None


def test_texts_that_explode_behind_rejected_drafts_go_on() -> None:
    # With more items, a slow machine would end the process for its time before they are too many.
    compiler = GrammarCompiler(TOKENS, (EOS,), len(TOKENS.token_bytes), max_step_items=500)
    ways = "".join(f'x{i}: e | "a"\n' for i in range(30))
    starts = " | ".join(f'"a" x{i}' for i in range(30))
    grammar = compile_grammar(compiler, f'start: "b" | e\ne: e e | {starts}\n{ways}')
    grammar.drafts = [A] * 30
    assert allowed(grammar, 30) == set()  # too many ways to read them
    grammar.follow([])
    assert allowed(grammar) == {A, B}
    assert grammar.error is None
    grammar.follow([B])
    assert allowed(grammar) == {EOS}


def test_the_token_table_must_be_the_models(compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match="describes 6 of 7 tokens"):
        GrammarCompiler(TOKENS, (EOS,), 7)


def test_texts_are_followed_in_whatever_pieces_they_come() -> None:
    table = stands_for("{", '"', "a", '"a', '":', "1", "}", '{"a', "é"[:1], "\n")
    compiler = GrammarCompiler(table, (10,), 11)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    text = "start: %json " + json.dumps(schema)
    for pieces in (
        ["{", '"', "a", '":', "1", "}"],
        ['{"a', '":', "1", "}"],
        ["{", '"a', '":', "1", "}"],
    ):
        grammar = compile_grammar(compiler, text)
        assert follows(grammar, table, pieces)
        assert 10 in allowed(grammar)
