"""Target workers without a model, in one process: `python -m benchmarks.shared.fake_targets --help`.

Each has the product's gRPC service, scheduler and registration. A step takes the time that the flags name, as in
`outrider simulate`, and costs next to no processor time. Prints one line of JSON when all are registered, and serves
until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc.aio

from benchmarks.shared.step_stamps import ALPHABET, STAMP_CHARS, stamp
from command_line.simulator.clock import Clock
from command_line.simulator.fleet import DraftPool, Fleet, TargetPool
from command_line.simulator.traffic import Text
from command_line.simulator.workers import TargetWorker
from outrider.observability.telemetry import TargetMetrics
from outrider.registry.registry import Registry
from outrider.registry.worker_lease import WorkerLease
from outrider.registry.worker_record import WorkerLoad, WorkerRecord
from outrider.sampling_params import SpeculationSettings
from outrider.text.tokenizer import Tokenizer
from outrider.worker.rpc import SERVER_OPTIONS
from protos.outrider.v1 import common_pb2, target_pb2_grpc
from target_worker.messages import Action, Event, SessionEnded, StartSession, TokensCommitted
from target_worker.serving.server import TargetServicer

TOKENS_MAX: Final = 1 << 17
"""Longest sequence of a fake target."""
REDIS_URL_VARIABLE: Final = "OUTRIDER_REDIS_URL"
_PLAIN: Final = SpeculationSettings(enabled=False, is_plain=True)
_ACCEPTED: Final = common_pb2.TOKEN_ORIGIN_ACCEPTED


class WallClock(Clock):
    """The simulator's clock in real time. While an event is handled it shows when that was due, so that late timers do
    not make steps longer."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._due_s: float | None = None

    @property
    def now_s(self) -> float:
        """Seconds on the event loop's clock."""
        return self._loop.time() if self._due_s is None else self._due_s

    @now_s.setter
    def now_s(self, value: float) -> None:
        """Nothing sets this clock."""

    def at(self, when_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_at(when_s, self._happen, when_s, happen, arguments)

    def _happen(self, due_s: float, happen: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.num_events += 1
        self._due_s = due_s
        try:
            happen(*arguments)
        finally:
            self._due_s = None


class _EveryText(dict[str, Text]):
    """The same future for every session."""

    def __missing__(self, session_id: str) -> Text:
        return _FUTURE


_FUTURE: Final = Text([0] * TOKENS_MAX, [], [])


class FakeTarget:
    """One target worker: the product's service over the simulator's worker, in real time."""

    def __init__(self, fleet: Fleet, token_ids: list[int], *, is_stamped: bool, worker_id: str, model: str) -> None:
        """`token_ids`: the tokens of the stamps' characters. With `is_stamped` each step commits one stamp, as hints of
        which all but the last were accepted; else it commits one token."""
        self._token_ids, self._is_stamped = token_ids, is_stamped
        self._tokens_per_step = STAMP_CHARS if is_stamped else 1
        self._origins = [_ACCEPTED] * (STAMP_CHARS - 1) + [common_pb2.TOKEN_ORIGIN_BONUS]
        self._worker = TargetWorker(
            WallClock(),
            0.0,
            float("inf"),
            address=worker_id,
            fleet=fleet,
            texts=_EveryText(),
            publish=self._publish,
            link_to_draft=_no_link,
        )
        info = common_pb2.WorkerInfo(worker_id=worker_id, model_name=model, incarnation=uuid.uuid4().hex)
        self.servicer = TargetServicer(info, TargetMetrics(model, worker_id), None)
        self.servicer.bind(self)

    @property
    def incarnation(self) -> str:
        return self.servicer.info.incarnation

    def load(self) -> WorkerLoad:
        """The sessions as a real worker reports them."""
        return WorkerLoad(self._worker.scheduler.num_running, self._worker.scheduler.num_waiting)

    # What the service asks of a model's thread.

    def submit(self, event: Event, *, is_release: bool = False, peer: str | None = None) -> bool:
        if isinstance(event, StartSession):  # the prompt's length is all that counts
            num_steps = -(-event.sampling.max_tokens // self._tokens_per_step)
            event = replace(
                event,
                token_ids=[0] * len(event.token_ids),
                sampling=replace(event.sampling, max_tokens=num_steps),
                speculation=_PLAIN,
            )
        self._worker.take([event])
        return True

    def has_room(self, peer: str) -> bool:
        return True

    def has_events(self) -> bool:
        return False

    def stalled_s(self) -> float:
        return 0.0

    def _publish(self, actions: list[Action]) -> None:
        self.servicer.dispatch(list(map(self._shown, actions)))

    def _shown(self, action: Action) -> Action:
        if isinstance(action, SessionEnded):
            return replace(action, num_output_tokens=action.num_output_tokens * self._tokens_per_step)
        if not isinstance(action, TokensCommitted):
            return action
        if not self._is_stamped:
            return replace(action, token_ids=self._token_ids[:1])
        token_ids = [self._token_ids[digit] for digit in stamp(time.monotonic())]
        return TokensCommitted(
            action.session_id, token_ids, self._origins, STAMP_CHARS, STAMP_CHARS - 1, action.step_ms
        )


def _no_link(draft: int) -> Any:
    raise AssertionError("a fake target has no draft workers")


def stamp_token_ids(tokenizer: Tokenizer) -> list[int]:
    """The token of each of the stamps' characters. Raises ValueError if one of them has none of its own."""
    found = [tokenizer.encode(character, add_special_tokens=False) for character in ALPHABET]
    if any(len(each) != 1 for each in found):
        raise ValueError("the tokenizer has no token of its own for each letter, digit, - and _")
    return [each[0] for each in found]


async def _serve(arguments: argparse.Namespace) -> None:
    is_over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, is_over.set)
    tokenizer = Tokenizer(arguments.tokenizer)
    token_ids = stamp_token_ids(tokenizer)
    async with AsyncExitStack() as stack:
        registry = Registry(os.environ[REDIS_URL_VARIABLE])
        stack.push_async_callback(registry.close)
        addresses = []
        for index in range(arguments.targets):
            share = index / max(arguments.targets - 1, 1) - 0.5
            pool = TargetPool(
                count=1,
                fixed_ms=arguments.fixed_ms * (1.0 + arguments.spread * share),
                token_ms=arguments.token_ms,
                sequence_ms=arguments.sequence_ms,
                max_num_seqs=arguments.max_num_seqs,
                max_model_len=TOKENS_MAX,
                kv_tokens=TOKENS_MAX * (2 + arguments.max_num_seqs // 16),
                max_num_waiting=arguments.max_num_waiting,
            )
            worker_id = f"{arguments.model}-{index}"
            target = FakeTarget(
                Fleet(target=pool, draft=DraftPool(count=0)),
                token_ids,
                is_stamped=arguments.stamps,
                worker_id=worker_id,
                model=arguments.model,
            )
            server = grpc.aio.server(options=SERVER_OPTIONS)
            target_pb2_grpc.add_TargetServicer_to_server(target.servicer, server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
            record = WorkerRecord(
                worker_id=worker_id,
                pool="target",
                address=address,
                incarnation=target.incarnation,
                started_at_ms=1,
                model_name=arguments.model,
                tokenizer_fingerprint=tokenizer.fingerprint,
                vocab_size=tokenizer.vocab_size,
                max_model_len=TOKENS_MAX,
                max_num_seqs=arguments.max_num_seqs,
                max_num_waiting=arguments.max_num_waiting,
                dtype="none",
                num_model_parameters=0,
            )
            await stack.enter_async_context(WorkerLease(registry, record, target.load))
            addresses.append(address)
        print(
            json.dumps({"event": "ready", "pid": os.getpid(), "addresses": addresses, "token_ids": token_ids}),
            flush=True,
        )
        await is_over.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder")
    parser.add_argument("--model", required=True, help="the name that clients request")
    parser.add_argument("--targets", type=int, default=1, help="target workers (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="batch slots of each (default: %(default)s)")
    parser.add_argument("--max-num-waiting", type=int, default=64, help="beside them (default: %(default)s)")
    parser.add_argument("--fixed-ms", type=float, default=20.0, help="fixed part of a step (default: %(default)s)")
    parser.add_argument("--token-ms", type=float, default=0.0, help="per token fed (default: %(default)s)")
    parser.add_argument("--sequence-ms", type=float, default=0.0, help="per session in a step (default: %(default)s)")
    parser.add_argument(
        "--spread", type=float, default=0.0, help="difference between the targets' fixed parts, as a share"
    )
    parser.add_argument("--stamps", action="store_true", help="generate the time, four tokens a step")
    arguments = parser.parse_args()
    # Unlike epoll, select does not round waits up to whole milliseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(_serve(arguments))


if __name__ == "__main__":
    main()
