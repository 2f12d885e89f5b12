"""The plan of a canary: what it changes, for which requests, and for how long. Pure.

Two arms: *control* follows the flags of the processes, the *canary* arm changes one thing about speculation. Hints are
hints (invariant I2): both arms give a request the same output; only its speed may differ.

WAITING ──a draft worker of the model is live──► RUNNING ──promote──► PROMOTED ──abort──► ABORTED └────abort, or its
time is over─────────┘

A canary that names no draft model starts RUNNING. One that has ended keeps reserving the draft workers that it named
until it is forgotten, because they may be the reason why it ended. One that was promoted is forgotten when the flags of
the processes say the same.

Invariant: the arm of a request is a function of the canary's id and of the request's key, so that all replicas agree
and a key keeps its arm for the life of the canary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.sampling_params import MAX_SPECULATIVE_TOKENS

LEAD_MS: Final = 4000
"""Time from the decision to start to the first request: by then every replica knows, and all start at once."""
NUM_GROUPS: Final = 1024
"""Groups of keys that statistics distinguish; keys are independent of each other."""
DURATION_MAX_S: Final = 30 * 86400.0
_NAME_CHARS_MAX: Final = 256


class ArmName(StrEnum):
    CONTROL = "control"
    CANARY = "canary"


class CanaryState(StrEnum):
    """The stored state. The end of its time need not be stored to take effect (`Canary.has_ended`)."""

    WAITING = "waiting"
    RUNNING = "running"
    PROMOTED = "promoted"
    ABORTED = "aborted"


class Objective(StrEnum):
    """The metric on which the canary must be better to be promoted; `NONE`: it only must not be worse."""

    TPOT = "tpot"
    TTFT = "ttft"
    NONE = "none"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ArmChange(_Part):
    """The change in the canary's arm: no speculation, or another draft model, number of hints, or both."""

    speculates: bool = True
    draft_model: Annotated[str, Field(max_length=_NAME_CHARS_MAX)] = ""  # draft workers' model_name; empty: any
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)] = 0  # 0: the target's choice

    @model_validator(mode="after")
    def _check(self) -> Self:
        has_another = bool(self.draft_model or self.num_speculative_tokens)
        if not self.speculates and has_another:
            raise ValueError("an arm without speculation has no draft model and no number of speculative tokens")
        if self.speculates and not has_another:
            raise ValueError(
                "the arm is no other than the control; name a draft model or a number of speculative tokens, or turn "
                "speculation off"
            )
        return self

    def __str__(self) -> str:
        if not self.speculates:
            return "no speculation"
        parts = [f"draft model {self.draft_model}"] if self.draft_model else []
        if self.num_speculative_tokens:
            parts.append(f"at most {self.num_speculative_tokens} speculative tokens")
        return ", ".join(parts)


class Rule(_Part):
    """Conditions for promoting or ending a canary (`outrider.canary.rule`)."""

    objective: Objective = Objective.TPOT
    margin: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1  # permitted increase of TPOT and TTFT, relative to control
    failure_margin: Annotated[float, Field(ge=0.0, le=1.0)] = 0.005  # permitted increase of failure and departure rates
    requests_min: Annotated[int, Field(ge=50)] = 200  # per arm, before times are compared
    alpha: Annotated[float, Field(gt=0.0, le=0.5)] = 0.05  # probability of a wrong decision, ever; keys are independent


class CanaryPlan(_Part):
    """A canary as an operator starts it; never changed. Raises pydantic's ValidationError, a ValueError."""

    canary_id: Annotated[str, Field(pattern=r"^[a-z0-9]{4,32}$")]
    change: ArmChange
    share: Annotated[float, Field(gt=0.0, lt=1.0)]  # of the keys
    model: Annotated[str, Field(max_length=_NAME_CHARS_MAX)] = ""  # whose requests take part; empty: all models'
    rule: Rule = Rule()
    audit_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0  # of the canary's requests that can be audited
    duration_s: Annotated[float, Field(gt=0.0, le=DURATION_MAX_S)] = 86400.0
    is_automatic: bool = False  # False: verdicts are recommendations, but its time still ends it

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.audit_share and not self.change.speculates:
            raise ValueError(
                "without speculation there is nothing to audit: plain decoding would be compared with itself"
            )
        return self

    def arm_of(self, key: str) -> ArmName:
        return ArmName.CANARY if share_point(self.canary_id, key) < self.share else ArmName.CONTROL

    def group_of(self, key: str) -> int:
        """The group of a key, from 0 to NUM_GROUPS - 1, whatever the key's arm."""
        return int(share_point(f"group {self.canary_id}", key) * NUM_GROUPS)

    def is_audited(self, request_id: str) -> bool:
        """Whether a request of the canary is in the audit sample."""
        return share_point(f"audit {self.canary_id}", request_id) < self.audit_share


@dataclass(frozen=True, slots=True)
class Canary:
    """A plan and its progress. Times are milliseconds of Redis' clock."""

    plan: CanaryPlan
    state: CanaryState
    begins_ms: int  # 0 while it waits for a draft worker
    ends_ms: int  # end of its time unless it is promoted; while waiting: when it gives up
    reason: str = ""  # of the last decision

    def is_open(self, now_ms: float) -> bool:
        """Whether requests are divided between the arms now."""
        return self.state is CanaryState.RUNNING and self.begins_ms <= now_ms < self.ends_ms

    def has_ended(self, now_ms: float) -> bool:
        """Whether all requests are back at control, for good."""
        is_out_of_time = now_ms >= self.ends_ms and self.state is not CanaryState.PROMOTED
        return self.state is CanaryState.ABORTED or is_out_of_time

    def share_at(self, now_ms: float) -> float:
        """Share of the keys whose requests get the canary's arm now."""
        if self.state is CanaryState.PROMOTED:
            return 1.0
        return self.plan.share if self.is_open(now_ms) else 0.0

    def arm_at(self, key: str, now_ms: float) -> ArmName | None:
        """The arm of a request that arrives now; None where there are no arms."""
        if self.state is CanaryState.PROMOTED:
            return ArmName.CANARY
        return self.plan.arm_of(key) if self.is_open(now_ms) else None


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The draft workers that a request may use, by the name of their model."""

    model_name: str = ""  # empty: any
    is_excluded: bool = False  # all others

    def admits(self, model_name: str) -> bool:
        """Whether a draft worker of this model may serve the request."""
        return not self.model_name or (model_name == self.model_name) != self.is_excluded


ANY_DRAFT: Final = DraftChoice()


@dataclass(frozen=True, slots=True)
class Assignment:
    """Arm of a request."""

    canary_id: str
    arm: ArmName
    group: int  # of its key (`CanaryPlan.group_of`)
    is_compared: bool  # False once the canary is promoted: there is no control left


def share_point(salt: str, key: str) -> float:
    """Maps a key to [0, 1), the same everywhere; uniform over keys, and independent for different salts."""
    # Lengths first, so that different pairs of salt and key never read the same.
    text = f"{len(salt)} {salt}{key}".encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, person=b"outrider canary").digest()
    return int.from_bytes(digest, "big") / 2**64
