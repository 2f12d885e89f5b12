"""Errors in Anthropic's form. Pure."""

from __future__ import annotations

from typing import Any, Final

from outrider.errors import OutriderError

PATHS_PREFIX: Final = "/v1/messages"
"""Beginning of the paths whose errors have this form."""
_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "invalid_request_error", 413: "request_too_large",
    429: "rate_limit_error", 504: "timeout_error",
}  # fmt: skip


def has_anthropic_errors(path: str) -> bool:
    """Whether errors of a path have Anthropic's form."""
    return path == PATHS_PREFIX or path.startswith(f"{PATHS_PREFIX}/")


def anthropic_error(error: OutriderError, request_id: str, status: int | None = None) -> dict[str, Any]:
    """Builds Anthropic's error body. `status` is the answer's, the error's own if it is left out."""
    kind = _TYPES.get(status or error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.told}, "request_id": request_id}
