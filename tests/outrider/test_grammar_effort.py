"""The limits of what a grammar may take of the batch act within a query, whatever the query is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

import pytest

from outrider.grammar import GrammarCompiler, GrammarState, GrammarViolation
from outrider.grammar.effort import CALL_MAX_S, COVERED_S, FREE_S, OWNER_SHARE, TOKEN_MAX_S
from outrider.grammar.state import MAX_RESTARTS
from outrider.sampling_params import GrammarKind, GrammarSpec
from tests import grammars
from tests.outrider.test_grammar import EOS, TOKENIZER_JSON, VOCAB_SIZE, encode

SPEC = GrammarSpec(GrammarKind.REGEX, "[a-z ]*")
LETTERS = encode("a") * 400


class Clock:
    """Processor time of the thread, which goes on with each look at it; and the time of day, which stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.look_s = 0.0
        self.num_looks = 0
        self.now_s = 1000.0
        self._spent_s = 0.0
        monkeypatch.setattr("outrider.grammar.effort.time.thread_time", self._thread_time)
        monkeypatch.setattr("outrider.grammar.effort.time.monotonic", lambda: self.now_s)

    def _thread_time(self) -> float:
        self.num_looks += 1
        self._spent_s += self.look_s
        return self._spent_s

    def pause(self, pause_s: float) -> None:
        self._spent_s += pause_s


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))


@pytest.fixture
def state(compiler: GrammarCompiler) -> GrammarState:
    return grammars.compiled(compiler, SPEC)


@pytest.fixture
def clock(state: GrammarState, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


QUERIES: dict[str, Callable[[GrammarState], object]] = {
    "masks": lambda state: state.masks([LETTERS[:length] for length in range(400)]),
    "valid hints": lambda state: state.num_valid(LETTERS),
    "forced tokens": lambda state: state.forced_after(LETTERS, 10),
    "completeness": lambda state: state.is_complete_after(LETTERS),
}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_ends_within_it_and_is_no_exception(query: str, state: GrammarState, clock: Clock) -> None:
    clock.look_s = 0.05
    with pytest.raises(GrammarViolation):
        QUERIES[query](state)
    assert clock.num_looks <= FREE_S / clock.look_s + 3
    is_for_hints = query in ("masks", "valid hints", "forced tokens")
    assert (state.refusal is None) == is_for_hints  # what only hints need ends no sequence
    assert not state.affords_hints
    assert not state.has_failed  # the lexer is as good as before


def test_a_refused_sequence_is_told_why(state: GrammarState, clock: Clock) -> None:
    clock.look_s = 0.05
    with pytest.raises(GrammarViolation):
        QUERIES["completeness"](state)
    assert state.refusal is not None
    assert "permitted: 25 ms a token and 1 s" in state.refusal


@pytest.mark.parametrize("pause_s", [60.0, 3600.0])
def test_pauses_of_the_machine_end_no_honest_sequence(pause_s: float, state: GrammarState, clock: Clock) -> None:
    """A paused virtual machine adds its pause to the clock of the thread that ran."""
    clock.look_s = 0.001
    for token_id in LETTERS[:60]:
        if state.num_committed in (5, 6, 40):
            state._effort.begin()
            clock.pause(pause_s)
            state._effort.count()
        state.masks([[]])
        state.advance([token_id])
    assert state.refusal is None
    assert state.affords_hints


def test_tokens_pay_for_their_grammar_and_a_saved_up_credit_does_not_exist(state: GrammarState, clock: Clock) -> None:
    clock.look_s = TOKEN_MAX_S / 40
    for token_id in LETTERS[:100]:
        state.masks([[]])
        state.advance([token_id])
    assert state.refusal is None
    assert state.affords_hints
    clock.look_s = 0.05
    with pytest.raises(GrammarViolation):
        QUERIES["completeness"](state)


def test_a_long_text_that_is_read_again_is_paid_for(state: GrammarState, clock: Clock) -> None:
    clock.look_s = TOKEN_MAX_S / 10
    state.advance(LETTERS)
    assert state.refusal is None


def test_the_sequences_of_an_owner_share_what_is_free_and_others_have_their_own(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(owner: str) -> GrammarState:
        return grammars.asked_by(owner, compiler, SPEC)

    many, other = [start("a") for _ in range(32)], start("b")
    clock = Clock(monkeypatch)
    clock.look_s = COVERED_S / 2
    for state in many:
        with pytest.raises(GrammarViolation):
            QUERIES["completeness"](state)
    assert all(state.refusal is not None for state in many)
    spent_s = sum(state._effort.spent_s for state in many)
    assert spent_s < 2 * FREE_S + len(many) * (COVERED_S + 2 * clock.look_s)
    clock.look_s = 0.001
    for state in (other, start("a")):  # nor does one suffer that takes little
        for token_id in LETTERS[:50]:
            state.masks([[]])
            state.advance([token_id])
        assert state.refusal is None
    clock.look_s = COVERED_S / 2
    with pytest.raises(GrammarViolation):
        QUERIES["completeness"](start("a"))
    clock.now_s += 3 * FREE_S / OWNER_SHARE
    before = start("a")
    with pytest.raises(GrammarViolation):
        QUERIES["completeness"](before)
    assert before._effort.spent_s > FREE_S


def test_sequences_that_have_nothing_but_hints_share_what_is_free_as_well(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft worker's: all that they ask for is hints, step after step."""
    states = [grammars.asked_by("a", compiler, SPEC) for _ in range(32)]
    clock = Clock(monkeypatch)
    clock.look_s = COVERED_S / 4
    for _ in range(100):
        for state in states:
            if state.refusal is None:
                with suppress(GrammarViolation):
                    state.masks([LETTERS[:length] for length in range(1, 9)])
    assert all(state.refusal is not None for state in states)
    assert sum(state._effort.spent_s for state in states) < 2 * FREE_S + len(states) * (COVERED_S + 2 * clock.look_s)


def test_hints_end_no_sequence_whose_tokens_pay_for_its_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine masks in a step that commits one token take more than that pays for."""
    states = [grammars.asked_by("", compiler, SPEC) for _ in range(32)]
    clock = Clock(monkeypatch)
    clock.look_s = 0.003
    num_with_hints = 0
    for token_id in LETTERS[:60]:
        for state in states:
            if state.affords_hints:
                num_with_hints += 1
                with suppress(GrammarViolation):
                    state.masks([LETTERS[:length] for length in range(9)])
            state.masks([[]])
            state.advance([token_id])
    assert all(state.refusal is None for state in states)
    assert num_with_hints > 5 * len(states)


def test_however_much_an_owner_takes_its_others_wait_no_longer(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys all tenants are one owner."""
    hostile = [grammars.asked_by("", compiler, SPEC) for _ in range(300)]
    clock = Clock(monkeypatch)
    clock.look_s = COVERED_S
    for state in hostile:
        with pytest.raises(GrammarViolation):
            QUERIES["completeness"](state)
    clock.now_s += FREE_S / OWNER_SHARE
    honest = grammars.asked_by("", compiler, SPEC)
    assert not honest.is_complete_after(LETTERS[:2])
    assert honest._effort.debt_s > 2 * COVERED_S
    assert honest.refusal is None


def test_one_call_counts_for_no_more_than_a_call_can_take(state: GrammarState, clock: Clock) -> None:
    state._effort.begin()
    clock.pause(60.0)
    state._effort.count()
    assert state._effort.debt_s == CALL_MAX_S


def test_hints_that_reach_a_limit_of_the_parser_again_and_again_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.grammar.lexemes.MAX_ITEMS", 1000)
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))
    spec = GrammarSpec(GrammarKind.LARK, 'start: "z" rest\nrest: /[a-y]/ | "z" e\ne: e e | /[a-z]/')
    state = grammars.compiled(compiler, spec)
    hints = encode("z") * 300
    num_failed = 0
    while state.affords_hints and num_failed < 20:
        with pytest.raises(GrammarViolation):
            state.masks([hints[:length] for length in range(len(hints))])
        num_failed += 1
    assert num_failed == MAX_RESTARTS + 2
    state.advance(encode("z"))
    assert state.masks([[]]).any()
    assert state.refusal is None


def test_json_without_surprises_costs_nothing_that_counts(compiler: GrammarCompiler) -> None:
    """On the clock of this machine: an ordinary schema has no debt."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    state = grammars.compiled(compiler, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for token_id in encode('{"name": "x"'):
        state.masks([[]])
        if state.num_valid([token_id]) == 0:
            break
        state.advance([token_id])
    assert state.affords_hints
