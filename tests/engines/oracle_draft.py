"""`python -m tests.engines.oracle_draft PORT TEXTS`: a draft worker without a model, for tests that end many of them.

TEXTS is JSON, a list of [prompt token ids, token ids that follow]. It hints these, one of eleven of them wrong. SIGUSR1
makes it flood for a second: every stream of hints gets as much as it takes, some of it beyond what is allowed. With the
word `flood` behind TEXTS each stream floods from its first commit to its end, with messages that are all valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc.aio

from outrider.hints.hint_wire import MAX_NODES_PER_MESSAGE
from outrider.worker.rpc import CHANNEL_OPTIONS
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, hints_pb2, hints_pb2_grpc

NUM_HINTS: Final = 7
FLOOD_S: Final = 1.0
TOO_MANY_NODES: Final = 20000
NUM_FLOODED: Final = 16
"""Messages of a frame."""


class OracleDraft(draft_pb2_grpc.DraftServicer):
    def __init__(self, texts: list[tuple[list[int], list[int]]], *, floods: bool = False) -> None:
        self._texts = {tuple(prompt): text for prompt, text in texts}
        self._floods = floods
        self._flood_until = 0.0
        self._channels: dict[str, grpc.aio.Channel] = {}

    def flood(self) -> None:
        self._flood_until = time.monotonic() + FLOOD_S

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[draft_pb2.AttachStatus]:
        following = asyncio.create_task(self._follow(request))
        try:
            while not following.done():
                yield draft_pb2.AttachStatus()
                await asyncio.wait([following], timeout=1.0)
            is_finished = False
            with contextlib.suppress(grpc.aio.AioRpcError):
                is_finished = following.result()
            if not is_finished:  # an end without an error would say that it cannot follow this session any further
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream of hints has ended")
            yield draft_pb2.AttachStatus(is_finished=True)
        finally:
            following.cancel()

    async def _follow(self, request: Any) -> bool:
        """Hints for one session. Returns whether the engine said that it has ended. Raises AioRpcError."""
        if request.target_address not in self._channels:
            self._channels[request.target_address] = grpc.aio.insecure_channel(request.target_address, CHANNEL_OPTIONS)
        token_ids, num_prompt = list(request.token_ids), request.num_prompt_tokens
        text = self._texts.get(tuple(token_ids[:num_prompt]), [])
        call = hints_pb2_grpc.HintsStub(self._channels[request.target_address]).Exchange()
        subscribe = hints_pb2.Subscribe(
            session_id=request.session_id, attachment=request.attachment, known_len=len(token_ids), channel=1,
            hint_token=request.hint_token,
        )  # fmt: skip
        flooding: asyncio.Task[None] | None = None
        try:
            await call.write(hints_pb2.HintFrame(subscribe=[subscribe]))
            await self._send(call, text, token_ids, num_prompt)
            if self._floods:
                flooding = asyncio.create_task(self._flood_without_end(call, token_ids))
            async for frame in call:
                for commit in frame.commits:
                    token_ids += commit.token_ids[max(len(token_ids) - commit.from_len, 0) :]
                    if commit.is_finished:
                        return True
                while time.monotonic() < self._flood_until:
                    await self._send_flood(call, len(token_ids))
                await self._send(call, text, token_ids, num_prompt)
            return False
        finally:
            if flooding is not None:
                flooding.cancel()
            call.cancel()

    async def _send(self, call: Any, text: list[int], token_ids: list[int], num_prompt: int) -> None:
        start = len(token_ids) - num_prompt
        hints = [token_id if (start + index) % 11 else 3 for index, token_id in enumerate(text[start:][:NUM_HINTS])]
        if hints:
            nodes = hints_pb2.HintNodes(
                channel=1, base_len=len(token_ids), first_node_id=1, parent_ids=range(len(hints)), token_ids=hints
            )
            await call.write(hints_pb2.HintFrame(nodes=[nodes]))

    async def _flood_without_end(self, call: Any, token_ids: list[int]) -> None:
        """Trees of the largest size below the present root, as fast as the stream takes them."""
        ids = range(1, MAX_NODES_PER_MESSAGE + 1)
        first = 1
        while True:
            frame = hints_pb2.HintFrame()
            for _ in range(NUM_FLOODED):
                frame.nodes.add(
                    channel=1, base_len=len(token_ids), first_node_id=first, parent_ids=range(len(ids)), token_ids=ids
                )
                first = first % 1_000_000 + 1
            await call.write(frame)

    async def _send_flood(self, call: Any, num_tokens: int) -> None:
        """Hints with unknown tokens, for other channels, about another past, and one frame that is too large."""
        frame = hints_pb2.HintFrame(ping=1, unsubscribe=["nobody"])
        for index in range(500):
            frame.nodes.add(channel=index % 3, base_len=num_tokens - index % 5, parent_ids=[index], token_ids=[index])
        await call.write(frame)
        if self._flood_until - time.monotonic() < 0.1:
            too_large = hints_pb2.HintFrame()
            for _ in range(TOO_MANY_NODES):
                too_large.nodes.add(channel=1, parent_ids=[0], token_ids=[1])
            await call.write(too_large)


async def serve(port: int, texts: list[tuple[list[int], list[int]]], *, floods: bool) -> None:
    draft = OracleDraft(texts, floods=floods)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    draft_pb2_grpc.add_DraftServicer_to_server(draft, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, draft.flood)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), floods="flood" in sys.argv[3:]))
