"""Two coordinators behind HAProxy, Envoy and nginx, with the files that `k8s/load_balancers` offers.

One system for all tests of the module, and one process of each balancer; the tests that kill a coordinator come last.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import httpx
import httpx2
import openai
import pytest

from coordinator.settings import Hosting
from outrider.local.free_ports import free_ports
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.certificates import Authority
from tests.e2e.load_balancers import BALANCERS, Backend, Balancer
from tests.e2e.replicas import Replicas, running_replicas
from tests.e2e.streams import READ_TIMEOUT_S, Stream, grpc_request, grpc_stream, http_stream
from tests.e2e.system import eventually, needs_the_pair
from tests.k8s.route_rules import public_operations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    needs_the_pair,
]

# Plain, for it shall take a while.
LONG: dict[str, Any] = {
    "prompt": "def read_file(path):\n",
    "max_tokens": 600,
    "ignore_eos": True,
    "speculation": {"enabled": False},
}
BODY_BYTES_MAX = 8 << 20
HEALTH_CHECK_S = 10.0  # two that fail, two seconds apart, and each may take as long
COMEBACK_S = 30.0  # it learns of its target and is asked for its health meanwhile
QUIET_S = 0.7  # several times as often as the journal is written


@pytest.fixture(scope="module", params=[Hosting.RAY_SERVE, pytest.param(Hosting.PLAIN, marks=pytest.mark.long)])
def replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with running_replicas(tmp_path_factory.mktemp("replicas"), 2, request.param) as running:
        yield running


@pytest.fixture(scope="module")
def balancers(replicas: Replicas, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Balancer]]:
    """Those that can run here, by name."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    backends = [Backend(each.http_port, each.grpc_port) for each in replicas.coordinators]
    kinds = [kind for kind in BALANCERS if kind.program() is not None]
    running: dict[str, Balancer] = {}
    try:
        for kind, port in zip(kinds, free_ports(len(kinds)), strict=True):
            running[kind.name] = kind(tmp_path_factory.mktemp(kind.name), port, backends, authority)
            running[kind.name].start()
        for each in running.values():
            eventually(partial(status_of, each, "/v1/models"), lambda seen: seen == 200, f"{each.name} answers")
        yield running
    finally:
        for each in running.values():
            each.stop()


@pytest.fixture(params=[kind.name for kind in BALANCERS])
def balancer(request: pytest.FixtureRequest, balancers: Mapping[str, Balancer]) -> Balancer:
    if request.param not in balancers:
        (kind,) = (kind for kind in BALANCERS if kind.name == request.param)
        pytest.skip(f"there is no {kind.name} here: {kind.how_to_get}")
    return balancers[request.param]


@pytest.fixture(scope="module")
def expected(replicas: Replicas) -> str:
    """The long text, as a coordinator says it itself: the one that stays alive."""
    return text_of(replicas.coordinators[-1].url, LONG)


def text_of(url: str, body: Mapping[str, Any]) -> str:
    response = httpx.post(f"{url}/v1/completions", json={"temperature": 0, **body}, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def browser(balancer: Balancer, *, http2: bool = False) -> httpx.Client:
    return httpx.Client(base_url=balancer.url, verify=balancer.trusted(), http2=http2, timeout=30, trust_env=False)


@contextmanager
def dialled(balancer: Balancer) -> Iterator[grpc.Channel]:
    """One connection for all of its calls."""
    credentials = grpc.ssl_channel_credentials(balancer.authority.path.read_bytes())
    with grpc.secure_channel(balancer.address, credentials) as channel:
        yield channel


@contextmanager
def frozen_streams(
    replicas: Replicas, channels: Mapping[Balancer, grpc.Channel], *, are_left: bool = False
) -> Iterator[dict[str, list[Stream]]]:
    """By balancer, two streams over HTTP/1.1 and two over one gRPC connection, which have begun and stand still.

    Each began when the one before it was at its coordinator. On the way out they go on to their end, or are left.
    """
    begun: dict[str, list[Stream]] = {balancer.name: [] for balancer in channels}
    try:
        with replicas.frozen_target():
            for balancer, channel in channels.items():
                for edge in ("http", "grpc", "http", "grpc"):
                    name = f"{balancer.name}-{edge}-{uuid.uuid4().hex}"
                    new = http_stream(balancer, name, LONG) if edge == "http" else grpc_stream(channel, name, LONG)
                    begun[balancer.name].append(new.start())
                    num_begun = sum(map(len, begun.values()))
                    new.eventually(partial(has_requests, replicas, num_begun), "it has arrived")
            streams = list(itertools.chain(*begun.values()))
            with replicas.thawed_target():
                for stream in streams:
                    stream.eventually(partial(getattr, stream, "num_tokens"), "a token")
            for stream in streams:
                # Otherwise nobody but its client could say what it was about.
                stream.eventually(partial(replicas.num_journaled, stream.request_id), "a journal")
                assert not stream.has_ended, "the text was over too soon for this test to mean anything"
            yield begun
            if are_left:
                for stream in streams:
                    stream.leave()
    finally:
        for stream in itertools.chain(*begun.values()):
            stream.wait()
        if are_left:
            eventually(partial(has_requests, replicas, 0), bool, "no request is left")


def has_requests(replicas: Replicas, num: int) -> bool:
    """Whether the coordinators have so many at present."""
    return sum(replicas.num_requests()) == num


# What goes through.


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
def test_the_openai_package_streams_a_chat_that_is_the_coordinators_own(
    balancer: Balancer, replicas: Replicas, http2: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "target",
        "messages": [{"role": "user", "content": "Read a file."}],
        "max_tokens": 200,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "speculation": {"enabled": False}},
    }
    with (
        httpx2.Client(verify=balancer.trusted(), http2=http2, trust_env=False) as transport,
        openai.OpenAI(base_url=f"{balancer.url}/v1", api_key="none", max_retries=0, http_client=transport) as client,
        openai.OpenAI(base_url=f"{replicas.coordinators[-1].url}/v1", api_key="none") as direct,
    ):
        chunks = list(client.chat.completions.create(**asked, stream=True))
        said = direct.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == said
    assert sum(map(bool, pieces)) > 10, "the text came in few pieces"


@pytest.mark.parametrize("edge", ["http1", "http2", "grpc"])
def test_no_token_is_held_back(balancer: Balancer, replicas: Replicas, expected: str, edge: str) -> None:
    """While the target stands still, everything that its coordinator has said so far is at the client."""
    with dialled(balancer) as channel:
        name = f"held-{uuid.uuid4().hex}"
        stream = (
            grpc_stream(channel, name, LONG)
            if edge == "grpc"
            else http_stream(balancer, name, LONG, http2=edge == "http2")
        ).start()
        stream.eventually(lambda: stream.num_tokens, "a token")
        with replicas.frozen_target():
            num_said = quiet(lambda: replicas.num_journaled(name))
            assert 0 < num_said < LONG["max_tokens"], "the text was over too soon for this test to mean anything"
            assert stream.num_tokens == num_said, f"held back\n{balancer.log}"
        stream.wait()
    assert stream.error is None
    assert stream.text == expected
    assert len(stream.pieces) > 20


def quiet(look: Callable[[], int]) -> int:
    """Returns an observation of `look` that has not changed for a while."""
    seen, since_s = look(), time.monotonic()
    while time.monotonic() < since_s + QUIET_S:
        time.sleep(0.02)
        if (found := look()) != seen:
            seen, since_s = found, time.monotonic()
    return seen


def test_streams_are_spread_over_the_coordinators(balancer: Balancer, replicas: Replicas) -> None:
    """Streams that come over one connection are spread as well."""
    with dialled(balancer) as channel, frozen_streams(replicas, {balancer: channel}, are_left=True):
        found = replicas.num_requests()
    assert found == [2, 2], balancer.log


def test_a_request_keeps_the_id_that_its_client_chose(balancer: Balancer) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    with browser(balancer) as client:
        for headers in ({"X-Request-Id": f"chosen-{uuid.uuid4().hex}"}, {}):
            response = client.post("/v1/completions", json=body, headers=headers)
            (echoed,) = response.headers.get_list("X-Request-Id")
            assert echoed == headers.get("X-Request-Id", echoed) != ""
            assert echoed in response.json()["id"]


def leave_stream(balancer: Balancer) -> None:
    with browser(balancer, http2=True) as client:
        asked = LONG | {"stream": True}
        with client.stream("POST", "/v1/completions", json=asked) as response:
            next(response.iter_lines())


def leave_answer(balancer: Balancer) -> None:
    """Impatient for an answer in one piece, on a connection that has had one."""
    with browser(balancer) as client:
        client.get("/v1/models")
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=LONG, timeout=0.2)


def leave_call(balancer: Balancer) -> None:
    with dialled(balancer) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(grpc_request(LONG), timeout=30)
        next(call)
        call.cancel()


@pytest.mark.parametrize("leave", [leave_stream, leave_answer, leave_call])
def test_a_client_that_leaves_frees_the_workers(
    balancer: Balancer, replicas: Replicas, leave: Callable[[Balancer], None]
) -> None:
    replicas.expect_idle()
    before = replicas.num_generated()
    leave(balancer)
    replicas.expect_idle()
    assert replicas.num_generated() - before < LONG["max_tokens"], "the target went on for nobody"


# What does not.


CLOSED_PATHS = (
    *("/metrics", "/health", "/livez", "/load", "/-/routes", "/-/healthz", "/api/serve/applications/", "/"),
    *("/v1/../metrics", "/v1/models/../../metrics", "/v1/models/%2e%2e/%2e%2e/metrics", "//metrics"),
    *("/v1/completions/../../-/routes", "/v1/models/..;/metrics", "/ray.serve.RayServeAPIService/Healthz"),
)
CLOSED_CALLS = (
    "/ray.serve.RayServeAPIService/Healthz",
    "/ray.serve.RayServeAPIService/ListApplications",
    "/outrider.v1.Generation/../ray.serve.RayServeAPIService/ListApplications",
    "/outrider.v1.Target/Generate",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)


def test_every_path_of_the_api_is_there(balancer: Balancer, replicas: Replicas) -> None:
    def said(client: httpx.Client, method: str, path: str) -> tuple[int, Any]:
        response = client.request(method, path, json={} if method == "POST" else None)
        is_json = response.headers.get("content-type") == "application/json"
        return response.status_code, response.json().get("error") if is_json else None

    with browser(balancer) as client, httpx.Client(base_url=replicas.coordinators[0].url, trust_env=False) as direct:
        for method, path in public_operations():
            assert said(client, method, path) == said(direct, method, path), f"{method} {path}"


def test_a_file_may_be_longer_than_other_bodies(balancer: Balancer) -> None:
    file = {"file": ("lines.jsonl", b"x" * (BODY_BYTES_MAX + 1))}
    with browser(balancer) as client:
        response = client.post("/v1/files", files=file, data={"purpose": "batch"})
    # Batches are off here, which the coordinator says.
    assert (response.status_code, "--batch-files" in response.text) == (404, True), response.text


def test_what_is_not_for_the_public_is_not_there(balancer: Balancer) -> None:
    for http2 in (False, True):
        with browser(balancer, http2=http2) as client:
            for path in CLOSED_PATHS:
                # As it stands: httpx itself would make it normal.
                request = client.build_request("GET", "/")
                request.url = request.url.copy_with(raw_path=path.encode())
                response = client.send(request)
                assert response.status_code in (400, 404), (path, response.status_code, response.text[:200])
                assert "outrider_" not in response.text, path
    with dialled(balancer) as channel:
        for method in CLOSED_CALLS:
            bare: Any = channel  # of bytes, which stubs know nothing of
            with pytest.raises(grpc.RpcError) as caught:
                bare.unary_unary(method)(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, (method, caught.value)


def test_a_body_that_is_too_long_is_refused(balancer: Balancer) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(9):
            yield b"x" * (1 << 20)

    with browser(balancer) as client:
        told = client.post("/v1/completions", content=b"x" * (BODY_BYTES_MAX + 1))
        assert (told.status_code, told.json()["error"]["type"]) == (413, "invalid_request_error")
        # One that does not tell its length is the coordinator's to refuse where the balancer passes it on at once.
        untold = client.post("/v1/completions", content=parts())
        assert untold.status_code in (400, 413), untold.text
        assert untold.json()["error"]["type"] == "invalid_request_error"
        # The longest one gets through to the coordinator, which says what is wrong with it.
        longest = client.post("/v1/completions", content=b'{"prompt": "%s"}' % (b"x" * (BODY_BYTES_MAX - 100)))
        assert (longest.status_code, longest.json()["error"]["param"]) == (400, "prompt"), longest.text[:300]


# What changes meanwhile.


def test_streams_survive_a_reload(balancer: Balancer, replicas: Replicas, expected: str) -> None:
    with dialled(balancer) as channel, frozen_streams(replicas, {balancer: channel}) as begun:
        balancer.reload()
        balancer.reload()  # while the first has not let its streams go
        with browser(balancer) as client:
            assert client.get("/v1/models").status_code == 200
    streams = begun[balancer.name]
    assert [stream.error for stream in streams] == [None] * len(streams), balancer.log
    assert {stream.text for stream in streams} == {expected}


@dataclass
class Fall:
    """Outcomes of a balancer's requests when one of two coordinators died."""

    streams: list[Stream]
    num_broken: int  # of these
    waiting: list[int]  # status of requests that had been sent to a coordinator, two to each
    at_once: list[int]  # of those that came before any health check


@pytest.fixture(scope="module")
def falls(replicas: Replicas, balancers: Mapping[str, Balancer]) -> dict[str, Fall]:
    """Outcomes by balancer. The coordinator that died stays dead."""
    short = LONG | {"max_tokens": 5}
    with ExitStack() as stack:
        channels = {each: stack.enter_context(dialled(each)) for each in balancers.values()}
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=4 * len(balancers)))
        at_once: dict[str, list[int]] = {}
        waiting: dict[str, list[Future[int]]] = {}
        with frozen_streams(replicas, channels) as begun:
            num_before = sum(replicas.num_requests())
            for name, balancer in balancers.items():
                waiting[name] = []
                for num_here in range(1, 5):
                    # One by one: who gets several at once may choose for each before it counts the others.
                    waiting[name].append(pool.submit(status_of, balancer, "/v1/completions", short))
                    num_before += 1
                    what = f"{name}: {num_here} have arrived"
                    eventually(partial(has_requests, replicas, num_before), bool, what)
            replicas.coordinators[0].kill()
            for name, balancer in balancers.items():
                at_once[name] = [status_of(balancer, "/tokenize", {"prompt": "x"}) for _ in range(4)]
        found = {}
        for name, streams in begun.items():
            broken = [stream for stream in streams if not stream.has_ended]
            for stream in broken:
                resume(stream)
            statuses = [each.result(READ_TIMEOUT_S) for each in waiting[name]]
            found[name] = Fall(streams, len(broken), statuses, at_once[name])
    return found


def status_of(balancer: Balancer, path: str, body: Mapping[str, Any] | None = None) -> int:
    with browser(balancer) as client:
        return client.request("POST" if body else "GET", path, json=body).status_code


def resume(stream: Stream) -> None:
    """As a client does: again until the health check must have noticed."""
    deadline_s = time.monotonic() + HEALTH_CHECK_S
    while not stream.has_ended:
        try:
            stream.resume()
        except (httpx.HTTPError, grpc.RpcError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


@pytest.fixture
def fall(balancer: Balancer, falls: Mapping[str, Fall]) -> Fall:
    return falls[balancer.name]


def test_clients_of_a_coordinator_that_died_go_on_at_another(fall: Fall, expected: str) -> None:
    assert fall.num_broken == 2, "one of two coordinators died, with half of the streams"
    assert {stream.text for stream in fall.streams} == {expected}, "a token was lost, repeated or changed"
    assert {stream.num_tokens for stream in fall.streams} == {LONG["max_tokens"]}


def test_what_a_coordinator_that_died_had_not_begun_to_answer_goes_to_another(fall: Fall) -> None:
    """Its client notices nothing but time."""
    assert fall.waiting == [200] * 4


def test_requests_go_past_a_coordinator_that_died(balancer: Balancer, fall: Fall) -> None:
    assert fall.at_once == [200] * 4, "what could not be sent at all goes to another coordinator"
    with browser(balancer) as client, dialled(balancer) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for _ in range(10):
            assert client.get("/v1/models").status_code == 200
            assert stub.ListModels(generation_pb2.ListModelsRequest(), timeout=5).models


@pytest.mark.thorough  # another start of a coordinator
def test_a_coordinator_that_comes_back_gets_requests_again(
    balancers: Mapping[str, Balancer], replicas: Replicas, falls: Mapping[str, Fall]
) -> None:
    replicas.coordinators[0].start()
    replicas.coordinators[0].wait_until_ready()
    for balancer in balancers.values():
        eventually(partial(num_that_the_first_gets, replicas, balancer), bool, f"{balancer.name} asks it", COMEBACK_S)


def num_that_the_first_gets(replicas: Replicas, balancer: Balancer) -> int:
    """The number of streams, out of four, that the first coordinator gets."""
    with dialled(balancer) as channel, frozen_streams(replicas, {balancer: channel}, are_left=True):
        return replicas.num_requests()[0]
