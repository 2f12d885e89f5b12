"""Sessions that follow a grammar, on a real engine: always a sentence, the same whatever was hinted (I2).

The model is a tiny random one, so whatever sense there is in a text comes from its grammar. The hostile draft says
what the grammar forbids, ends the text in the middle and goes on beyond its end; under rejection sampling it is bound
by what binds every draft, that a hint is sampled from the distribution beside it (I5).
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
from llguidance import LLParserLimits
from scipy import stats

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.sampling.randomness import mix
from outrider.errors import InvalidRequest
from outrider.grammar import GrammarCompiler, GrammarState, GrammarViolation
from outrider.grammar.effort import FREE_S
from outrider.hints.hint_tree import ROOT_ID, WEIGHT_TOTAL_MAX, DraftDistribution, Hint
from outrider.hints.step_cost import StepCost, StepLine
from outrider.observability.telemetry import TargetMetrics
from outrider.sampling_params import (
    AcceptanceRule,
    GrammarKind,
    GrammarSpec,
    SamplingParams,
    SpeculationSettings,
)
from protos.outrider.v1 import target_pb2
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    HintsArrived,
    SessionAborted,
    SessionEnded,
    SessionRefused,
    StartSession,
    TokensCommitted,
)
from target_worker.runner import TargetCore
from target_worker.scheduling.scheduler import Scheduler
from tests import grammars, models
from tests.schemas.walk import permitted_token_ids

ERROR_RATE = 1e-4
"""Probability that a chi-square test fails by chance for random seeds; they are fixed, so no test is flaky."""
EOS = 0
PROMPT = [40, 41, 42]
STOP = target_pb2.FINISH_REASON_STOP

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4, "pattern": "^[a-z]*$"},
        "is_known": {"type": "boolean"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "is_known", "age"],
    "additionalProperties": False,
}
REGEXES = {
    "short": "[a-d][e-h]?",
    "forced": "The answer is (yes|no), as I said before\\.",
    "choices": "(import|def|return)( [a-f]{1,3}){1,3}",
    "empty": "",
}
SPECS = {name: GrammarSpec(GrammarKind.REGEX, text) for name, text in REGEXES.items()} | {
    "person": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    "constant": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"const": "all of it is forced"})),
}


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(models.model_dir("llama") / "tokenizer.json"))


@functools.cache
def compiler() -> GrammarCompiler:
    path = models.model_dir("llama") / "tokenizer.json"
    return GrammarCompiler(path, vocab_size=models.VOCAB_SIZE, eos_token_ids=frozenset([EOS]))


@functools.cache
def beginning(name: str) -> GrammarState:
    return grammars.compiled(compiler(), SPECS[name])


def compiled(name: str) -> GrammarState:
    """A state of one's own before the first token."""
    return beginning(name).fork()


def check_is_sentence(name: str, token_ids: Sequence[int]) -> None:
    state = compiled(name)
    assert state.num_valid([*token_ids, EOS]) == len(token_ids) + 1
    text = str(tokenizer().decode(list(token_ids), skip_special_tokens=False))
    if name in REGEXES:
        assert re.fullmatch(REGEXES[name], text), text
    elif name == "person":
        jsonschema.validate(json.loads(text), PERSON)
    else:
        assert text == '"all of it is forced"'


Draft = Callable[["Running"], list[Hint]]


@dataclass
class Running:
    """The events of one session: its request, its output, its steps and its end."""

    event: StartSession
    grammar_name: str
    rng: random.Random
    output: list[int]
    next_node_id: int = 1
    steps: list[TokensCommitted] = field(default_factory=list)
    ended: SessionEnded | None = None

    @property
    def text(self) -> list[int]:
        return [*self.event.token_ids[: self.event.num_prompt_tokens], *self.output]

    def facts(self) -> tuple[list[int], int, int | None]:
        """The output, the finish reason and the stop token, which are all that a client sees."""
        assert self.ended is not None
        assert self.ended.num_output_tokens == len(self.output)
        return self.output, self.ended.reason, self.ended.stop_token_id


def hostile(running: Running) -> list[Hint]:
    """A tree below what was committed: mostly permitted tokens, and everything that may do harm."""
    rng, hints = running.rng, list[Hint]()
    is_sampled = running.event.sampling.temperature > 0 and running.event.sampling.seed is None
    places: list[tuple[int, list[int]]] = [(ROOT_ID, [])]
    state = compiled(running.grammar_name)
    state.advance(running.output)
    for _ in range(rng.randrange(1, 8)):
        parent_id, said = places[-1] if rng.random() < 0.8 else rng.choice(places)
        walker = state.fork()
        permitted: list[int] = []
        if walker.num_valid(said) == len(said):
            walker.advance(said)
            permitted = permitted_token_ids(walker)
        support = rng.sample(permitted, min(len(permitted), rng.randint(1, 4)))
        if rng.random() < 0.4 or not support:
            support += [EOS, *rng.sample(range(models.VOCAB_SIZE), 2)]
        support = list(dict.fromkeys(support))
        weights = [rng.choice([1, 1000, 9000]) for _ in support]
        distribution = DraftDistribution(tuple(support), tuple(weights))
        assert distribution.total <= WEIGHT_TOTAL_MAX
        token_id = rng.choices(support, weights)[0]
        hints.append(Hint(running.next_node_id, parent_id, token_id, distribution if is_sampled else None))
        places.append((running.next_node_id, [*said, token_id]))
        running.next_node_id += 1
    return hints


class FreeHints(StepCost):
    """All hints are verified, and no clock has a say, so that a run repeats itself."""

    def line(self, num_context: int = 0) -> StepLine:
        return StepLine(20.0, 1e-4)


def target_core(**limits: Any) -> TargetCore:
    engine = models.engine("llama")
    values: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_waiting": 4000,
        "max_num_batched_tokens": 200,
        "max_model_len": 200,
        "num_speculative_tokens": 6,
        "hint_wait_ms_max": 0.0,
        "end_of_sequence_ids": frozenset({EOS}),
    }
    # An allocator of one's own: a test that fails leaves nothing behind in the engine.
    allocator = BlockAllocator(engine.allocator.num_blocks, engine.allocator.block_size)
    scheduler = Scheduler(SchedulerLimits(**(values | limits)), allocator, engine.vocab_size)
    scheduler.cost = FreeHints()
    return TargetCore(scheduler, engine, TargetMetrics("tiny", "target"))


def run(starts: Sequence[tuple[str, StartSession]], draft: Draft | None = None, luck: int = 0) -> list[Running]:
    """Sessions of (grammar's name, event) run together to their ends."""
    core = target_core()
    world: dict[str, Running] = {}

    def take(actions: Sequence[Action]) -> None:
        for action in actions:
            assert not isinstance(action, SessionRefused), action
            running = world[action.session_id]
            if isinstance(action, TokensCommitted):
                assert running.ended is None
                running.output += action.token_ids
                running.steps.append(action)
            elif isinstance(action, SessionEnded):
                running.ended = action

    for name, event in starts:
        given = event.token_ids[event.num_prompt_tokens :]
        rng = random.Random(f"{luck}-{event.session_id}")
        world[event.session_id] = Running(event, name, rng, list(given))
        take(core.handle(replace(event, grammar=compiled(name)), 0.0))
    for _ in range(20_000):
        if draft is not None:
            for session_id in list(core.scheduler._slots.running):
                running = world[session_id]
                if running.rng.random() < 0.8 and (hints := draft(running)):
                    core.handle(HintsArrived(session_id, 1, len(running.text), hints, 0.0), 0.0)
        actions, until = core.run_next(0.0)
        take(actions)
        if until is None:
            break
    core.scheduler.allocator.check_integrity([])
    assert all(running.ended is not None for running in world.values())
    return list(world.values())


def start(
    session_id: str,
    mode: str,
    *,
    rule: AcceptanceRule = AcceptanceRule.BLOCK,
    output: Sequence[int] = (),
    is_plain: bool = False,
    seed: int = 5,
    **sampling: Any,
) -> StartSession:
    values: dict[str, Any] = {"max_tokens": 120, "temperature": 0.0 if mode == "greedy" else 1.5} | sampling
    values["seed"] = seed if mode == "coupled" else None
    return StartSession(
        session_id,
        [*PROMPT, *output],
        len(PROMPT),
        SamplingParams(**values),
        SpeculationSettings(acceptance_rule=rule, is_plain=is_plain),
        seed,
    )


MODES = ["greedy", "coupled", "rejection"]
DRAFTS: dict[str, Draft | None] = {"none": None, "hostile": hostile}


@pytest.mark.parametrize("ignore_eos", [False, True], ids=["", "ignore-eos"])
@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("draft", DRAFTS)
def test_sampled_output_is_always_a_sentence(draft: str, rule: AcceptanceRule, ignore_eos: bool) -> None:
    starts = [
        (name, start(f"{name}{i}", "rejection", rule=rule, seed=mix(i), ignore_eos=ignore_eos))
        for name in SPECS
        for i in range(4)
    ]
    for running in run(starts, DRAFTS[draft]):
        output, reason, _ = running.facts()
        assert reason == STOP
        if ignore_eos and output[-1:] == [EOS]:
            output = output[:-1]  # said where the text might have gone on, and not hidden
        check_is_sentence(running.grammar_name, output)


@pytest.mark.parametrize("ignore_eos", [False, True], ids=["", "ignore-eos"])
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_neither_forced_tokens_nor_a_hostile_draft_change_what_is_said(mode: str, ignore_eos: bool) -> None:
    """I2, down to how the session ended."""

    def starts(prefix: str, *, is_plain: bool = False) -> list[tuple[str, StartSession]]:
        return [(name, start(f"{prefix}{name}", mode, is_plain=is_plain, ignore_eos=ignore_eos)) for name in SPECS]

    plain = {running.grammar_name: running for running in run(starts("plain", is_plain=True))}
    for name, running in plain.items():
        assert running.ended is not None
        assert running.ended.stats.num_forced_tokens == running.ended.stats.num_draft_tokens == 0
        assert running.ended.reason == STOP
        if not ignore_eos:
            check_is_sentence(name, running.output)
    copies = [each for number in range(3) for each in starts(f"{number}")]
    for running in [*run(starts("alone")), *run(copies, hostile)]:
        assert running.facts() == plain[running.grammar_name].facts(), running.grammar_name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["forced", "constant", "person"])
def test_without_a_draft_forced_tokens_save_steps(name: str, mode: str) -> None:
    (running,) = run([(name, start("a", mode))])
    assert running.ended is not None
    stats = running.ended.stats
    assert stats.num_forced_tokens > 0
    assert stats.num_draft_tokens == stats.num_accepted_draft_tokens == 0
    assert stats.num_steps == len(running.steps) <= 0.7 * len(running.output)
    accepted = sum(len(step.token_ids) - 1 for step in running.steps)
    assert stats.num_forced_tokens <= accepted + 1


def test_sessions_that_share_a_batch_do_not_share_a_grammar() -> None:
    names = list(SPECS) * 2
    starts = [(name, start(f"s{i}", MODES[i % 3], seed=i)) for i, name in enumerate(names)]
    for name, running in zip(names, run(starts, hostile), strict=True):
        assert running.facts()[1] == STOP
        check_is_sentence(name, running.output)


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("name", ["person", "choices"])
def test_a_session_that_was_moved_goes_on_as_if_it_had_stayed(name: str, mode: str) -> None:
    """Committed tokens are replayed into the grammar."""
    (whole,) = run([(name, start("a", mode))])
    for num_given in range(1, len(whole.output), 2):
        (moved,) = run([(name, start("a", mode, output=whole.output[:num_given]))], hostile)
        assert moved.facts()[:2] == whole.facts()[:2]


def test_committed_tokens_that_leave_the_grammar_are_refused() -> None:
    core = target_core()
    wrong = tokenizer().encode("x").ids[0]
    event = replace(start("a", "greedy", output=[wrong]), grammar=compiled("short"))
    (action,) = core.handle(event, 0.0)
    assert isinstance(action, SessionRefused)
    assert isinstance(action.error, InvalidRequest)
    assert action.error.parameter == "token_ids"
    assert "leave the grammar" in action.error.message
    assert core.run_next(0.0) == ([], None)
    core.scheduler.allocator.check_integrity([])


def test_a_text_that_is_too_short_for_its_grammar_ends_by_length() -> None:
    for draft in DRAFTS.values():
        (running,) = run([("constant", start("a", "greedy", max_tokens=5))], draft)
        assert running.facts() == (
            compiled("constant").forced_after([], 5),
            target_pb2.FINISH_REASON_LENGTH,
            None,
        )


def test_parameters_that_forbid_what_the_grammar_asks_for_end_the_session_cleanly() -> None:
    """The session ends at the same position with hints and without."""
    forced = compiled("forced").forced_after([], 99)
    params: dict[str, Any] = {"bad_words": ((forced[4], forced[5]),)}
    for mode in MODES:
        for draft in DRAFTS.values():
            (running,) = run([("forced", start("a", mode, **params))], draft)
            assert running.facts() == (forced[:5], target_pb2.FINISH_REASON_NO_TOKEN, None)


# The distribution of whole sentences.


@functools.cache
def exact_distribution(name: str, temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of each complete output, from transformers' own model, masked position by position."""
    model = models.random_model("llama")
    finished: dict[tuple[int, ...], float] = {}
    open_prefixes: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_prefixes:
        prefix, reach = open_prefixes.pop()
        state = compiled(name)
        state.advance(prefix)
        if state.is_complete:
            finished[prefix] = reach
            continue
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*PROMPT, *prefix]]), use_cache=False).logits[0, -1]
        mask = torch.from_numpy(state.masks([[]])[0])
        probs = torch.softmax(logits.double().masked_fill(~mask, -torch.inf) / temperature, dim=-1).tolist()
        for token_id in permitted_token_ids(state):
            if token_id == EOS:
                finished[prefix] = reach * probs[EOS]
            else:
                open_prefixes.append(((*prefix, token_id), reach * probs[token_id]))
    assert sum(finished.values()) == pytest.approx(1.0)
    return finished


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square; sentences that expect fewer than 5 are put together."""
    assert counts.keys() <= expected.keys(), counts.keys() - expected.keys()
    total = counts.total()
    cells = sorted((probability * total, counts[key]) for key, probability in expected.items())
    observed, wanted = [0.0], [0.0]
    for expects, count in cells:
        if wanted[-1] >= 5:
            wanted.append(0.0)
            observed.append(0.0)
        wanted[-1] += expects
        observed[-1] += count
    if wanted[-1] < 5:
        wanted[-2:], observed[-2:] = [sum(wanted[-2:])], [sum(observed[-2:])]
    assert len(wanted) > 3, "too certain to tell anything"
    return float(stats.chisquare(observed, np.array(wanted) * (total / sum(wanted))).pvalue)


TEMPERATURE = 2.0


@pytest.mark.parametrize(
    ("rule", "draft"),
    [(AcceptanceRule.BLOCK, "none"), (AcceptanceRule.BLOCK, "hostile"), (AcceptanceRule.TOKEN, "hostile")],
)
@pytest.mark.thorough
def test_sampled_sentences_follow_the_masked_distribution(rule: AcceptanceRule, draft: str) -> None:
    num_samples = 2500
    starts = [
        ("short", start(f"s{i}", "rejection", rule=rule, seed=mix(i), temperature=TEMPERATURE))
        for i in range(num_samples)
    ]
    results = run(starts, DRAFTS[draft], luck=3)
    counts = Counter(tuple(running.output) for running in results)
    ended = [running.ended for running in results if running.ended is not None]
    if draft == "hostile":
        assert sum(each.stats.num_draft_tokens for each in ended) > num_samples / 4
        assert sum(each.stats.num_accepted_draft_tokens for each in ended) > num_samples / 20
    assert p_value(counts, exact_distribution("short", TEMPERATURE)) > ERROR_RATE


def test_another_temperature_would_be_noticed() -> None:
    starts = [("short", start(f"s{i}", "rejection", seed=mix(i), temperature=TEMPERATURE)) for i in range(600)]
    counts = Counter(tuple(running.output) for running in run(starts))
    assert p_value(counts, exact_distribution("short", 1.3)) < ERROR_RATE


# Limits of the parser.

LIMITED = """start: "z" rest
rest: "x" "y"* | "a" many
many: one*
one: "b" | "b" "b" | one "c"
"""
"""Ambiguous: after "za", the more b the more places the parser has to keep."""


def limits(**options: Any) -> LLParserLimits:
    return LLParserLimits(**{**options, "step_max_items": 16})


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a grammar whose parser gives up soon."""
    monkeypatch.setattr("outrider.grammar.compiler.LLParserLimits", limits)
    monkeypatch.setitem(SPECS, "limited", GrammarSpec(GrammarKind.LARK, LIMITED))
    yield "limited"
    beginning.cache_clear()


def token(character: str) -> int:
    (token_id,) = tokenizer().encode(character).ids
    return int(token_id)


def into_the_limit(running: Running) -> list[Hint]:
    """After "z" it says "x", or "a" and so many "b" that the parser gives up, as the target's own chances are."""
    if len(running.output) != 1:
        return []
    chance = exact_chance_of_a(running.event.sampling.temperature or 1.0)
    weights = (int(chance * 60_000), 60_000 - int(chance * 60_000))
    distribution = DraftDistribution((token("a"), token("x")), weights)
    said = running.rng.choices(distribution.token_ids, weights)
    hints = [Hint(1, ROOT_ID, said[0], distribution)]
    if said == [token("a")]:
        hints += [Hint(i, i - 1, token("b")) for i in range(2, 7)]
    return hints


@functools.cache
def exact_chance_of_a(temperature: float) -> float:
    with torch.inference_mode():
        ids = torch.tensor([[*PROMPT, token("z")]])
        logits = models.random_model("llama")(input_ids=ids, use_cache=False).logits[0, -1].double()
    return float(torch.softmax(logits[[token("a"), token("x")]] / temperature, dim=-1)[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_text_that_runs_into_a_limit_of_the_parser_ends_and_the_worker_goes_on(limited: str, mode: str) -> None:
    """I7: a request's grammar must not end the model thread."""
    bias = ((token("a"), 100.0), (token("b"), 50.0), (EOS, -100.0))
    for draft in (None, into_the_limit):
        starts = [(limited, start("a", mode, logit_bias=bias)), ("person", start("b", mode))]
        running, other = run(starts, draft)
        output, reason, _ = running.facts()
        assert reason == target_pb2.FINISH_REASON_NO_TOKEN
        assert output[:3] == [token("z"), token("a"), token("b")]
        check_is_sentence("person", other.output)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", AcceptanceRule)
def test_guesses_that_run_into_a_limit_of_the_parser_bias_nothing(limited: str, rule: AcceptanceRule) -> None:
    """Dropped, and the token drawn anew, a guess would lower the chance of what it said."""
    num_samples = 1500
    starts = [
        (limited, start(f"s{i}", "rejection", rule=rule, seed=mix(i), temperature=TEMPERATURE, max_tokens=8))
        for i in range(num_samples)
    ]
    counts = Counter(running.output[1] for running in run(starts, into_the_limit, luck=1))
    assert set(counts) == {token("a"), token("x")}
    test = stats.binomtest(counts[token("a")], num_samples, exact_chance_of_a(TEMPERATURE))
    assert test.pvalue > ERROR_RATE


@pytest.mark.parametrize("when", ["beside a token", "instead of one"])
def test_a_sequence_whose_grammar_takes_too_much_of_the_batchs_time_is_ended_with_the_reason(when: str) -> None:
    core = target_core()
    slow = replace(start("slow", "greedy"), grammar=compiled("person"))
    core.handle(slow, 0.0)
    core.handle(replace(start("other", "greedy"), grammar=compiled("person")), 0.0)
    assert slow.grammar is not None
    said: dict[str, list[Action]] = {"slow": [], "other": []}
    until: float | None = 0.0
    while until is not None:
        actions, until = core.run_next(0.0)
        for action in actions:
            said[action.session_id].append(action)
            if action.session_id == "slow" and isinstance(action, TokensCommitted):
                # As if its masks had taken so long: noticed at once, or at the next step's first look.
                slow.grammar._effort.debt_s = FREE_S + 1.0
                if when == "beside a token":
                    with pytest.raises(GrammarViolation):
                        slow.grammar.masks([[]])
    assert [type(action) for action in said["slow"]][-2:] == [TokensCommitted, SessionAborted]
    (aborted,) = (action for action in said["slow"] if isinstance(action, SessionAborted))
    assert isinstance(aborted.error, InvalidRequest)
    assert aborted.error.parameter == "grammar"
    assert "25 ms a token" in aborted.error.message
    assert isinstance(said["other"][-1], SessionEnded)
    assert core.scheduler.kv_usage == 0.0


@pytest.mark.parametrize("token_ids", [[], [0]], ids=["a new one", "one that was moved"])
def test_a_sequence_whose_grammar_is_out_of_time_at_its_beginning_is_told_so(token_ids: list[int]) -> None:
    """It is neither complete, nor do its tokens leave the grammar."""
    grammar = compiled("person")
    grammar._effort.debt_s = 2 * FREE_S
    event = start("slow", "greedy")
    core = target_core()
    actions = core.handle(replace(event, grammar=grammar, token_ids=[*event.token_ids, *token_ids]), 0.0)
    error = actions[-1].error if isinstance(actions[-1], SessionAborted | SessionRefused) else None
    assert isinstance(error, InvalidRequest)
    assert (error.parameter, "25 ms a token" in error.message) == ("grammar", True)
    assert core.scheduler.kv_usage == 0.0
    assert core.scheduler.num_waiting == 0


@pytest.mark.parametrize("mode", MODES)
def test_text_that_is_too_long_for_a_step_ends_its_session_with_the_reason_and_no_other(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a choice it is found when it is reached: an error to its sender, not a worker that seems dead."""
    monkeypatch.setitem(SPECS, "long", GrammarSpec(GrammarKind.REGEX, "[xy](ab){6000}"))
    core = target_core()
    core.handle(replace(start("long", mode), grammar=compiled("long")), 0.0)
    core.handle(replace(start("other", mode), grammar=compiled("person")), 0.0)
    said: dict[str, list[Action]] = {"long": [], "other": []}
    until: float | None = 0.0
    while until is not None:
        actions, until = core.run_next(0.0)
        for action in actions:
            said[action.session_id].append(action)
    beginning.cache_clear()
    aborted = said["long"][-1]
    assert isinstance(aborted, SessionAborted)
    assert isinstance(aborted.error, InvalidRequest)
    assert (aborted.error.parameter, "permitted: 8192" in aborted.error.message) == ("grammar", True)
    assert isinstance(said["other"][-1], SessionEnded)
