"""The checks of a new session that both kinds of worker make alike. Pure."""

from __future__ import annotations

from typing import Final

from outrider.engine.kv.prefix_cache import check_cache_salt
from outrider.errors import InvalidRequest
from outrider.security.tenants import check_owner
from protos.outrider.v1 import draft_pb2, target_pb2

SESSION_ID_CHARS_MAX: Final = 64
HINT_TOKEN_CHARS_MAX: Final = 64


def is_session_id(text: str) -> bool:
    """Whether callers and draft workers may call a session so."""
    return 0 < len(text) <= SESSION_ID_CHARS_MAX and " " not in text


def check_session(request: target_pb2.GenerateRequest | draft_pb2.AttachRequest) -> None:
    """Raises InvalidRequest that names the field."""
    if not is_session_id(request.session_id):
        raise InvalidRequest("session_id", f"session_id must have 1 to {SESSION_ID_CHARS_MAX} characters and no blanks")
    if len(request.hint_token) > HINT_TOKEN_CHARS_MAX:
        raise InvalidRequest("hint_token", f"hint_token may have at most {HINT_TOKEN_CHARS_MAX} characters")
    check_cache_salt(request.cache_salt)
    check_owner(request.owner)
    if not request.token_ids:
        raise InvalidRequest("token_ids", "token_ids is empty; at least one token is needed to go on from")
