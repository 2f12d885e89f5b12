"""Where Serve's gRPC servers listen: on one address instead of on all, and on a port that nobody else has.

Serve (2.60) gives its gRPC servers, those of its proxies and those of replicas, every address of the machine and has
no option for it. It does have a hook that runs in each of these processes before they listen, the one for HTTP
middleware, and one function through which they all listen.

Serve means to share no port, too, and tries the next one where one is taken. But it tells gRPC so in text where gRPC
wants a number, and is ignored: replicas of two systems on one machine then share a port, and half of the calls to one
system are answered by the other.

And Serve takes messages of two gigabytes, from anybody: they are received before anyone is asked for a key. Here a
message has at most what a request can need.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from ray.serve._private import default_impl, grpc_util

from coordinator.ingress import GRPC_HOST_VARIABLE

_REUSE_PORT: Final = "grpc.so_reuseport"
_RECEIVE_MAX: Final = "grpc.max_receive_message_length"
MESSAGE_BYTES_MAX: Final = 2 << 20
"""Of a request over gRPC. A prompt of 1 MiB or 262,144 token ids, with all else that one may hold, is less; reading a
message of this size takes 40 ms at most, whatever it is filled with."""


def listen_on_one_address() -> list[Any]:
    """Makes the gRPC servers that this process starts from now on listen on the variable's address, if it is set, and
    share their port only where Serve says so, and take messages of a bounded size.

    Returns Serve's word for "no middleware".
    """
    grpc_util.gRPCGenericServer = _Server
    grpc_util.DEFAULT_GRPC_SERVER_OPTIONS = [
        (name, MESSAGE_BYTES_MAX if name == _RECEIVE_MAX else value)
        for name, value in grpc_util.DEFAULT_GRPC_SERVER_OPTIONS
    ]
    host = os.environ.get(GRPC_HOST_VARIABLE)
    if host is not None:

        def add_address(server: Any, address: str) -> None:
            server.add_insecure_port(f"{host}:{address.rpartition(':')[2]}")

        default_impl.add_grpc_address = add_address
    return []


class _Server(grpc_util.gRPCGenericServer):
    def __init__(self, *arguments: Any, extra_options: Sequence[tuple[str, Any]] = (), **named: Any) -> None:
        options = [(name, int(value) if name == _REUSE_PORT else value) for name, value in extra_options]
        super().__init__(*arguments, extra_options=options, **named)
