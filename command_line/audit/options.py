"""Settings of `outrider audit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.settings import check, setting

DEFAULT_MAX_TOKENS = 100
_ASKED = "Whom to ask"
_ASKING = "What to ask"
_RESULT = "What to make of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Settings of `outrider audit`. Raises SettingError."""

    url: str = setting("http://127.0.0.1:8000", "address of the server, as `outrider serve` printed it", _ASKED)
    api_key: str | None = setting(None, "sent as a bearer token", _ASKED, variable="OUTRIDER_API_KEY")
    model: str | None = setting(None, "model to ask for", _ASKED, shows="each request's, else the only one")
    timeout_s: float = setting(120.0, "wait for one answer", _ASKED, "seconds", at_least=0.1)
    prompt: tuple[str, ...] = setting(
        (), "a text to continue; may be given more than once", _ASKING, shows="a few built-in ones"
    )
    prompt_file: Path | None = setting(None, "a file whose content is one prompt", _ASKING, "file")
    requests: Path | None = setting(
        None, "bodies of /v1/completions or /v1/chat/completions, one JSON object per line; - for standard input",
        _ASKING, "file|-",
    )  # fmt: skip
    max_tokens: int | None = setting(
        None, "longest output", _ASKING, "tokens", at_least=1,
        shows=f"each request's, {DEFAULT_MAX_TOKENS} for prompts",
    )  # fmt: skip
    temperature: float | None = setting(
        None, "sampling temperature", _ASKING, at_least=0, at_most=2, shows="each request's, 0 for prompts"
    )
    seed: int | None = setting(
        None, "seed of sampled requests that have none", _ASKING, at_least=0, shows="a fixed one"
    )
    repeat: int = setting(1, "runs with speculation per request", _ASKING, "runs", at_least=1)
    concurrency: int = setting(
        1, "requests at once; with more than 1 they share the server's batches",
        _ASKING, "requests", at_least=1, at_most=256,
    )  # fmt: skip
    require_speculation: bool = setting(False, "fail when no hint was verified at all", _RESULT)
    json: bool = setting(False, "report as one JSON object on standard output", _RESULT)

    def __post_init__(self) -> None:
        check(self)
