"""Settings of `outrider bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.settings import check, setting

_ASKED = "Whom to ask"
_LOAD = "How hard"
_ASKING = "What to ask"
_RESULT = "What to make of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Settings of `outrider bench`. Raises SettingError."""

    url: tuple[str, ...] = setting(
        (), "server address, with or without /v1. May be repeated; the servers are measured alternately",
        _ASKED, "[name=]url", shows="http://127.0.0.1:8000",
    )  # fmt: skip
    model: str | None = setting(None, "model to ask for", _ASKED, shows="the first of GET /v1/models")
    api_key: str | None = setting(None, "sent to every server as a bearer token", _ASKED, variable="OPENAI_API_KEY")
    timeout_s: float = setting(120.0, "wait for one whole answer", _ASKED, "seconds", at_least=0.1)
    concurrency: str | None = setting(
        None, "closed loop: number of requests in flight at all times. A list gives several levels",
        _LOAD, "n[,n...]", shows="1,8",
    )  # fmt: skip
    rate: str | None = setting(
        None, "open loop instead: R requests per second with Poisson arrivals, however slow the server is",
        _LOAD, "r[,r...]",
    )  # fmt: skip
    num_requests: int | None = setting(
        None, "counted requests per server, level and round", _LOAD, "requests", at_least=1,
        shows="8 × the level, at least 16; with --duration-s as many as fit",
    )  # fmt: skip
    duration_s: float | None = setting(
        None, "time after which no further request starts, per server, level and round",
        _LOAD, "seconds", at_least=0.1,
    )  # fmt: skip
    warmup: int | None = setting(
        None, "requests before the counted ones, each time", _LOAD, "requests", at_least=0,
        shows="one per connection",
    )  # fmt: skip
    rounds: int = setting(
        1, "number of rounds; in each one all servers are measured at all levels. Use 3 or more for reliable medians",
        _LOAD, "rounds", at_least=1, at_most=1000,
    )  # fmt: skip
    prompts: Path | None = setting(
        None, 'JSON lines with a "prompt" each, or plain text with blank lines between prompts',
        _ASKING, "file", shows="a few built-in ones",
    )  # fmt: skip
    chat: bool = setting(False, "which endpoint to use", _ASKING, flag="--chat/--completions", shows="completions")
    max_tokens: int = setting(128, "longest output", _ASKING, "tokens", at_least=1)
    temperature: float = setting(
        0.0, "sampling temperature; 0 always takes the most likely token", _ASKING, at_least=0, at_most=2
    )
    seed: int | None = setting(
        None, "seed of the arrivals; request i gets SEED + i", _ASKING, at_least=0,
        shows="0 for arrivals, none in requests",
    )  # fmt: skip
    ignore_eos: bool = setting(
        False,
        "generate --max-tokens tokens even after the end of the output, so that all servers do equal work",
        _ASKING,
    )
    extra_body: str = setting(
        "{}", "JSON object merged into each request; null removes a field", _ASKING, "json", shows="none"
    )
    slo_ttft_ms: float | None = setting(None, "goodput: longest TTFT of a good answer", _RESULT, "ms", at_least=0)
    slo_tpot_ms: float | None = setting(None, "goodput: longest TPOT of a good answer", _RESULT, "ms", at_least=0)
    json: Path | None = setting(None, "write everything as one JSON object; - for standard output", _RESULT, "file|-")
    requests: bool = setting(False, "put every single request into --json too", _RESULT)
    plot: Path | None = setting(None, "draw throughput and TPOT over the levels", _RESULT, "file")

    def __post_init__(self) -> None:
        check(self)
