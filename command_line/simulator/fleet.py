"""Settings of a fleet file: pools, step costs, network, traffic. Pure.

Every setting has a default; wrong or unknown ones are refused by name. Names ending in `_ms` are milliseconds, in
`_s` seconds; lengths are tokens.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from command_line.simulator.settings import example_of, length, read_table, real, switch, times, whole
from command_line.tune.agreement import coverage
from command_line.tune.times import StepTimes
from draft_worker.limits import DraftLimits
from outrider.errors import ConfigurationError, InvalidRequest
from target_worker.limits import SchedulerLimits

BLOCK_SIZE: Final = 16  # KV entries in a block
MS_PER_S: Final = 1e3
_WORKERS_MAX: Final = 100_000
_STEP_MS: Final = times("by tokens fed, instead of these two: { 1 = 20.0, 8 = 21.5 }")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Settings of both kinds of worker, of which a draft worker has defaults of its own. A draft worker's step is a
    forward pass: what it feeds are nodes and prompt tokens."""

    count: int = whole(4, "target workers", 1, _WORKERS_MAX)
    price: float = real(4.0, "price of one, in the same unit as a draft worker's", 0.0, 1e9)
    fixed_ms: float = real(20.0, "fixed part of a step", 0.0, 1e6)
    token_ms: float = real(0.1, "of a step, per token fed, hints included", 0.0, 1e6)
    step_ms: StepTimes | None = _STEP_MS
    sequence_ms: float = real(0.05, "of a step, per session in it", 0.0, 1e6)
    context_ms: float = real(0.0, "of a step, per 1000 tokens of context read", 0.0, 1e6)

    def forward_ms(self, num_tokens: int, num_sequences: int, num_context: int) -> float:
        """Time of a forward pass over `num_tokens` tokens of several sessions, with the KV tokens that it reads."""
        line = self.step_ms.at(num_tokens) if self.step_ms else self.fixed_ms + self.token_ms * num_tokens
        return line + self.sequence_ms * num_sequences + self.context_ms * num_context / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPool(Pool):
    hinted_ms: float = real(0.0, "extra time of a step that accepts hints", 0.0, 1e6)
    hinted_sequence_ms: float = real(0.05, "and per session that accepts hints", 0.0, 1e6)
    max_num_seqs: int = whole(32, "batch slots", 1, 511)
    max_num_waiting: int = whole(64, "requests that wait for a slot", 1, 1_000_000)
    max_num_batched_tokens: int = whole(512, "tokens fed in one step", 2, 512)
    max_model_len: int = whole(4096, "longest sequence, prompt and output", 2, 1_000_000)
    kv_tokens: int = whole(65536, "tokens in the KV cache", 32, 100_000_000)
    num_speculative_tokens: int = whole(8, "maximum of hints verified per session and step", 0, 32)
    hint_wait_ms: float = real(10.0, "longest wait of a step for hints", 0.0, 1e4)
    always_listen: bool = switch(False, "accept hints whether it pays or not")
    branches: bool = switch(False, "verify hints beside the draft's likeliest path, as targets on CPUs do")

    def limits(self, *, has_shared_prefixes: bool) -> SchedulerLimits:
        """The worker's limits. Lookup is off: random tokens never repeat."""
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_waiting=self.max_num_waiting,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_speculative_tokens=self.num_speculative_tokens,
            hint_wait_ms_max=self.hint_wait_ms,
            has_lookup=False,
            may_pause=not self.always_listen,
            verifies_branches=self.branches,
            max_early_sessions=100_000,
            enable_prefix_caching=has_shared_prefixes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPool(Pool):
    count: int = whole(4, "draft workers; 0: plain decoding", 0, _WORKERS_MAX)
    price: float = real(1.0, "price of one", 0.0, 1e9)
    fixed_ms: float = real(2.0, "fixed part of a forward pass", 0.0, 1e6)
    token_ms: float = real(0.02, "of a forward pass, per node or prompt token fed", 0.0, 1e6)
    sequence_ms: float = real(0.02, "of a forward pass, per session in it", 0.0, 1e6)
    max_num_seqs: int = whole(32, "sessions at once", 1, 10_000)
    max_nodes_per_step: int = whole(8, "hints grown at a time, over all sessions", 1, 512)
    max_chain_nodes: int = whole(3, "nodes fed one below the other before hints are sent", 0, 256)
    max_lookahead: int = whole(20, "maximum of hints ahead of the target", 1, 256)
    max_alternatives: int = whole(4, "alternatives beside the first candidate", 0, 32)

    def limits(self, max_model_len: int, *, has_shared_prefixes: bool) -> DraftLimits:
        return DraftLimits(
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            max_nodes_per_step=self.max_nodes_per_step,
            max_chain_nodes=self.max_chain_nodes,
            max_lookahead=self.max_lookahead,
            max_alternatives=self.max_alternatives,
            enable_prefix_caching=has_shared_prefixes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    worker_ms: float = real(0.3, "a message between draft and target worker, one way", 0.0, 1e5)
    coordinator_ms: float = real(0.5, "a message between coordinator and worker, one way", 0.0, 1e5)
    jitter: float = real(0.2, "mean extra delay, as a share (exponential)", 0.0, 100.0)
    coordinators: int = whole(1, "coordinator replicas; each learns the others' load with a delay", 1, 1000)
    step_us: float = real(0.0, "processor time of a coordinator per step and stream, µs; 0: enough replicas", 0.0, 1e6)
    max_queue_wait_s: float = real(
        30.0, "longest wait in a coordinator for a slot; longer waits are refused", 0.001, 1e6
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    concurrency: int | None = whole(None, "closed loop: requests in flight; left out: 50 % of all slots", 1, 10_000_000)
    rate: float | None = real(None, "open loop instead: requests per second, Poisson arrivals", 1e-6, 1e7)
    warmup_s: float = real(10.0, "before the measurement", 0.0, 1e6)
    seconds: float = real(20.0, "of the measurement", 0.01, 1e6)

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.rate is not None:
            raise InvalidRequest("rate", "[traffic] has rate and concurrency; give one of the two")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKind:
    share: float = real(1.0, "weight among the kinds of requests", 0.0, 1e9)
    prompt_tokens: tuple[int, int] = length((256, 256), "length of the prompt: a number, or [least, most]", 1_000_000)
    shared_prefix: int = whole(0, "number of its first tokens that all prompts of the kind share", 0, 1_000_000)
    output_tokens: tuple[int, int] = length((64, 256), "length of the output", 1_000_000)
    acceptance: float = real(0.75, "probability that the draft's first candidate is right", 0.0, 1.0)
    streaks: float = real(0.0, "correlation of one candidate being right with the one before", 0.0, 0.99)
    alternatives: float = real(
        0.6, "probability that an alternative is right when the first candidate is wrong", 0.0, 1.0
    )
    certainty: float = real(0.0, "share of candidates for which the draft knows whether they are right", 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A whole fleet. `texts` is recorded agreement (`command_line.tune.agreement`), in place of probabilities."""

    target: TargetPool = field(default_factory=TargetPool)
    draft: DraftPool = field(default_factory=DraftPool)
    network: Network = field(default_factory=Network)
    traffic: Traffic = field(default_factory=Traffic)
    kinds: tuple[RequestKind, ...] = (RequestKind(),)
    seed: int = 0
    texts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        """Checks the settings against each other. Raises InvalidRequest."""
        try:
            self.target_limits()
        except ConfigurationError as error:
            raise InvalidRequest("target", f"[target]: {error.message}") from error
        if not sum(kind.share for kind in self.kinds) > 0.0:
            raise InvalidRequest("share", "[[request]] shares are all 0")
        for kind in self.kinds:
            longest = kind.prompt_tokens[1] + kind.output_tokens[1]
            if longest > self.target.max_model_len:
                raise InvalidRequest(
                    "max_model_len",
                    f"[[request]] prompt and output have up to {longest} tokens, [target] max_model_len permits "
                    f"{self.target.max_model_len}",
                )
            if longest + self.target.num_speculative_tokens + 1 > self.target.kv_tokens - BLOCK_SIZE:
                raise InvalidRequest(
                    "kv_tokens",
                    f"[[request]] prompt and output have up to {longest} tokens, more than [target] kv_tokens "
                    f"({self.target.kv_tokens}) allows",
                )
            if kind.shared_prefix > kind.prompt_tokens[0]:
                raise InvalidRequest("shared_prefix", "[[request]] shared_prefix is longer than the prompt")

    def target_limits(self) -> SchedulerLimits:
        return self.target.limits(has_shared_prefixes=self._has_shared_prefixes)

    def draft_limits(self) -> DraftLimits:
        return self.draft.limits(self.target.max_model_len, has_shared_prefixes=self._has_shared_prefixes)

    @property
    def _has_shared_prefixes(self) -> bool:
        return any(kind.shared_prefix for kind in self.kinds)

    @property
    def concurrency(self) -> int:
        """Requests in flight in a closed loop; 50 % of all slots by default."""
        return self.traffic.concurrency or max(self.target.count * self.target.max_num_seqs // 2, 1)

    @property
    def price(self) -> float:
        return self.target.count * self.target.price + self.draft.count * self.draft.price

    def with_pools(self, num_targets: int, num_drafts: int) -> Fleet:
        """The same load on other pools."""
        is_closed = self.traffic.rate is None
        return replace(
            self,
            traffic=replace(self.traffic, concurrency=self.concurrency) if is_closed else self.traffic,
            target=replace(self.target, count=num_targets),
            draft=replace(self.draft, count=num_drafts),
        )


_TABLES: Final[dict[str, type[Any]]] = {
    "target": TargetPool,
    "draft": DraftPool,
    "network": Network,
    "traffic": Traffic,
}


def parse_fleet(text: str) -> Fleet:
    """Parses a fleet file. Raises InvalidRequest, which names what is wrong and what is permitted."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(None, f"not TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key in _TABLES:
            values[key] = read_table(_TABLES[key], value, f"[{key}]")
        elif key == "request":
            tables = value if isinstance(value, list) else [value]
            values["kinds"] = tuple(read_table(RequestKind, each, "[[request]]") for each in tables)
        elif key == "seed" and type(value) is int and value >= 0:
            values["seed"] = value
        elif key == "seed":
            raise InvalidRequest("seed", f"seed is {value!r}; permitted: a whole number, 0 or more")
        else:
            raise InvalidRequest(key, f"there is no {key!r}; there are: seed, {', '.join(_TABLES)}, [[request]]")
    if not values.get("kinds", (1,)):
        raise InvalidRequest("request", "there is no [[request]]")
    return Fleet(**values)


def with_pair(fleet: Fleet, profile: Mapping[str, Any]) -> Fleet:
    """The fleet with the costs and the agreement that `outrider tune --json` measured. Raises InvalidRequest."""
    if isinstance(profile, Mapping) and "sources" in profile:
        raise InvalidRequest(
            None, "it compares several sources of hints; give what `outrider tune` prints of one draft"
        )
    try:
        times_of = {
            name: StepTimes.measured(
                [(int(size), float(ms)) for size, ms in profile[name]["step_ms_by_num_tokens"].items()]
            )
            for name in ("target", "draft")
        }
        over = {name: float(value) for name, value in profile["overheads"].items()}
        sequence_ms = {name: float(profile[name]["sequence_ms"]) for name in ("target", "draft")}
        texts = tuple(tuple(map(int, ranks)) for ranks in profile["texts"]["ranks"] if ranks)
        target = replace(
            fleet.target,
            step_ms=_raised(times_of["target"], over["step_ms"] - sequence_ms["target"]),
            sequence_ms=sequence_ms["target"] + over["session_ms"],
            hinted_ms=over["hints_ms"],
            hinted_sequence_ms=over["hints_session_ms"],
            branches=profile.get("settings", {}).get("device", "cpu") == "cpu",
        )
        draft = replace(
            fleet.draft,
            step_ms=_raised(times_of["draft"], over["draft_step_ms"] - sequence_ms["draft"]),
            sequence_ms=sequence_ms["draft"] + over["draft_session_ms"],
        )
        network = replace(fleet.network, worker_ms=over["link_ms"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(None, f"not what `outrider tune --json` prints: {error!r}") from error
    if not texts:
        raise InvalidRequest(None, "it contains no sequence to take the acceptance from")
    # The draft's typical confidence in its candidate.
    kinds = tuple(replace(kind, acceptance=coverage(texts, 1)) for kind in fleet.kinds)
    return replace(fleet, target=target, draft=draft, network=network, kinds=kinds, texts=texts)


def _raised(step_ms: StepTimes, more_ms: float) -> StepTimes:
    return StepTimes(step_ms.num_tokens, tuple(max(ms + more_ms, 1e-6) for ms in step_ms.step_ms))


def example() -> str:
    """A fleet file with every setting at its default."""
    lines = ["# A fleet for `outrider simulate`. Every setting may be left out; these are the defaults.", ""]
    lines += ["seed = 0", ""]
    for name, kind in _TABLES.items():
        lines += [*example_of(kind, f"[{name}]"), ""]
    lines += ["# One table for each kind of request: easy ones, hard ones."]
    lines += example_of(RequestKind, "[[request]]")
    return "\n".join(lines) + "\n"
