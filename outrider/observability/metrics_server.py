"""Serves `/metrics` of a process without a web server: HTTP, or HTTPS for clients with a certificate of the authority.

A fixed number of threads each serve one connection at a time: a client that connects and sends nothing, even in the
middle of the handshake, blocks one of them for some seconds. All threads start with the server: where memory is short,
a new thread may die before it begins, and its starter would wait for ever (`threading.Thread.start`).
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from outrider.addresses import bound_socket
from outrider.errors import ConfigurationError
from outrider.security.tls import TlsFiles

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0  # per read or write of a connection
_NUM_THREADS: Final = 16
_PAUSE_S: Final = 0.2  # before the next connection, after a lack of memory


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Suppresses the log line for every scrape."""


class _MetricsServer(WSGIServer):
    def __init__(self, host: str, port: int, files: TlsFiles | None) -> None:
        self._files = files
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound_socket(host, port)
        # Without the base class' lookup of this machine's name, which asks the network.
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()
        self.server_activate()

    def serve(self) -> None:
        """Serves one connection after the other, whatever happens."""
        while True:
            try:
                request, address = self.get_request()
                try:
                    self.finish_request(request, address)
                finally:
                    self.shutdown_request(request)
            except Exception:
                with contextlib.suppress(Exception):  # there may be no memory even for that
                    logger.warning("a request for metrics could not be answered", exc_info=True)
                time.sleep(_PAUSE_S)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_TIMEOUT_S)
        # A peer without a certificate, or one that stops in the middle, is not our error.
        with contextlib.suppress(OSError, ssl.SSLError):
            if self._files is None:
                super().finish_request(request, client_address)
            else:
                with self._files.server_context().wrap_socket(request, server_side=True) as encrypted:
                    super().finish_request(encrypted, client_address)


def serve_metrics(registry: CollectorRegistry, host: str, port: int, files: TlsFiles | None = None) -> int:
    """Serves `/metrics` on threads of its own; returns the port (0 picks a free one). Raises ConfigurationError."""
    try:
        server = _MetricsServer(host, port, files)
    except OSError as error:
        raise ConfigurationError(
            f"metrics port {port} on {host} cannot be used ({error.strerror}); name another with --metrics-port"
        ) from error
    server.set_app(make_wsgi_app(registry))
    for number in range(_NUM_THREADS):
        threading.Thread(target=server.serve, name=f"metrics-{number}", daemon=True).start()
    return int(server.server_port)
