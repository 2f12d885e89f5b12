"""What one coordinator is told at start. Read from the command line in `__main__` only; sent to every
replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.logs import LogFormat
from outrider.tenants import check_tenant_weight

REFUSALS_AT_ONCE: Final = 128
"""Requests beyond those served that a replica takes in to refuse them."""
METRICS_PORTS: Final = 16
"""From `metrics_port` on: replicas of one machine, those that leave included."""
CLIENT_STALL_MAX_S: Final = 30.0
"""How long output may wait for its reader, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Checks itself on construction; raises ValueError that names the field."""

    tokenizer_dir: str  # model folder whose tokenizer the targets share
    redis_url: str
    served_model_names: tuple[str, ...] = ()  # only targets of these names; empty: whatever is registered
    chat_template: str | None = None  # Jinja text that replaces the model's own
    seed_requests: bool = False  # sampled requests without a seed get one: coupled decoding for all
    uses_priors: bool = True  # requests start as their like fared best; False: all by speculating
    requests_max: int = 512  # sequences at once in one replica, those that wait included
    queue_wait_max_s: float = 30.0  # of a request that has no token yet, for a place at a target
    tenant_weights: tuple[tuple[str, float], ...] = ()  # shares of tokens and slots; 1 for those not named
    deadline_default_s: float = 600.0  # for requests that carry none
    deadline_max_s: float = 3600.0
    # Between two events of a session, then the worker is lost. One that makes a session wait says so every second.
    target_silence_max_s: float = 20.0  # above a worker's own bound for a step
    draft_silence_max_s: float = 5.0  # a draft worker reports about once a second
    target_attempts_max: int = (
        3  # targets tried for one request before its first token, and lost to it at all
    )
    target_wait_max_s: float = 60.0  # how long a text that has begun looks for a target to go on at
    client_stall_max_s: float = CLIENT_STALL_MAX_S  # how long output may wait for its reader
    draft_attempts_max: int = 3  # draft workers tried for one attachment
    quarantine_s: float = 3.0  # how long a worker that failed to answer is passed over
    tls_dir: str | None = None  # certificates to call workers with; None: in the clear
    require_worker_ids: bool = False  # a worker whose certificate names no id is not used
    otlp_endpoint: str | None = None  # where traces go; None: nowhere
    log_format: LogFormat = LogFormat.TEXT
    log_path: str | None = None  # of replicas' logs; None: their standard error, which Ray keeps in files
    logs_requests: bool = False  # a line for each
    api_keys_file: str | None = None  # None: whoever reaches it may ask
    # Each replica's own `/metrics`, on the first free one of METRICS_PORTS ports from here on. None: there is none.
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    is_metrics_insecure: bool = (
        False  # the operator knows that the network itself keeps strangers from that port
    )

    def __post_init__(self) -> None:
        for name in (
            "requests_max", "queue_wait_max_s", "deadline_default_s", "deadline_max_s", "target_silence_max_s",
            "draft_silence_max_s", "target_attempts_max", "target_wait_max_s", "client_stall_max_s",
            "draft_attempts_max", "quarantine_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.require_worker_ids and self.tls_dir is None:
            raise ValueError("require_worker_ids needs tls_dir: certificates name the ids")
        if self.metrics_port is not None:
            if not 0 < self.metrics_port <= 65536 - METRICS_PORTS:
                raise ValueError(
                    f"metrics_port must lie between 1 and {65536 - METRICS_PORTS}, got {self.metrics_port}"
                )
            if self.api_keys_file is not None and self.tls_dir is None and not self.is_metrics_insecure:
                raise ValueError(
                    "metrics_port beside api_keys_file needs tls_dir: that port knows its callers by their "
                    "certificates, and would answer everybody without; name tls_dir, leave metrics_port out, or say "
                    "that it may be so (is_metrics_insecure, OUTRIDER_METRICS_INSECURE=1, --insecure)"
                )
        for tenant, weight in self.tenant_weights:
            check_tenant_weight(tenant, weight)
