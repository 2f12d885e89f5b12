"""The events of one run, drawn from its seed. Plain data, so that parts can be left out to see what matters."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coordinator.intake.generation_request import PRIORITY_MAX
from draft_worker.limits import DraftLimits
from outrider.sampling_params import SpeculationSettings
from target_worker.limits import SchedulerLimits
from tests.simulation.actors import WorkerShape
from tests.simulation.features import Feature
from tests.simulation.redis_process import REDIS
from tests.target_worker.fakes import END

SPAN_S: Final = 12.0  # requests and faults begin within it
_MAX_MODEL_LEN: Final = 96
_COMMON_PROMPT: Final = (1, 2, 3, 0, 1, 1, 2, 0, 3, 2, 1, 0, 2, 2, 3, 1, 0)
_SPECULATION: Final = (
    *(SpeculationSettings(), SpeculationSettings()),
    *(SpeculationSettings(is_always=True), SpeculationSettings(enabled=False)),
)


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL, then another life after `duration_s`
    LOSE_MACHINE = "lose machine"  # likewise, but nothing refuses connections meanwhile
    DRAIN = "drain"  # SIGTERM, then another life
    FREEZE = "freeze"  # SIGSTOP, then SIGCONT
    HANG = "hang"  # of a worker's model thread alone
    REPLACE = "replace"  # a worker is frozen, and another process started under its id elsewhere
    CUT = "cut"  # nothing gets through to `other`, and nobody is told
    CUT_ONE_WAY = "cut one way"  # likewise, but what `other` sends comes
    RESET = "reset"  # every stream to `other` breaks once
    EMPTY = "empty"  # Redis forgets all that it has


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    process: str
    duration_s: float
    other: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int  # 0: greedy
    ignore_eos: bool
    stop: str  # a stop string, or none
    speculation: SpeculationSettings
    deadline_s: float
    leaves_after_s: float | None  # the client goes away, whatever has come
    tenant: int = -1  # -1: by its number
    priority: int | None = None  # None: by its number
    num_choices: int = 1
    has_logprobs: bool = False
    grammar: str = ""  # or the text of one of `models`
    is_seed_drawn: bool = False  # sampled, and the seed is for the coordinator to find; then `seed` is 0
    request_id: str = ""  # another's; its own unless given
    is_liar: bool = False  # says from the beginning that it has had its first token
    poisons_after: int = 0  # tokens after which its target dies; 0: never
    comes_back: bool = False  # its client sends it anew where it was refused, late, or left, as if it never had
    stays_s: float = 0.0  # after which its client leaves, each time that it has come; 0: it stays
    stalls_after: int = 0  # chunks after which its client does not read for `stalls_s`; 0: never
    stalls_s: float = 0.0
    is_background: bool = False  # makes room for all others

    @property
    def rank(self) -> int:
        """Its priority, a lower one first."""
        if self.is_background:
            return PRIORITY_MAX
        return self.number % 3 - 1 if self.priority is None else self.priority

    @property
    def tenant_name(self) -> str:
        """The name of the tenant that sends it."""
        return f"tenant {self.number % 2 if self.tenant < 0 else self.tenant}"

    @property
    def name(self) -> str:
        """Its id."""
        return self.request_id or f"r{self.number}"


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    num_targets: int
    num_drafts: int
    num_coordinators: int
    shape: WorkerShape
    slow_share: float  # of the network's messages
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    features: frozenset[Feature] = frozenset()
    window: int = 256  # messages of a stream that may lie unread
    weights: tuple[int, ...] = ()  # of each target; all have 0 unless given
    change_of_weights: int = 0  # so many restarts of targets bring the other weights
    journal_bytes_max: int | None = None  # of a coordinator; None: its own limit
    requests_per_minute: float | None = None  # of a tenant with a key
    requests_max: int | None = None  # sequences of a coordinator; None: its own limit

    def work_s(self, requests: Iterable[Request]) -> float:
        """Seconds that one target takes for these requests, one token of one sequence after the other."""
        return self.shape.step_s * sum(each.max_tokens * each.num_choices for each in requests)


def draw_ordinary(seed: int) -> Scenario:
    chance = random.Random(f"{seed}/scenario")
    num_targets, num_drafts = chance.choice((1, 2, 2, 3)), chance.choice((0, 1, 2, 2, 2))
    num_coordinators = chance.choice((1, 1, 2))
    is_crowded = chance.random() < 0.2  # many long texts at once, and KV for one
    if is_crowded:
        num_targets = 1
    num_requests = chance.randint(3, 5) if is_crowded else chance.randint(1, 5)
    return Scenario(
        seed,
        num_targets,
        num_drafts,
        num_coordinators,
        _draw_shape(chance, is_crowded=is_crowded),
        chance.choice((0.0, 0.02, 0.2)),
        tuple(draw_request(chance, number, is_crowded=is_crowded) for number in range(num_requests)),
        _draw_faults(chance, num_targets, num_drafts, num_coordinators),
    )


def _draw_shape(chance: random.Random, *, is_crowded: bool) -> WorkerShape:
    max_num_seqs = 4 if is_crowded else chance.choice((1, 2, 4))
    num_speculative_tokens = chance.choice((2, 4))
    return WorkerShape(
        limits=SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_waiting=chance.choice((1, 4)),
            max_num_batched_tokens=chance.choice((8, 24)),
            max_model_len=_MAX_MODEL_LEN,
            growth_tokens=chance.choice((0, 8, 32)),
            num_speculative_tokens=num_speculative_tokens,
            hint_wait_ms_max=chance.choice((0.0, 10.0)),
            has_lookup=chance.random() < 0.3,
            may_pause=chance.random() < 0.5,
            max_early_sessions=4,
            end_of_sequence_ids=frozenset({END}),
            enable_prefix_caching=(shares_prefixes := chance.random() < 0.7),
        ),
        # From one session's to plenty.
        num_blocks=1 + (1 if is_crowded else chance.choice((1, 2, max_num_seqs))) * (_MAX_MODEL_LEN // 4),
        step_s=chance.choice((0.005, 0.03, 0.2)),
        draft_limits=DraftLimits(
            max_num_seqs=chance.choice((1, 4)),
            max_num_batched_tokens=24,
            max_model_len=_MAX_MODEL_LEN,
            max_nodes=chance.choice((8, 24)),
            max_lookahead=8,
            max_nodes_per_step=4,
            end_of_sequence_ids=frozenset({END}),
            enable_prefix_caching=shares_prefixes,
        ),
        draft_step_s=chance.choice((0.002, 0.01)),
        alignment=chance.choice((60, 200, 250)),
        drain_grace_s=chance.choice((0.5, 5.0)),
    )


def draw_request(chance: random.Random, number: int, *, is_crowded: bool) -> Request:
    length = chance.choice((1, 4, 9, 17))
    # Some begin alike, so that they share blocks.
    prompt = (*_COMMON_PROMPT[: length - 1], chance.randrange(END))
    return Request(
        number,
        chance.uniform(0.0, SPAN_S * (0.05 if is_crowded else 0.7)),
        prompt,
        max_tokens=chance.choice((40, 78) if is_crowded else (1, 10, 40, 78)),
        seed=chance.choice((0, 0, chance.randrange(1, 1 << 32))),
        ignore_eos=chance.random() < 0.6,
        stop=chance.choice(("", "", "".join(chance.choices("abcd", k=3)))),
        speculation=chance.choice(_SPECULATION),
        deadline_s=chance.choice((0.5, 300.0, 300.0, 300.0)),
        leaves_after_s=chance.uniform(0.0, 2.0) if chance.random() < 0.15 else None,
    )


def _draw_faults(chance: random.Random, num_targets: int, num_drafts: int, num_coordinators: int) -> tuple[Fault, ...]:
    targets = [f"t{i}" for i in range(num_targets)]
    drafts = [f"d{i}" for i in range(num_drafts)]
    coordinators = [f"c{i}" for i in range(num_coordinators)]
    everybody = [*targets, *targets, *drafts, *coordinators, REDIS]
    faults = []
    for _ in range(chance.choice((0, 2, 4, 8))):
        process = chance.choice(everybody)
        kinds = [FaultKind.KILL, FaultKind.LOSE_MACHINE, FaultKind.FREEZE, FaultKind.CUT, FaultKind.RESET]
        if process[0] in "td":
            kinds += [FaultKind.DRAIN, FaultKind.HANG, FaultKind.REPLACE]
        kind = chance.choice(kinds)
        other = chance.choice([name for name in everybody if name != process])
        if chance.random() < 0.3 and drafts:  # a draft worker that only some can hear
            kind, process, other = (
                FaultKind.CUT,
                chance.choice(drafts),
                chance.choice((*targets, *coordinators)),
            )
        faults.append(Fault(chance.uniform(0.0, SPAN_S), kind, process, chance.choice((0.3, 2.0, 7.0)), other))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
