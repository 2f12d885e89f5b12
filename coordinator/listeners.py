"""Where Serve's gRPC servers listen: on one address instead of on all.

Serve (2.60) gives its gRPC servers, those of its proxies and those of replicas, every address of the machine and has
no option for it. It does have a hook that runs in each of these processes before they listen, the one for HTTP
middleware, and one function through which they all listen.
"""

from __future__ import annotations

import os
from typing import Any

from ray.serve._private import default_impl

from coordinator.ingress import GRPC_HOST_VARIABLE


def listen_on_one_address() -> list[Any]:
    """Makes the gRPC servers that this process starts from now on listen on the variable's address, if it is set.

    Returns Serve's word for "no middleware".
    """
    host = os.environ.get(GRPC_HOST_VARIABLE)
    if host is not None:

        def add_address(server: Any, address: str) -> None:
            server.add_insecure_port(f"{host}:{address.rpartition(':')[2]}")

        default_impl.add_grpc_address = add_address
    return []
