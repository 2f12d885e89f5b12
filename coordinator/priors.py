"""What earlier requests say about a new one: does speculation pay for its model, route and tenant? Pure.

Evidence is sums that fade with a half-life. Fading commutes with adding, so it does not matter which replica's evidence
arrives first, and a replica that hears nothing of the others still forgets at the same pace.

Of a request what counts is its first verdict: whether the controller, once it had seen enough hints, went on or
paused. A key whose requests were mostly paused is *doubted* until clearly fewer are. A doubted request starts
paused, which costs no draft worker's time; one in 16, chosen by a hash of its id, starts with a probe instead,
and long ones probe later on, so the evidence stays fresh either way.

    verdicts    0 ─────────── DOUBT_BELOW ──── DOUBT_ABOVE ──────── 1   share that paused
    start       SPECULATING     as before        PAUSED, 1 in 16 PROBING

Invariant: nothing here grows beyond KEYS_MAX, and tenants appear as digests only.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.generation_request import GenerationSpec
from outrider.canary.plan import ArmName
from outrider.sampling_params import DecodingMode

HALF_LIFE_S: Final = 300.0
NUM_JUDGED_MIN: Final = 16.0
"""Verdicts, faded, without which a key is not doubted."""
NUM_JUDGED_LEFT: Final = 4.0
"""And with fewer than which it is doubted no longer: fewer requests are judged while it is."""
DOUBT_ABOVE: Final = 0.85
DOUBT_BELOW: Final = 0.5
EXPLORED_ONE_IN: Final = 16
KEYS_MAX: Final = 512
_TENANT_DIGEST_BYTES: Final = 12


class StartingMode(enum.Enum):
    """How a request's first session begins."""

    SPECULATING = enum.auto()
    PAUSED = enum.auto()
    PROBING = enum.auto()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Faded counts."""

    num_judged: float = 0.0  # requests whose first verdict is known
    num_paused: float = 0.0  # of these, the ones it paused
    num_steps: float = 0.0  # steps that verified hints while the coordinator wanted them
    num_decided: float = 0.0  # hints that these decided
    num_accepted: float = 0.0

    def plus(self, other: Evidence) -> Evidence:
        return Evidence(*(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)))

    def faded(self, elapsed_s: float) -> Evidence:
        """As it counts `elapsed_s` later."""
        share = 0.5 ** (max(elapsed_s, 0.0) / HALF_LIFE_S)
        return Evidence(*(count * share for count in self.counts))

    @property
    def counts(self) -> tuple[float, float, float, float, float]:
        """All of it, in the order of the fields."""
        return self.num_judged, self.num_paused, self.num_steps, self.num_decided, self.num_accepted

    @property
    def paused_share(self) -> float:
        return self.num_paused / self.num_judged if self.num_judged else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted share of the hints decided."""
        return self.num_accepted / self.num_decided if self.num_decided else 0.0

    @property
    def extra_tokens(self) -> float:
        """Tokens gained per step that verified hints."""
        return self.num_accepted / self.num_steps if self.num_steps else 0.0


NOTHING: Final = Evidence()


@dataclass(frozen=True, slots=True)
class PriorKey:
    """What requests must share to learn from each other. `str` gives the name that it has in Redis."""

    model: str
    route: str  # one of twelve, and with a canary as many again, see `route_of`
    tenant: str = ""  # a digest; empty: all tenants together

    def __str__(self) -> str:
        return f"{self.route}|{self.tenant}|{self.model}"  # a model's name may hold anything, so it is last

    @classmethod
    def parse(cls, name: str) -> PriorKey:
        """Raises ValueError."""
        route, tenant, model = name.split("|", 2)
        return cls(model, route, tenant)

    @property
    def of_all_tenants(self) -> PriorKey:
        return PriorKey(self.model, self.route)


def route_of(spec: GenerationSpec) -> str:
    """What kind of text is asked for: chat or plain, free or by a grammar, and how its tokens are decided; of a
    canary's arm also of which canary.

    These move acceptance. HTTP or gRPC, streamed or not, do not: the same text comes of both.
    """
    kind = "text" if spec.request.messages is None else "chat"
    form = "free" if spec.sampling.grammar is None else "grammar"
    route = f"{kind}/{form}/{_MODE_NAMES[spec.sampling.decoding_mode]}"
    # With another draft, or fewer hints, other things are learned; and an arm must not pay for what the other learned.
    assignment = spec.assignment
    if assignment is None or assignment.arm is ArmName.CONTROL:
        return route
    return f"{route}@{assignment.canary_id}"


def key_for(spec: GenerationSpec, tenant: str = "") -> PriorKey:
    """`tenant` is whatever the edge knows its client by, secrets included: only a digest is kept."""
    digest = ""
    if tenant:
        digest = hashlib.blake2b(
            tenant.encode(errors="replace"), digest_size=_TENANT_DIGEST_BYTES, person=b"outrider tenant"
        ).hexdigest()
    return PriorKey(spec.model, route_of(spec), digest)


class PriorTable:
    """What one replica knows: what it read of all, and what it has learned since. Times are on its own clock."""

    def __init__(self) -> None:
        self._read: dict[PriorKey, Evidence] = {}
        self._read_at_s = 0.0
        self._own: dict[PriorKey, tuple[Evidence, float]] = {}  # not on its way yet; latest change last
        self._sent: dict[PriorKey, tuple[Evidence, float]] = {}  # on its way, neither there nor given back
        self._doubted: set[PriorKey] = set()

    def start(self, key: PriorKey, request_id: str, now_s: float) -> StartingMode:
        """How a request of this id begins; the same for the same evidence, wherever it comes in."""
        if not self.is_doubted(key, now_s):
            return StartingMode.SPECULATING
        digest = hashlib.blake2b(request_id.encode(errors="replace"), digest_size=8).digest()
        is_explored = int.from_bytes(digest, "big") % EXPLORED_ONE_IN == 0
        return StartingMode.PROBING if is_explored else StartingMode.PAUSED

    def is_doubted(self, key: PriorKey, now_s: float) -> bool:
        """Whether its requests are paused mostly, with hysteresis. A tenant little is known of is judged by all."""
        evidence, was_doubted = self.evidence(key, now_s), key in self._doubted
        is_known = evidence.num_judged >= (NUM_JUDGED_LEFT if was_doubted else NUM_JUDGED_MIN)
        if key.tenant and not is_known:
            self._doubted.discard(key)
            return self.is_doubted(key.of_all_tenants, now_s)
        if is_known and evidence.paused_share >= (DOUBT_BELOW if was_doubted else DOUBT_ABOVE):
            self._doubted.add(key)
            return True
        self._doubted.discard(key)
        return False

    def evidence(self, key: PriorKey, now_s: float) -> Evidence:
        """All that is known of a key, faded to now."""
        evidence = self._read.get(key, NOTHING).faded(now_s - self._read_at_s)
        for part in (self._own, self._sent):
            if key in part:
                evidence = evidence.plus(_at(part[key], now_s))
        return evidence

    def record(self, key: PriorKey, evidence: Evidence, now_s: float) -> None:
        """A request's lesson; a tenant's counts for all tenants too."""
        if evidence == NOTHING:
            return
        for each in {key, key.of_all_tenants}:
            self._add(each, evidence, now_s)

    def take(self, now_s: float) -> dict[PriorKey, Evidence]:
        """What the others have to hear of. `learn` or `give_back` must follow before the next `take`."""
        assert not self._sent, "a take is under way"
        self._sent, self._own = self._own, {}
        return {key: _at(dated, now_s) for key, dated in self._sent.items()}

    def learn(self, read: Mapping[PriorKey, Evidence], now_s: float) -> None:
        """What was sent has arrived, and this is what all replicas together know."""
        self._sent = {}
        self._read, self._read_at_s = dict(list(read.items())[:KEYS_MAX]), now_s
        self._doubted &= self._read.keys() | self._own.keys()

    def give_back(self, now_s: float) -> None:
        """What was sent has not arrived; it is kept for the next time."""
        sent, self._sent = self._sent, {}
        newer, self._own = self._own, {}
        for part in (sent, newer):
            for key, dated in part.items():
                self._add(key, _at(dated, now_s), now_s)

    def summary(self, now_s: float) -> dict[PriorKey, Evidence]:
        """Every model and route that something is known of, all tenants together."""
        keys = {key for part in (self._read, self._own, self._sent) for key in part if not key.tenant}
        return {key: self.evidence(key, now_s) for key in keys}

    @property
    def num_keys(self) -> int:
        return len(self._read.keys() | self._own.keys() | self._sent.keys())

    def _add(self, key: PriorKey, evidence: Evidence, now_s: float) -> None:
        dated = self._own.pop(key, None)
        if dated is not None:
            evidence = _at(dated, now_s).plus(evidence)
        elif len(self._own) >= KEYS_MAX:
            forgotten = next(iter(self._own))
            del self._own[forgotten]
            if forgotten not in self._read:
                self._doubted.discard(forgotten)
        self._own[key] = evidence, now_s


def _at(dated: tuple[Evidence, float], now_s: float) -> Evidence:
    evidence, at_s = dated
    return evidence.faded(now_s - at_s)


_MODE_NAMES: Final = {
    DecodingMode.GREEDY: "greedy",
    DecodingMode.COUPLED: "coupled",
    DecodingMode.REJECTION: "rejection",
}
