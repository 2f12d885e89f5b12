"""A target whose next-token distribution is a table, run by the real scheduler and the real verification.

Outputs are short and their exact joint distribution is a product of the table's entries, so that thousands of
sessions take seconds. The draft draws from a table of its own and, like a draft worker, drafts nothing behind a token
that ends the output. How many of its hints are there when a step begins is drawn without a look at them.
"""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outrider.concurrency.decayed_mean import DecayedMean
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.model import SequenceChunk
from outrider.hints.acceptance import DECAY, AcceptanceHistory, BlockAcceptance
from outrider.hints.hint_tree import ROOT_ID, DraftDistribution, Hint
from outrider.objective import Objective
from outrider.sampling_params import AcceptanceRule, SamplingParams, SpeculationSettings
from target_worker.hints.local_source import MatchAcceptance
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Drafted,
    HeadResult,
    HeadTurn,
    HintsArrived,
    SessionEnded,
    StartSession,
    Step,
    SubscribeDraft,
    TokensCommitted,
    WaitForHints,
)
from target_worker.objectives import Aim
from target_worker.runner import run_step
from target_worker.scheduling.scheduler import Scheduler
from tests.exactness.finite_language import SMALL_LANGUAGE
from tests.exactness.in_process import GivenCost

VOCAB_SIZE = 8
END = 6
OTHER_STOP = 3
SOURCES = ("none", "lookup", "prediction", "memory", "head", "lookup+memory", "head+memory")
NUM_GIVEN = 10  # tokens before the output that lookup and prediction find again
MAX_TOKENS = 4
LOCAL_RATE, DRAFT_RATE = 2 / 3, 0.95
"""Acceptance rates on record. By these a local path promises more than a draft's short path and less than a long one,
so that whoever looks at the length of a path takes the other source for it."""
LOCAL_TOKENS = (0, 1)  # in turns: what every local source proposes

Output = tuple[int, ...]  # END or OTHER_STOP stand last where they ended it

TARGET_WEIGHTS = (
    (150, 250, 100, 60, 80, 60, 250, 50),
    (300, 100, 80, 100, 40, 50, 300, 30),
    (100, 100, 100, 150, 200, 50, 250, 50),
    (250, 250, 50, 50, 50, 50, 280, 20),
)
"""The target's probabilities in thousandths, by the last token modulo 4."""
SKEWED_WEIGHTS = (
    (300, 100, 100, 60, 80, 60, 250, 50),
    (100, 300, 80, 100, 40, 50, 200, 130),
    (100, 100, 100, 150, 200, 50, 150, 150),
    (150, 150, 50, 50, 50, 50, 480, 20),
)
"""Those of a draft that differs from it."""


@dataclass(frozen=True, slots=True)
class Case:
    """Describes what the sessions of one test have in common."""

    source: str  # of SOURCES, beside the draft worker
    feature: str = "none"  # or: stop-token, min-tokens, grammar, no-branches, objective
    rule: AcceptanceRule = AcceptanceRule.BLOCK
    is_perfect: bool = True  # whether the draft's table is the target's

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset({OTHER_STOP} if self.feature == "stop-token" else ())

    @property
    def ends(self) -> frozenset[int]:
        return self.stop_token_ids | {END}

    @property
    def min_tokens(self) -> int:
        return 2 if self.feature == "min-tokens" else 0

    @property
    def has_grammar(self) -> bool:
        return self.feature == "grammar"

    def weights(self, last: int, output: Sequence[int], *, of_draft: bool = False) -> list[float]:
        """Weights of the next token. A draft knows no grammar here: the most that it can be wrong by."""
        table = TARGET_WEIGHTS if self.is_perfect or not of_draft else SKEWED_WEIGHTS
        weights = [float(weight) for weight in table[last % 4]]
        if len(output) < self.min_tokens:
            weights = [0.0 if token_id in self.ends else weight for token_id, weight in enumerate(weights)]
        if self.has_grammar and not of_draft:
            permitted = SMALL_LANGUAGE.mask(output).tolist()
            weights = [weight if ok else 0.0 for weight, ok in zip(weights, permitted, strict=True)]
        return weights

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether the grammar permits nothing but an end."""
        return self.has_grammar and not any(SMALL_LANGUAGE.mask(output).tolist()[i] for i in range(8) if i != END)


def given() -> list[int]:
    """The committed tokens that every output follows. Lookup finds their last ten before, and what followed."""
    if NUM_GIVEN % 2:
        raise AssertionError("they end with the second of LOCAL_TOKENS")
    return [5, 2, *LOCAL_TOKENS * NUM_GIVEN]


@functools.cache
def joint(case: Case) -> dict[Output, float]:
    """The exact distribution of outputs."""
    found: dict[Output, float] = {}

    def extend(output: Output, chance: float) -> None:
        if len(output) == MAX_TOKENS or (output and output[-1] in case.ends) or case.is_complete(output):
            found[output] = found.get(output, 0.0) + chance
            return
        weights = case.weights([*given(), *output][-1], output)
        for token_id, weight in enumerate(weights):
            if weight:
                extend((*output, token_id), chance * weight / sum(weights))

    extend((), 1.0)
    return found


class TableEngine:
    """Stands for the model: a row of logits is the table's row for the token that was fed."""

    features = None

    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        fed = [token_id for chunk in chunks for token_id in chunk.token_ids[len(chunk.token_ids) - chunk.num_logits :]]
        table = torch.tensor(TARGET_WEIGHTS, dtype=torch.float64).log().float()
        return table[torch.tensor(fed, dtype=torch.int64) % 4]

    def move_entries(self, sources: object, destinations: object) -> None:
        """There is no KV to move."""


class AlternatingHead:
    """A draft head without attention that drafts LOCAL_TOKENS in turns."""

    allocator = None
    max_depth = 8

    def draft(self, turn: HeadTurn) -> HeadResult:
        drafts = [Drafted([LOCAL_TOKENS[i % 2] for i in range(len(item.records))], []) for item in turn.items]
        return HeadResult(drafts, [(len(turn.items), 0.1)])


@dataclass(slots=True)
class Sessions:
    """Runs sessions of one case to their end, `at_once` at a time."""

    case: Case
    luck: int
    at_once: int = 40
    max_tokens: int = MAX_TOKENS
    rng: random.Random = field(init=False)
    scheduler: Scheduler = field(init=False)
    now: float = 0.0
    num_verified: collections.Counter[str] = field(default_factory=collections.Counter)  # by whose they were

    def __post_init__(self) -> None:
        case = self.case
        self.rng = random.Random(self.luck)
        limits = SchedulerLimits(
            max_num_seqs=self.at_once,
            max_num_waiting=self.at_once,
            max_model_len=64,
            has_lookup="lookup" in case.source,
            may_pause=False,
            hint_wait_ms_max=0.0,
            verifies_branches=case.feature != "no-branches",
            end_of_sequence_ids=frozenset({END}),
        )
        head = AlternatingHead() if "head" in case.source else None
        self.scheduler = Scheduler(limits, BlockAllocator(8 * self.at_once + 2, 16), VOCAB_SIZE, head)
        self.scheduler.cost = GivenCost()

    def run(self, num_sessions: int) -> collections.Counter[Output]:
        outputs: collections.Counter[Output] = collections.Counter()
        for first in range(0, num_sessions, self.at_once):
            outputs += self._run_batch([f"s{i}" for i in range(first, min(first + self.at_once, num_sessions))])
        return outputs

    def _run_batch(self, session_ids: Sequence[str]) -> collections.Counter[Output]:
        texts = {session_id: list(given()) for session_id in session_ids}
        for session_id in session_ids:
            self.start(session_id)
        outputs: collections.Counter[Output] = collections.Counter()
        while texts:
            for session_id, text in texts.items():
                self.hint(session_id, text)
            step = self.scheduler.next_step(self.now)
            while isinstance(step, WaitForHints):
                self.now = step.until
                step = self.scheduler.next_step(self.now)
            assert isinstance(step, Step)
            for action in self.finish(step):
                if isinstance(action, TokensCommitted):
                    texts[action.session_id] += action.token_ids
                elif isinstance(action, SessionEnded):
                    output = texts.pop(action.session_id)[len(given()) :]
                    outputs[(*output, *([] if action.stop_token_id is None else [action.stop_token_id]))] += 1
        return outputs

    def finish(self, step: Step) -> list[Any]:
        for item in step.items:
            for hint in item.hints[: item.num_decided]:
                self.num_verified["draft" if hint.node_id >= 0 else "forced" if hint.node_id == -1 else "local"] += 1
        step_ms = self.scheduler.cost.line().step_ms(
            step.num_tokens
        )  # no clock has a say, so that a run repeats itself
        result = replace(run_step(TableEngine(), step), step_ms=step_ms)  # type: ignore[arg-type]
        self.now += step_ms / 1e3
        return list(self.scheduler.finish_step(step, result, self.now))

    def start(self, session_id: str) -> None:
        case = self.case
        is_predicted = case.source == "prediction"
        text = given()
        num_prompt = len(text) - NUM_GIVEN if is_predicted else len(text)
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=self.max_tokens + len(text) - num_prompt,
            stop_token_ids=case.stop_token_ids,
            min_tokens=case.min_tokens + (len(text) - num_prompt if case.min_tokens else 0),
        )
        event = StartSession(
            session_id,
            text,
            num_prompt,
            sampling,
            SpeculationSettings(enabled=True, acceptance_rule=case.rule),
            self.rng.getrandbits(64),
            grammar=SMALL_LANGUAGE.grammar.fork() if case.has_grammar and not is_predicted else None,
            prediction=[*LOCAL_TOKENS] * NUM_GIVEN if is_predicted else (),
            aim=Aim(Objective(tpot_ms=30.0)) if case.feature == "objective" else Aim(),
        )
        for action in self.scheduler.handle(event, self.now):
            assert not hasattr(action, "error"), action
        self.scheduler.handle(SubscribeDraft(1, session_id, len(text)), self.now)
        self.set_records(session_id)

    def set_records(self, session_id: str) -> None:
        """Gives the sources of a session the records that LOCAL_RATE and DRAFT_RATE speak of."""
        session = self.scheduler._sessions[session_id]
        session.acceptance = acceptance_of(DRAFT_RATE)
        for source in session.local:
            if source is session.head:
                source._acceptance = acceptance_of(LOCAL_RATE)
            for name in ("_acceptance", "_own_acceptance", "_recent_acceptance"):
                if isinstance(getattr(source, name, None), MatchAcceptance):
                    setattr(source, name, MatchAcceptance([LOCAL_RATE] * 6))

    def hint(self, session_id: str, text: Sequence[int]) -> None:
        """Sends what the workers say after these committed tokens; each message is the start of a new tree."""
        if self.case.source == "memory" or ("memory" in self.case.source and self.rng.random() < 0.5):
            self.hint_from_memory(session_id, text)
        num_there = self.rng.randrange(self.max_tokens + 2)
        hints = list(self.drawn(text))[:num_there]
        self.scheduler.handle(HintsArrived(session_id, 1, len(text), hints, self.now), self.now)

    def hint_from_memory(self, session_id: str, text: Sequence[int]) -> None:
        """Sends what a memory worker says after them."""
        chain = [Hint(i + 1, i or ROOT_ID, LOCAL_TOKENS[i % 2]) for i in range(self.max_tokens)]
        told = (session_id, 1, len(text), chain, self.now)
        self.scheduler.handle(HintsArrived(*told, is_memory=True, match_len=24), self.now)
        self.set_records(session_id)

    def drawn(self, text: Sequence[int]) -> Iterator[Hint]:
        """A chain of hints below committed tokens, each drawn from the distribution that it carries (I5)."""
        said = list(text)
        for index in range(self.max_tokens + 1):
            weights = self.case.weights(said[-1], said[len(given()) :], of_draft=True)
            pairs = [(token_id, int(weight)) for token_id, weight in enumerate(weights) if weight]
            distribution = DraftDistribution(tuple(t for t, _ in pairs), tuple(w for _, w in pairs))
            token_id = self.rng.choices(distribution.token_ids, distribution.weights)[0]
            yield Hint(index + 1, index or ROOT_ID, token_id, distribution)
            said.append(token_id)
            if token_id in self.case.ends:
                return


def acceptance_of(rate: float) -> BlockAcceptance:
    """A record of a thousand hints, so that no test's own change it."""
    return BlockAcceptance(AcceptanceHistory(DecayedMean(DECAY, 1000.0 * rate, 1000.0)))
