"""`python -m outrider.engines.hint_server FD CORES`: the hint server of the engine at the other end of a socket.

An engine starts it (`outrider.engines.hint_link`). The first frame on the socket has its settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from outrider.engines.frames import FROM_ENGINE, FrameKind, FrameReader
from outrider.engines.hint_server.service import HintServer
from outrider.engines.hint_settings import HintSettings
from outrider.errors import ConfigurationError, OutriderError
from outrider.observability import logs

logger = logging.getLogger("outrider.engines.hint_server")


def read_hello(engine: socket.socket, frames: FrameReader) -> dict[str, Any] | None:
    """Reads the first frame, which has the settings; None when the engine has gone."""
    while True:
        if (frame := frames.next()) is not None:
            kind, _, body = frame
            if kind is not FrameKind.HELLO:
                raise ConfigurationError(f"the engine began with a frame of kind {kind}")
            hello: dict[str, Any] = json.loads(body)
            return hello
        data = engine.recv(min(1 << 16, frames.room))
        if not data:
            return None
        frames.feed(data)


def fingerprint_of(tokenizer_dir: str | None) -> str:
    """The fingerprint of the engine's tokenizer; empty where its folder has none that could be compared."""
    if tokenizer_dir is None or not (Path(tokenizer_dir) / "tokenizer.json").is_file():
        logger.warning(
            "the engine's tokenizer has no tokenizer.json here: draft workers cannot check that it is theirs"
        )
        return ""
    from outrider.text.tokenizer import fingerprint

    return fingerprint(Path(tokenizer_dir))


async def serve(engine: socket.socket) -> None:
    """Serves one engine until it has gone. Raises OutriderError."""
    frames = FrameReader(FROM_ENGINE)
    hello = await asyncio.to_thread(read_hello, engine, frames)
    if hello is None:
        return
    settings = HintSettings.from_mapping(hello["settings"])
    fingerprint = await asyncio.to_thread(fingerprint_of, hello["tokenizer_dir"])
    server = HintServer(settings, hello["model_name"], hello["vocab_size"], fingerprint)
    engine.setblocking(False)
    await server.run(engine, frames)


def main(words: list[str]) -> int:
    logs.configure(logs.LogFormat.TEXT)
    # The engine decides when this process ends: it closes the socket. Ctrl-C reaches both at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {int(core) for core in words[1].split(",")})
    engine = socket.socket(fileno=int(words[0]))
    try:
        asyncio.run(serve(engine))
    except OutriderError as error:
        logger.error("the hint server ends: %s", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
