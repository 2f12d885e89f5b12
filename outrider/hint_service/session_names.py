"""Names of sessions in the scheduler: the id and, as a digest, the token that draft workers must show. Pure."""

from __future__ import annotations

from hashlib import blake2b


def session_name(session_id: str, hint_token: str) -> str:
    """Returns the scheduler's name for a session. A draft worker with the id but not the token names a session that
    does not exist; its hints are kept briefly and dropped.

    The token never reaches a log: a digest stands for it.
    """
    if not hint_token:
        return session_id
    return f"{session_id} {blake2b(hint_token.encode(), digest_size=16).hexdigest()}"


def session_id_of(name: str) -> str:
    """Returns the id in a session's name."""
    return name.partition(" ")[0]
