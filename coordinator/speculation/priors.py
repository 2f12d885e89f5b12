"""Priors: the evidence of earlier requests whether speculation pays for a model, route and tenant. Pure.

Evidence is sums that fade with a half-life. Fading commutes with adding, so the order in which replicas' evidence
arrives does not matter, and an isolated replica forgets at the same rate.

A request counts by its first verdict: whether the controller, once it had seen enough hints, went on or paused. A key
whose requests were mostly paused is *doubted* until clearly fewer are. A doubted request starts paused, which costs no
draft worker's time. One in 16, chosen by a hash of its id, starts with a probe instead, and long ones probe later, so
the evidence stays fresh.

    verdicts    0 ─────────── DOUBT_BELOW ──── DOUBT_ABOVE ──────── 1   share that paused
    start       SPECULATING     as before        PAUSED, 1 in 16 PROBING

Invariant: nothing here grows beyond KEYS_MAX, and tenants appear as digests only.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from coordinator.intake.generation_request import GenerationSpec
from outrider.canary.plan import ArmName

HALF_LIFE_S: Final = 300.0
NUM_JUDGED_MIN: Final = 16.0
"""Least faded verdicts for a key to be doubted."""
NUM_JUDGED_LEFT: Final = 4.0
"""Least faded verdicts for a key to stay doubted: fewer requests are judged then."""
DOUBT_ABOVE: Final = 0.85
DOUBT_BELOW: Final = 0.5
EXPLORED_ONE_IN: Final = 16
KEYS_MAX: Final = 512
_TENANT_DIGEST_BYTES: Final = 12


class StartingMode(enum.Enum):
    """Speculation state in which a request's first session begins."""

    SPECULATING = enum.auto()
    PAUSED = enum.auto()
    PROBING = enum.auto()


class Evidence(NamedTuple):
    """Faded counts of earlier requests."""

    num_judged: float = 0.0  # requests whose first verdict is known
    num_paused: float = 0.0  # of these, the ones it paused
    num_steps: float = 0.0  # steps that verified hints while the coordinator wanted them
    num_decided: float = 0.0  # hints that these decided
    num_accepted: float = 0.0

    def plus(self, other: Evidence) -> Evidence:
        return Evidence(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def faded(self, elapsed_s: float) -> Evidence:
        """The evidence as it counts `elapsed_s` later."""
        share = 0.5 ** (max(elapsed_s, 0.0) / HALF_LIFE_S)
        return Evidence(*(count * share for count in self))

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
    """Properties that requests must share to learn from each other. `str` gives the key's name in Redis."""

    model: str
    route: str  # one of twelve, with a canary one of twenty-four, see `route_of`
    tenant: str = ""  # a digest; empty: all tenants together

    def __str__(self) -> str:
        return f"{self.route}|{self.tenant}|{self.model}"  # the model last: its name may contain a "|"

    @classmethod
    def parse(cls, name: str) -> PriorKey:
        """Parses a name. Raises ValueError."""
        route, tenant, model = name.split("|", 2)
        return cls(model, route, tenant)

    @property
    def of_all_tenants(self) -> PriorKey:
        """The key of the same model and route over all tenants."""
        return PriorKey(self.model, self.route)


def route_of(spec: GenerationSpec) -> str:
    """The kind of output asked for: chat or completion, free or by a grammar, and its decoding mode; for a canary's arm
    also the canary's id.

    These influence acceptance. HTTP or gRPC, streamed or not, do not: the output is the same.
    """
    kind = "text" if spec.request.messages is None else "chat"
    form = "free" if spec.sampling.grammar is None else "grammar"
    route = f"{kind}/{form}/{spec.sampling.decoding_mode.name.lower()}"
    # Another draft, or fewer hints, give other evidence, and neither arm may suffer from the other's.
    assignment = spec.assignment
    if assignment is None or assignment.arm is ArmName.CONTROL:
        return route
    return f"{route}@{assignment.canary_id}"


def key_for(spec: GenerationSpec, tenant: str = "") -> PriorKey:
    """The key of a request. `tenant` is any identity that the edge has of its client, secrets included: only a digest
    is kept."""
    digest = ""
    if tenant:
        digest = hashlib.blake2b(
            tenant.encode(errors="surrogatepass"), digest_size=_TENANT_DIGEST_BYTES, person=b"outrider tenant"
        ).hexdigest()
    return PriorKey(spec.model, route_of(spec), digest)


class PriorTable:
    """Evidence known to one replica: read from all, and its own since. Times are on its own clock."""

    def __init__(self) -> None:
        self._read: dict[PriorKey, Evidence] = {}
        self._read_at_s = 0.0
        self._own: dict[PriorKey, tuple[Evidence, float]] = {}  # not being sent; latest change last
        self._sent: dict[PriorKey, tuple[Evidence, float]] = {}  # being sent, neither arrived nor given back
        self._doubted: set[PriorKey] = set()

    def start(self, key: PriorKey, request_id: str, now_s: float) -> StartingMode:
        """Chooses how a request with this id begins; the same at every replica for the same evidence."""
        if not self.is_doubted(key, now_s):
            return StartingMode.SPECULATING
        digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
        is_explored = int.from_bytes(digest, "big") % EXPLORED_ONE_IN == 0
        return StartingMode.PROBING if is_explored else StartingMode.PAUSED

    def is_doubted(self, key: PriorKey, now_s: float) -> bool:
        """Whether most requests of the key are paused, with hysteresis. A tenant with little evidence is judged by all
        tenants."""
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
        """All evidence of a key, faded to now."""
        evidence = self._read.get(key, NOTHING).faded(now_s - self._read_at_s)
        for part in (self._own, self._sent):
            if key in part:
                evidence = evidence.plus(_at(part[key], now_s))
        return evidence

    def record(self, key: PriorKey, evidence: Evidence, now_s: float) -> None:
        """Adds a request's evidence to its tenant's key and to that of all tenants."""
        if evidence == NOTHING:
            return
        for each in {key, key.of_all_tenants}:
            self._add(each, evidence, now_s)

    def take(self, now_s: float) -> dict[PriorKey, Evidence]:
        """Takes the evidence to send to others. `learn` or `give_back` must follow before the next `take`."""
        assert not self._sent, "a take is under way"
        self._sent, self._own = self._own, {}
        return {key: _at(dated, now_s) for key, dated in self._sent.items()}

    def learn(self, read: Mapping[PriorKey, Evidence], now_s: float) -> None:
        """Replaces the read evidence by that of all replicas: what was sent has arrived."""
        self._sent = {}
        self._read, self._read_at_s = dict(list(read.items())[:KEYS_MAX]), now_s
        self._doubted &= self._read.keys() | self._own.keys()

    def give_back(self, now_s: float) -> None:
        """Keeps evidence that did not arrive for the next time."""
        sent, self._sent = self._sent, {}
        newer, self._own = self._own, {}
        for part in (sent, newer):
            for key, dated in part.items():
                self._add(key, _at(dated, now_s), now_s)

    def summary(self, now_s: float) -> dict[PriorKey, Evidence]:
        """Evidence by model and route, all tenants together."""
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
