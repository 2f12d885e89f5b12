"""Corrections to Ray Serve's gRPC listeners: one address instead of all, an exclusive port, bounded messages.

Serve (2.60) binds the gRPC servers of its proxies and replicas to every address of the machine and has no option for
it. It has a hook that runs in each of these processes before they listen, the one for HTTP middleware, and one function
through which they all listen.

Serve intends exclusive ports and tries the next one if one is taken. But it passes gRPC that option as text instead of
a number, and is ignored: replicas of two systems on one machine then share a port, and half of the calls to one system
reach the other.

Serve also accepts messages of two gigabytes, and expands them, from anybody, before a key is checked. Here a message is
limited to the needs of a request, nothing is expanded, and calls of Serve's own service, which asks for no key, are
bounded in number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from ray.serve._private import default_impl, grpc_util

from coordinator.api.grpc.grpc_ingress import MESSAGE_BYTES_MAX
from coordinator.hosting.ingress import GRPC_HOST_VARIABLE
from outrider.addresses import join_address, split_address
from outrider.security.call_admission import READING_OPTIONS, OpenCalls, admitted

_REUSE_PORT: Final = "grpc.so_reuseport"
_RECEIVE_MAX: Final = "grpc.max_receive_message_length"
STREAMS_MAX: Final = 1024
"""Calls at once on one connection; a gateway may have a single one."""


def listen_on_one_address() -> list[Any]:
    """Patches gRPC servers that this process starts later: they listen on the variable's address, if it is set, share
    their port only if Serve says so, and take messages of a bounded size.

    Returns Serve's value for "no middleware".
    """
    grpc_util.gRPCGenericServer = _Server
    own = (*READING_OPTIONS, (_RECEIVE_MAX, MESSAGE_BYTES_MAX), ("grpc.max_concurrent_streams", STREAMS_MAX))
    grpc_util.DEFAULT_GRPC_SERVER_OPTIONS = [
        *((name, value) for name, value in grpc_util.DEFAULT_GRPC_SERVER_OPTIONS if name not in dict(own)),
        *own,
    ]
    host = os.environ.get(GRPC_HOST_VARIABLE)
    if host is not None:

        def add_address(server: Any, address: str) -> None:
            server.add_insecure_port(join_address(host, split_address(address)[1]))

        default_impl.add_grpc_address = add_address
    return []


class _Server(grpc_util.gRPCGenericServer):
    def __init__(self, *arguments: Any, extra_options: Sequence[tuple[str, Any]] = (), **named: Any) -> None:
        options = [(name, int(value) if name == _REUSE_PORT else value) for name, value in extra_options]
        super().__init__(*arguments, extra_options=options, **named)
        self._open_calls = OpenCalls()

    def _override_method_handler(self, service_method: str, method_handler: Any) -> Any:
        """Makes the handlers of Serve's own service. Ours register theirs as they are."""
        return admitted(super()._override_method_handler(service_method, method_handler), self._open_calls.admission)
