"""Asks a server one kind of request over a connection of its own, and reads its whole answer."""

from __future__ import annotations

import http.client
import json
from typing import Any, Final
from urllib.parse import urlsplit

from tests.clients.compare.comparing import Answer
from tests.clients.compare.kinds import Kind

_DEADLINE_S: Final = 60.0
_HEADERS_READ: Final = {
    *("allow", "content-type", "retry-after", "x-request-id", "www-authenticate"),
    *("access-control-allow-origin", "access-control-allow-methods", "access-control-allow-headers"),
    "access-control-allow-credentials",
}


class _Connection10(http.client.HTTPConnection):
    """A connection of HTTP/1.0."""

    _http_vsn = 10
    _http_vsn_str = "HTTP/1.0"


def ask(url: str, kind: Kind) -> Answer:
    """The server's answer; a connection that breaks is one of status 0."""
    parts = urlsplit(url)
    connect = _Connection10 if kind.version == "HTTP/1.0" else http.client.HTTPConnection
    connection = connect(parts.hostname or "127.0.0.1", parts.port, timeout=_DEADLINE_S)
    try:
        connection.request(kind.method, kind.path, kind.body, dict(kind.headers))
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, body=type(error).__name__)
    finally:
        connection.close()
    headers = {name.lower(): value for name, value in response.getheaders() if name.lower() in _HEADERS_READ}
    return answer_of(response.status, headers, content)


def answer_of(status: int, headers: dict[str, str], content: bytes) -> Answer:
    """The answer as data: JSON, events of a stream, or the first line of anything else."""
    text = content.decode(errors="replace")
    if headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(status, headers, events=tuple(_event(line) for line in text.splitlines() if _is_data(line)))
    try:
        return Answer(status, headers, body=json.loads(text))
    except ValueError:
        return Answer(status, headers, body=text[:80].partition("\n")[0])


def _is_data(line: str) -> bool:
    return line.startswith("data:")


def _event(line: str) -> Any:
    data = line.removeprefix("data:").strip()
    try:
        return json.loads(data)
    except ValueError:
        return data
