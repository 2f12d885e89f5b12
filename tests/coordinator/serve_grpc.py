"""A gRPC server of Serve's without Ray: what a proxy or a replica starts, over a handler of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.hosting.ingress import GRPC_HOST_VARIABLE
from coordinator.hosting.listeners import listen_on_one_address
from outrider.local.free_ports import free_ports

TIMEOUT_S = 20.0
Factory = Callable[[str, Any], Any]


@asynccontextmanager
async def serving(
    monkeypatch: pytest.MonkeyPatch, factory: Factory, *functions: Callable[[Any, Any], None]
) -> AsyncIterator[str]:
    """The address of a server with the services that `functions` register; `factory` makes the handlers of calls that
    Serve would send to a replica."""
    from ray.serve._private import default_impl, grpc_util
    from ray.serve.config import gRPCOptions

    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    for name in ("gRPCGenericServer", "DEFAULT_GRPC_SERVER_OPTIONS"):
        monkeypatch.setattr(grpc_util, name, getattr(grpc_util, name))
    monkeypatch.setenv(GRPC_HOST_VARIABLE, "127.0.0.1")
    listen_on_one_address()
    (port,) = free_ports(1)
    names = [f"{function.__module__}.{function.__name__}" for function in functions]
    options = gRPCOptions(port=port, grpc_servicer_functions=names, enable_reflection=False)
    task, server = await grpc_util.start_grpc_server(factory, options, event_loop=asyncio.get_running_loop())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await task


async def ask(channel: grpc.aio.Channel, path: str, raw: bytes) -> list[bytes]:
    """The answers to one message of bare bytes."""
    call = channel.unary_stream(path, None, None)
    return [message async for message in call(raw, timeout=TIMEOUT_S)]
