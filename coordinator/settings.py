"""Settings of a coordinator: those of every replica, and those of the process that starts them. Read in `__main__` or
from Serve's own configuration (`hosting.app.application`), and sent to every replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from coordinator.formats.names import ReasoningParserName, ToolCallParserName, check_combination
from outrider.addresses import bare_host
from outrider.objective import NO_OBJECTIVE, Objective, parse_tenant_objective
from outrider.observability.logs import LogFormat
from outrider.observability.vllm_names import MetricsNames
from outrider.registry.redis_connection import RedisSettings
from outrider.security.provider_urls import check_provider_url
from outrider.security.tenants import check_tenant_weight, parse_tenant_weight
from outrider.settings import (
    CAPACITY,
    MODEL,
    NETWORK,
    SECURITY,
    SPECULATION,
    SettingError,
    check,
    same_as,
    setting,
    settings_of,
)

METRICS_PORTS: Final = 16
"""From `metrics_port` on: replicas of one machine, those that leave included."""
CLIENT_STALL_MAX_S: Final = 30.0
"""How long output may wait for its reader, where nothing else is said."""
DRAIN_GRACE_S: Final = 10.0


class Hosting(StrEnum):
    """The host of the replicas."""

    RAY_SERVE = "ray-serve"
    PLAIN = "plain"


class Proxy(StrEnum):
    """The proxy in front of the replicas."""

    HAPROXY = "haproxy"
    PYTHON = "python"


ALL_TENANTS: Final = "*"
_SECONDS: Final[Mapping[str, Any]] = {"group": CAPACITY, "unit": "seconds", "above": 0}


def _absolute(path: str) -> str:
    """A link stays one: a secret of Kubernetes is a link to a folder that the next version replaces."""
    return str(Path(path).absolute())


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Settings of every replica. Raises ValueError that names the field or its flag."""

    tokenizer_dir: str = setting(
        "", "model folder whose tokenizer the targets share; required without --models",
        MODEL, "folder", flag="--tokenizer", parse=lambda path: path and str(Path(path).resolve()),
    )  # fmt: skip
    models_file: str | None = setting(
        None, "TOML file of several models, each with its own tokenizer, chat template, parsers and draft models, "
        "instead of --tokenizer; it may change at any time",
        MODEL, "file", flag="--models", parse=_absolute,
    )  # fmt: skip
    redis_url: str = same_as(RedisSettings, "redis_url", "")
    served_model_names: tuple[str, ...] = setting(
        (), "serve only targets of this name; may be repeated",
        MODEL, "name", flag="--served-model-name", shows="all",
    )  # fmt: skip
    chat_template: str | None = setting(
        None, "Jinja file instead of the model's own template; in a configuration file, the text of the template",
        MODEL, "file", parse=lambda path: Path(path).read_text(encoding="utf-8"),
    )  # fmt: skip
    tool_call_parser: ToolCallParserName | None = setting(
        None, "format in which the model writes tool calls", MODEL, shows="recognized by the chat template, else hermes"
    )
    reasoning_parser: ReasoningParserName | None = setting(
        None, "format in which the model writes its reasoning; none leaves it in the content",
        MODEL, shows="recognized by the chat template, else none",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), "let web pages of this origin, such as https://chat.example.com, or * of any, call the HTTP API; may be "
        "repeated",
        MODEL, "origin", flag="--cors-origin", shows="none",
    )  # fmt: skip
    seed_requests: bool = setting(
        True, "give sampled requests without a seed a random one, reported in metrics.seed: any of them can be "
        "repeated, and all decoding is coupled, which sends no distributions between workers. Requests that ask for "
        "rejection sampling get none",
        MODEL,
    )  # fmt: skip
    uses_priors: bool = setting(
        True, "start every request with speculation, however it went for similar ones",
        SPECULATION, flag="--no-priors", is_inverse=True, is_advanced=True,
    )  # fmt: skip
    memory_tenants: tuple[str, ...] = setting(
        (), "let memory workers remember what is generated for this tenant (`user` over HTTP, `tenant` over gRPC), or "
        "for all with *, and hint at it when that tenant's requests come to it again; may be repeated",
        SPECULATION, "tenant", flag="--memory-tenant", shows="none",
    )  # fmt: skip
    requests_max: int = setting(
        512, "most requests at once per replica, those that wait included; one of n (best_of) sequences counts n; "
        "half of them are kept for all served models in equal parts, so that no model can take all of them. Lines of "
        "batches have a limit of their own, half as high",
        CAPACITY, "requests", flag="--max-requests", at_least=1,
    )  # fmt: skip
    queue_wait_max_s: float = setting(
        30.0, "longest wait for a slot at a target worker; a request that would wait longer is refused at once, "
        "with status 429 and Retry-After",
        **_SECONDS, flag="--max-queue-wait",
    )  # fmt: skip
    tenant_weights: tuple[tuple[str, float], ...] = setting(
        (), "weight of a tenant (`user` over HTTP, `tenant` over gRPC) for tokens and slots while requests wait; "
        "tenants that are not named have 1; may be repeated",
        CAPACITY, "name=weight", flag="--tenant-weight", parse=parse_tenant_weight,
    )  # fmt: skip
    tenant_objectives: tuple[tuple[str, Objective], ...] = setting(
        (), "service-level objective of a tenant's requests, or with * of all others', where they carry none: "
        "milliseconds to the first token (ttft) and per token after it (tpot); may be repeated",
        CAPACITY, "name=ttft:MS,tpot:MS", flag="--tenant-slo", parse=parse_tenant_objective,
    )  # fmt: skip
    deadline_default_s: float = setting(
        600.0, "deadline of requests that carry none", **_SECONDS, flag="--request-timeout"
    )
    deadline_max_s: float = setting(
        3600.0, "longest deadline that a request may carry", CAPACITY, "seconds", flag=None, above=0
    )
    target_silence_max_s: float = setting(
        20.0, "how long a target worker may send nothing for a sequence, in addition to its own bound for a step; "
        "then it counts as lost, and the sequence continues at another",
        **_SECONDS, flag="--target-silence-max",
    )  # fmt: skip
    draft_silence_max_s: float = setting(
        5.0, "longest silence of a draft worker, which reports about every second; then it counts as lost",
        **_SECONDS, flag=None,
    )  # fmt: skip
    target_attempts_max: int = setting(
        3, "targets tried for one request before its first token, and targets that it may lose",
        CAPACITY, "targets", flag=None, at_least=1,
    )  # fmt: skip
    target_wait_max_s: float = setting(
        60.0, "how long a sequence that has begun looks for another target", **_SECONDS, flag=None
    )
    client_stall_max_s: float = setting(
        CLIENT_STALL_MAX_S, "longest that output waits for a client that does not read it; then the request ends, "
        "and can be resumed, and a connection that takes nothing is closed",
        **_SECONDS, flag="--client-stall-max",
    )  # fmt: skip
    response_life_s: float = setting(
        3600.0, "how long Redis keeps a response of the Responses API, with its conversation, for requests that refer "
        "to it; 0 keeps none",
        CAPACITY, "seconds", flag="--response-life", at_least=0,
    )  # fmt: skip
    batch_files: str | None = setting(
        None, "folder that all coordinators share, or s3://BUCKET/PREFIX, for the files of batches: turns on "
        "/v1/files and /v1/batches",
        CAPACITY, "folder|URL", shows="no batches", parse=lambda place: place if "://" in place else _absolute(place),
    )  # fmt: skip
    batch_bytes_max: int = setting(
        4 << 30, "most bytes of a tenant's files together, those of its batches' output included",
        CAPACITY, "bytes", at_least=1,
    )  # fmt: skip
    draft_attempts_max: int = setting(
        3, "draft workers tried for one attachment", CAPACITY, "draft workers", flag=None, at_least=1
    )
    quarantine_s: float = setting(3.0, "how long a worker that failed to answer is not used", **_SECONDS, flag=None)
    tls_dir: str | None = setting(
        None, "with tls.crt, tls.key and ca.crt: mutual TLS with the workers, and TLS on the public ports (HAProxy "
        "only); the files may be replaced at any time",
        SECURITY, "folder", variable="OUTRIDER_TLS_DIR", parse=_absolute,
    )  # fmt: skip
    require_worker_ids: bool = setting(
        False, "with --tls-dir: use no worker whose certificate does not name its id (`outrider certificates "
        "--worker`); otherwise a worker whose certificate names no id may announce any id",
        SECURITY, variable="OUTRIDER_REQUIRE_WORKER_IDS",
    )  # fmt: skip
    otlp_endpoint: str | None = setting(
        None, "OpenTelemetry collector to send traces to, such as http://127.0.0.1:4317; OpenTelemetry's variables "
        "for sampling and headers apply",
        SECURITY, "URL", shows="no traces",
    )  # fmt: skip
    log_format: LogFormat = setting(LogFormat.TEXT, "format of replicas' log lines, on standard error", SECURITY)
    log_path: str | None = setting(
        None, "file of replicas' logs",
        SECURITY, "file", flag=None, shows="their standard error, which Ray keeps in files",
    )  # fmt: skip
    logs_requests: bool = setting(
        False, "log a line for each request: tenant, times, token counts; never the prompt or the output",
        SECURITY, flag="--log-requests",
    )  # fmt: skip
    api_keys_file: str | None = setting(
        None, "requests need a key from this file (`outrider keys`), which may change at any time",
        SECURITY, "file", flag="--api-keys", variable="OUTRIDER_API_KEYS",
        shows="everybody who reaches it can send requests", parse=_absolute,
    )  # fmt: skip
    is_local: bool = setting(
        False, "without keys: answer only if Host is localhost, an address or a name below .localhost or .internal; "
        "as flags, if --host is this machine's own and neither --api-keys, --oidc-issuer nor --insecure is given",
        SECURITY, flag=None,
    )  # fmt: skip
    oidc_issuer: str | None = setting(
        None, "accept tokens (JWT) of this OpenID Connect provider, beside API keys; with the audience below",
        SECURITY, "URL", variable="OUTRIDER_OIDC_ISSUER",
    )  # fmt: skip
    oidc_audience: str | None = setting(
        None, "audience (`aud`) that such a token has to name; required with --oidc-issuer",
        SECURITY, "name", variable="OUTRIDER_OIDC_AUDIENCE",
    )  # fmt: skip
    oidc_jwks_url: str | None = setting(
        None, "address of the provider's public keys",
        SECURITY, "URL", variable="OUTRIDER_OIDC_JWKS_URL", shows="found by the provider's discovery document",
    )  # fmt: skip
    oidc_tenant_claim: str = setting(
        "sub", "claim of a token that names its tenant; /a/b is claim b inside of claim a. Choose one that only the "
        "provider can set",
        SECURITY, "claim", variable="OUTRIDER_OIDC_TENANT_CLAIM",
    )  # fmt: skip
    oidc_ca_file: str | None = setting(
        None, "certificates of the authorities that the provider's certificate may come from",
        SECURITY, "file", variable="OUTRIDER_OIDC_CA_FILE", shows="the well-known ones", parse=_absolute,
    )  # fmt: skip
    metrics_port: int | None = setting(
        None, "each replica serves its own /metrics here, or on the next free port; with --tls-dir scrapers need a "
        "certificate; --api-keys and --oidc-issuer require --tls-dir for it",
        NETWORK, "port", at_least=1, at_most=65536 - METRICS_PORTS, shows="none",
    )  # fmt: skip
    metrics_names: MetricsNames = setting(
        MetricsNames.BOTH, "names of the metrics that vLLM has, too: outrider_..., vllm:... or both; others have only "
        "ours",
        NETWORK,
    )  # fmt: skip
    metrics_host: str = setting(
        "127.0.0.1", "address of metrics_port; as a flag, --host", NETWORK, "address", flag=None, parse=bare_host
    )
    is_metrics_insecure: bool = setting(
        False, "permit metrics_port without certificates, because the network itself protects it; as a flag, "
        "--insecure",
        SECURITY, flag=None, variable="OUTRIDER_METRICS_INSECURE",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        check_combination(self.tool_call_parser, self.reasoning_parser)
        self._check_models()
        if self.require_worker_ids and self.tls_dir is None:
            raise ValueError("require_worker_ids needs tls_dir: certificates name the ids")
        check_identity_provider(self)
        may_have_port = self.tls_dir is not None or self.is_metrics_insecure
        if self.metrics_port is not None and self.knows_callers and not may_have_port:
            raise ValueError(
                "metrics_port beside api_keys_file or oidc_issuer needs tls_dir: that port identifies its callers by "
                "certificates, and without them it answers everybody; set tls_dir, omit metrics_port, or permit "
                "it (is_metrics_insecure, OUTRIDER_METRICS_INSECURE=1, --insecure)"
            )
        for tenant, weight in self.tenant_weights:
            check_tenant_weight(tenant, weight)

    @property
    def knows_callers(self) -> bool:
        """Whether requests need an API key or a token."""
        return self.api_keys_file is not None or self.oidc_issuer is not None

    def may_remember(self, tenant: str) -> bool:
        """Whether memory workers may be told what is generated for a tenant."""
        return ALL_TENANTS in self.memory_tenants or tenant in self.memory_tenants

    def objective_of(self, tenant: str) -> Objective:
        """The objective of a tenant's requests that carry none."""
        by_tenant = dict(self.tenant_objectives)
        return by_tenant.get(tenant, NO_OBJECTIVE).or_else(by_tenant.get(ALL_TENANTS, NO_OBJECTIVE))

    def _check_models(self) -> None:
        """Raises ValueError unless exactly one setting says which models there are."""
        if self.models_file is None:
            if not self.tokenizer_dir:
                raise ValueError("--tokenizer (tokenizer_dir) or --models (models_file) is required")
            return
        of_one_model = {
            "--tokenizer": self.tokenizer_dir,
            "--served-model-name": self.served_model_names,
            "--chat-template": self.chat_template,
            "--tool-call-parser": self.tool_call_parser,
            "--reasoning-parser": self.reasoning_parser,
        }
        if given := [flag for flag, value in of_one_model.items() if value]:
            raise ValueError(
                f"{given[0]} is for one model, and --models names several; say it in the entries of {self.models_file}"
            )


def check_identity_provider(given: Any) -> None:
    """Checks the settings `oidc_...` of CoordinatorSettings or of others with the same fields. Raises SettingError."""
    names = ("oidc_audience", "oidc_jwks_url", "oidc_ca_file")
    if given.oidc_issuer is None:
        for name in names:
            if getattr(given, name) is not None:
                raise SettingError(name, f"--{name.replace('_', '-')} needs --oidc-issuer")
        return
    if not given.oidc_audience:
        raise SettingError(
            "oidc_audience",
            "--oidc-issuer needs --oidc-audience: without it tokens that the provider made for other services would be "
            "good here",
        )
    if not given.oidc_tenant_claim.strip("/"):
        raise SettingError("oidc_tenant_claim", "--oidc-tenant-claim is empty; sub is the default")
    for name in ("oidc_issuer", "oidc_jwks_url"):
        url = getattr(given, name)
        if url is not None:
            try:
                check_provider_url(f"--{name.replace('_', '-')}", url)
            except ValueError as error:
                raise SettingError(name, str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Settings of the process that starts the replicas of a machine. Raises ValueError that names the flag."""

    host: str = setting(
        "127.0.0.1", "address of the HTTP and gRPC listeners; :: is all addresses, IPv6 and IPv4; other ports are on "
        "the loopback, except Ray's, which require its token",
        NETWORK, "address", parse=bare_host,
    )  # fmt: skip
    port: int = setting(8000, "HTTP port (the OpenAI API)", NETWORK, "port")
    grpc_port: int = setting(9000, "gRPC port (outrider.v1.Generation)", NETWORK, "port")
    hosting: Hosting = setting(
        Hosting.RAY_SERVE, "what runs the replicas; plain is this process itself, without Ray: one replica, and no TLS "
        "on the public ports, as behind a load balancer on Kubernetes",
        NETWORK,
    )  # fmt: skip
    proxy: Proxy | None = setting(
        None, "proxy that accepts requests; python is that of Ray Serve, which runs everywhere and needs several "
        "times more time per streamed chunk",
        NETWORK, shows="haproxy where it runs",
    )  # fmt: skip
    num_replicas: int = setting(1, "coordinator replicas", CAPACITY, "replicas", at_least=1)
    drain_notice_s: float = setting(
        5.0, "with --hosting plain: how long requests still come in after SIGTERM, while /-/healthz answers 503 so "
        "that load balancers notice; then the listeners close",
        CAPACITY, "seconds", at_least=0,
    )  # fmt: skip
    drain_grace_s: float = setting(
        DRAIN_GRACE_S, "time to finish requests after SIGTERM, or after that notice; what is left ends with an error, "
        "and can be resumed",
        CAPACITY, "seconds", above=0,
    )  # fmt: skip
    redis_url_file: Path | None = same_as(RedisSettings, "redis_url_file")
    redis_wait_s: float = same_as(RedisSettings, "redis_wait_s")
    ray_temp_dir: Path | None = setting(
        None, "folder of Ray's files; its path must be short, and nobody else may be able to write into it", NETWORK,
        "folder", shows="a new folder in /tmp",
    )  # fmt: skip
    needs_client_certificates: bool = setting(
        False, "with --tls-dir: clients, too, need a certificate that ca.crt signed",
        SECURITY, flag="--require-client-certificates",
    )  # fmt: skip
    is_insecure: bool = setting(
        False, "serve without --api-keys or --oidc-issuer on another --host than this machine's own, and under any "
        "name (Host)",
        SECURITY, flag="--insecure", variable="OUTRIDER_INSECURE",
    )  # fmt: skip
    tls_dir: Path | None = None  # as replicas have it

    def __post_init__(self) -> None:
        check(self)
        settings = settings_of(Listen)
        for name, needed, why in _OF_ONE_HOSTING:
            if getattr(self, name) != settings[name].initial and self.hosting is not needed:
                raise SettingError(name, f"{settings[name].title} needs --hosting {needed}: {why}")

    @property
    def has_public_tls(self) -> bool:
        """Whether the HTTP and gRPC listeners accept TLS alone."""
        return self.tls_dir is not None and self.hosting is not Hosting.PLAIN


_OF_ONE_HOSTING: Final = (
    ("num_replicas", Hosting.RAY_SERVE, "a plain process is one replica; start a process for each"),
    ("proxy", Hosting.RAY_SERVE, "a plain process has no proxy"),
    ("ray_temp_dir", Hosting.RAY_SERVE, "a plain process has no Ray"),
    (
        "needs_client_certificates",
        Hosting.RAY_SERVE,
        "a plain process has no TLS on its public ports; let the load balancer in front ask for certificates",
    ),
    ("drain_notice_s", Hosting.PLAIN, "Ray Serve takes a replica that leaves from its proxy at once"),
)
"""Settings of `Listen` that one hosting has, and why the other has not."""
