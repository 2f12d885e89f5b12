"""`/metrics` of a process without a web server: HTTP, or HTTPS for whoever the authority signed.

A thread for every connection, and a handful of them at most: a client that connects and says nothing, in the middle of
the handshake even, keeps its own thread waiting for some seconds, and nobody else. A process that gets no memory or no
thread for a while serves this port again when it does.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from outrider.errors import ConfigurationError
from outrider.tls import TlsFiles

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 10.0  # with one connection, for each of its reads and writes
_CONNECTIONS_MAX: Final = 16
_PAUSE_S: Final = 0.2  # before the next try where there was no memory to take a connection


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A line for every scrape is nobody's wish."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    files: TlsFiles | None = None

    def __init__(self, address: tuple[str, int], files: TlsFiles | None) -> None:
        self.files = files
        self._room = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Without the base class' look for this machine's name, which asks the network.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread to be had; the base class closes the connection
            self._room.release()
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.warning("a request for metrics could not be answered", exc_info=True)

    def serve_until_the_end(self) -> None:
        """Whatever happens: `serve_forever` ends where memory for a connection is short."""
        while True:
            with contextlib.suppress(Exception):
                self.serve_forever()
            time.sleep(_PAUSE_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_PATIENCE_S)
        # A peer without a certificate, or one that stops in the middle, is its own problem.
        with contextlib.suppress(OSError, ssl.SSLError):
            if self.files is None:
                super().finish_request(request, client_address)
            else:
                with self.files.server_context().wrap_socket(request, server_side=True) as encrypted:
                    super().finish_request(encrypted, client_address)


def serve_metrics(registry: CollectorRegistry, host: str, port: int, files: TlsFiles | None = None) -> int:
    """Serves `/metrics` on threads of its own; returns the port (0 picks a free one). Raises ConfigurationError."""
    try:
        server = _MetricsServer((host, port), files)
    except OSError as error:
        raise ConfigurationError(
            f"metrics port {port} on {host} cannot be used ({error.strerror}); name another with --metrics-port"
        ) from error
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_until_the_end, name="metrics", daemon=True).start()
    return int(server.server_port)
