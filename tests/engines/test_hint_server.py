"""A real hint server between an engine's scheduler and draft workers: hints arrive, whatever draft workers do."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.engines.engine_hints import EngineHints, hello
from outrider.engines.hint_link import HintLink
from outrider.engines.hint_server.attachments import MAX_ATTEMPTS
from outrider.engines.hinted_requests import Fed, HintedRequests
from outrider.errors import InvalidRequest, Overloaded, TokenizerMismatch
from outrider.local.free_ports import free_ports
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import PLAINTEXT, Dialer, Role, RoleCheck, TlsFiles
from outrider.worker.rpc import abort
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, hints_pb2, hints_pb2_grpc

VOCAB_SIZE = 1000
WITHIN_S = 60.0
PROMPT = [3, 1, 4]


def after(token_ids: list[int]) -> int:
    return (token_ids[-1] * 7 + len(token_ids)) % 997


class FakeDraft(draft_pb2_grpc.DraftServicer):
    """A draft worker whose model is always right, and which follows the protocol as little as it can."""

    def __init__(self, dialer: Dialer = PLAINTEXT) -> None:
        self._dialer = dialer
        self.attached: list[draft_pb2.AttachRequest] = []
        self.known: dict[str, list[int]] = {}
        self.ended: list[str] = []  # sessions that it followed and does not any more
        self.refusal: Exception | None = None
        self.is_silent = False
        self.max_model_len = 1_000_000
        self.unsuited: list[str] = []  # sessions that were too long for it, as often as it said so

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[draft_pb2.AttachStatus]:
        self.attached.append(request)
        if self.refusal is not None:
            await abort(context, self.refusal)  # type: ignore[arg-type]
        if self.is_silent:
            await asyncio.sleep(600)
        if len(request.token_ids) >= self.max_model_len:
            self.unsuited.append(request.session_id)
            await abort(context, InvalidRequest("token_ids", "more tokens than this draft worker can follow"))
        self.known[request.session_id] = list(request.token_ids)
        try:
            async for status in self._follow(request, self.known[request.session_id]):
                yield status
        finally:
            self.ended.append(request.session_id)

    async def _follow(self, request: Any, token_ids: list[int]) -> AsyncIterator[draft_pb2.AttachStatus]:
        async with self._dialer.open(request.target_address, Role.TARGET, ()) as channel:
            call = hints_pb2_grpc.HintsStub(channel).Exchange()
            subscribe = hints_pb2.Subscribe(
                session_id=request.session_id, attachment=request.attachment, known_len=len(token_ids), channel=1,
                hint_token=request.hint_token,
            )  # fmt: skip
            await call.write(hints_pb2.HintFrame(subscribe=[subscribe], nodes=[self._hints(token_ids)]))
            yield draft_pb2.AttachStatus()
            async for frame in call:
                for commit in frame.commits:
                    assert commit.from_len == len(token_ids)
                    token_ids += commit.token_ids
                if len(token_ids) >= self.max_model_len:
                    self.unsuited.append(request.session_id)
                    yield draft_pb2.AttachStatus()  # it lets the session go, as its last status says
                    return
                await call.write(hints_pb2.HintFrame(nodes=[self._hints(token_ids)]))

    def _hints(self, token_ids: list[int]) -> hints_pb2.HintNodes:
        found = list(token_ids)
        for _ in range(4):
            found.append(after(found))
        return hints_pb2.HintNodes(
            channel=1, base_len=len(token_ids), first_node_id=1, parent_ids=range(4), token_ids=found[-4:]
        )


@contextlib.asynccontextmanager
async def serving(draft: FakeDraft, port: int, files: TlsFiles | None = None) -> AsyncIterator[None]:
    permitted = {"/outrider.v1.Draft/Attach": frozenset({Role.COORDINATOR})}
    server = grpc.aio.server(interceptors=() if files is None else (RoleCheck(permitted),))
    draft_pb2_grpc.add_DraftServicer_to_server(draft, server)
    if files is None:
        server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        server.add_secure_port(f"127.0.0.1:{port}", files.server_credentials())
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


class Engine:
    """An engine whose model says `after`, with its hints."""

    def __init__(self, ports: list[int], **settings: Any) -> None:
        self.requests = HintedRequests(VOCAB_SIZE, may_pause=False)
        told = hello({"draft_workers": [f"127.0.0.1:{port}" for port in ports], **settings}, "m", VOCAB_SIZE, None)
        self.link = HintLink(told)
        self.hints = EngineHints(self.requests, self.link)
        self.hints.start()
        self.texts: dict[str, list[int]] = {}
        self.num_accepted = 0

    def open(self, name: str, announcement: draft_pb2.AttachRequest | None = None) -> None:
        """Opens a request; a draft worker that checks its parameters needs an announcement with all of them."""
        self.texts[name] = list(PROMPT)
        if announcement is None:
            announcement = draft_pb2.AttachRequest(session_id=name, hint_token=f"token of {name}")
            announcement.sampling.max_tokens = 1000
        self.hints.open(name, self.texts[name], announcement, frozenset(), is_sampled=False)

    def close(self, name: str) -> None:
        del self.texts[name]
        self.hints.close(name, in_step=False)

    def step(self) -> None:
        self.hints.collect()
        chosen = self.hints.choose(dict.fromkeys(self.texts, 7), len(self.texts), 100)
        for name, text in self.texts.items():
            for hint in chosen.get(name, []):
                if hint != after(text):
                    break
                text.append(hint)
                self.num_accepted += 1
            text.append(after(text))
        fed = [Fed(name, len(chosen.get(name, []))) for name in self.texts]
        num_tokens = sum(1 + each.num_hints for each in fed)
        self.hints.finish_step(fed, num_tokens, 1.0, only_decodes=True)

    async def accept_more(self, num_hints: int) -> None:
        wanted = self.num_accepted + num_hints
        await self.steps_until(lambda: self.num_accepted >= wanted, "hints are accepted")

    async def steps_until(self, is_done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + WITHIN_S
        while not is_done():
            assert time.monotonic() < until, what
            self.step()
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(ports: list[int], **settings: Any) -> AsyncIterator[Engine]:
    engine = Engine(ports, **settings)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.hints.turn_off)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_hints_of_a_draft_worker_are_accepted_until_the_end(host: str) -> None:
    (port,) = free_ports(1)
    draft = FakeDraft()
    async with serving(draft, port), running([port], draft_workers=[f"{host}:{port}"]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.num_accepted > 20, "hints are accepted")
        text = engine.texts["a"]
        await engine.steps_until(lambda: len(draft.known["a"]) > 20, "commits arrive")
        assert draft.known["a"] == text[: len(draft.known["a"])]
        assert len(draft.attached) == 1
        engine.close("a")
        await engine.steps_until(lambda: draft.ended == ["a"], "it is detached at the end")


async def test_metrics_say_what_hints_gained_and_how_long_steps_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    port, metrics_port = free_ports(2)
    draft = FakeDraft()

    def shown() -> dict[str, float]:
        with contextlib.suppress(httpx.TransportError):
            text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
            samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
            return {each.name: each.value for each in samples}
        return {}

    async with serving(draft, port), running([port], metrics_port=metrics_port) as engine:
        engine.open("a")
        moments = iter([time.monotonic() + 0.05])
        monkeypatch.setattr(engine.requests, "wait_until", lambda *_: next(moments, None))
        engine.hints.wait({"a": 7}, 1)
        await engine.accept_more(20)
        accepted = "outrider_spec_decode_num_accepted_tokens_total"
        await engine.steps_until(lambda: shown().get(accepted, 0.0) >= 20, "the accepted hints are counted")
        assert shown()["outrider_hint_wait_seconds_total"] > 0.0
        assert shown()["outrider_spec_decode_num_draft_tokens_total"] >= 20


async def test_an_engine_on_all_addresses_says_the_one_on_the_way_to_the_draft_worker() -> None:
    port, hints_port = free_ports(2)
    draft = FakeDraft()
    settings = {"host": "0.0.0.0", "port": hints_port, "is_insecure": True}
    async with serving(draft, port), running([port], **settings) as engine:
        engine.open("a")
        await engine.accept_more(5)
    assert draft.attached[0].target_address == f"127.0.0.1:{hints_port}"


async def test_hints_are_back_after_the_draft_worker_was_gone() -> None:
    (port,) = free_ports(1)
    draft = FakeDraft()
    async with running([port]) as engine:
        engine.open("a")
        for _ in range(20):
            engine.step()
        for _ in range(2):
            async with serving(draft, port):
                await engine.accept_more(5)
            for _ in range(20):
                engine.step()
        assert [each.attachment for each in draft.attached] == sorted({each.attachment for each in draft.attached})


async def test_another_draft_worker_takes_over_from_one_that_refuses() -> None:
    refusing, willing = FakeDraft(), FakeDraft()
    refusing.refusal = TokenizerMismatch("a", "b", "the target")
    ports = free_ports(2)
    async with serving(refusing, ports[0]), serving(willing, ports[1]), running(ports) as engine:
        names = [f"request {index}" for index in range(6)]
        for name in names:
            engine.open(name)
        await engine.steps_until(lambda: set(willing.known) == set(names), "all are attached")
        assert len(refusing.attached) <= len(names), "it is not asked again at once"


async def test_beyond_one_draft_workers_context_another_one_takes_over() -> None:
    """The short one is not asked again for a request that it has let go, although it has fewer sessions then."""
    short, long = FakeDraft(), FakeDraft()
    ports = free_ports(2)
    async with serving(short, ports[0]), serving(long, ports[1]), running(ports) as engine:
        names = [f"request {index}" for index in range(12)]
        for name in names:
            engine.open(name)
        await engine.steps_until(lambda: {*short.known, *long.known} == set(names), "all are attached")
        assert short.known
        short.max_model_len = 1
        await engine.steps_until(lambda: set(long.known) == set(names), "the long one has all of them")
        assert short.unsuited
        assert len(short.unsuited) == len(set(short.unsuited)), "once each"


async def test_requests_that_wait_for_a_longer_context_leave_room_for_others() -> None:
    """More of them than may attach at once: they wait for the worker that is away, and new ones have the short one."""
    short, long = FakeDraft(), FakeDraft()
    short.max_model_len = 1
    long.refusal = TokenizerMismatch("a", "b", "the target")
    ports = free_ports(2)
    async with serving(short, ports[0]), serving(long, ports[1]), running(ports) as engine:
        names = [f"request {index}" for index in range(2 * MAX_ATTEMPTS)]
        for name in names:
            engine.open(name)
        await engine.steps_until(lambda: set(short.unsuited) == set(names), "all are too long for it")
        await engine.steps_until(lambda: len(long.attached) > 0, "the other one has refused")
        short.max_model_len = 1_000_000
        engine.open("new")
        await engine.steps_until(lambda: "new" in short.known, "the new one is attached")
        assert short.known.keys() == {"new"}


@pytest.mark.parametrize("refusal", [Overloaded("full", 1.0), ValueError("broken")])
async def test_a_draft_worker_that_fails_every_attachment_costs_no_step(refusal: Exception) -> None:
    (port,) = free_ports(1)
    draft = FakeDraft()
    draft.refusal = refusal
    async with serving(draft, port), running([port]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: len(draft.attached) > 1, "it is asked again")
        draft.refusal = None
        await engine.steps_until(lambda: engine.num_accepted > 0, "hints are accepted once it is well")


async def test_a_silent_draft_worker_is_given_up() -> None:
    silent, well = FakeDraft(), FakeDraft()
    silent.is_silent = True
    ports = free_ports(2)
    async with serving(silent, ports[0]), serving(well, ports[1]), running(ports) as engine:
        engine.open("a")
        engine.open("b")
        await engine.steps_until(lambda: {"a", "b"} <= set(well.known), "the other one has both")


async def test_a_killed_hint_server_is_replaced_and_told_everything() -> None:
    (port,) = free_ports(1)
    draft = FakeDraft()
    async with serving(draft, port), running([port]) as engine:
        engine.open("a")
        await engine.steps_until(lambda: engine.num_accepted > 0, "hints are accepted")
        process = engine.link._process
        assert process is not None
        process.kill()
        await engine.steps_until(lambda: engine.link.num_starts == 2, "it is started again")
        before = engine.num_accepted
        await engine.steps_until(lambda: engine.num_accepted > before, "hints are accepted again")
        assert engine.hints.is_on


async def test_an_error_of_our_own_turns_hints_off_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    async with running([port]) as engine:
        engine.open("a")
        monkeypatch.setattr(engine.requests, "choose", lambda *_: 1 / 0)
        engine.step()
        assert not engine.hints.is_on
        engine.step()
        assert not engine.link.is_open
        engine.close("a")


async def test_a_stream_that_floods_is_ended() -> None:
    """One that knows no session, and sends frames above the bound."""
    (port, hints_port) = free_ports(2)
    async with running([port], port=hints_port) as engine:
        engine.open("a")
        frame = hints_pb2.HintFrame()
        for _ in range(20000):
            frame.nodes.add(channel=1, base_len=5, parent_ids=[0], token_ids=[1])
        code = None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{hints_port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), WITHIN_S)
            call = hints_pb2_grpc.HintsStub(channel).Exchange(timeout=WITHIN_S)
            try:
                await call.write(frame)
                await call.read()
            except grpc.aio.AioRpcError as error:
                code = error.code()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        engine.step()
        assert engine.hints.is_on


async def test_certificates_are_checked_both_ways(tmp_path: Path) -> None:
    """An engine's hint server is a target to draft workers' streams, and a coordinator where it attaches."""
    authority = CertificateAuthority.open(tmp_path / "authority")
    for role, names in ((Role.TARGET, (Role.COORDINATOR.value,)), (Role.DRAFT, ()), (Role.CLIENT, ())):
        authority.issue(tmp_path / role.name, role, names=names, valid_for=datetime.timedelta(days=1))
    port, hints_port = free_ports(2)
    files = TlsFiles(tmp_path / Role.DRAFT.name)
    settings = {"tls_dir": str(tmp_path / Role.TARGET.name), "port": hints_port}
    draft = FakeDraft(Dialer(files))
    async with serving(draft, port, files), running([port], **settings) as engine:
        engine.open("a")
        await engine.accept_more(5)
        stranger = Dialer(TlsFiles(tmp_path / Role.CLIENT.name))
        async with stranger.open(f"127.0.0.1:{hints_port}", Role.TARGET, ()) as channel:
            call = hints_pb2_grpc.HintsStub(channel).Exchange(timeout=WITHIN_S)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_while_all_draft_workers_are_full_few_requests_ask_and_each_gets_its_turn() -> None:
    (port,) = free_ports(1)
    draft = FakeDraft()
    draft.refusal = Overloaded("full", 1.0)
    async with serving(draft, port), running([port]) as engine:
        names = [f"request {index}" for index in range(60)]
        for name in names:
            engine.open(name)
        await engine.steps_until(lambda: len(draft.attached) > 0, "one asks")
        for _ in range(40):
            engine.step()
            await asyncio.sleep(0.02)
        assert len(draft.attached) < len(names), "others wait"
        draft.refusal = None
        await engine.steps_until(lambda: set(draft.known) == set(names), "all are attached")
