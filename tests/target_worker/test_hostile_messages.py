"""Whatever message a target worker is sent over gRPC: an answer or a refusal, and other sessions go on as ever."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from hypothesis import strategies as st

from outrider.message_sizes import MAX_MESSAGE_BYTES
from protos.outrider.v1 import common_pb2, target_pb2
from tests.hostile import EFFORTS, FLOAT, MANY, UINT32, mangled, messages, try_out
from tests.models import VOCAB_SIZE
from tests.served import GENERATE, SET_SPECULATION, ServedTarget, event_kind, served_target

GREEDY = target_pb2.GenerateRequest(
    session_id="good",
    token_ids=[1, 2, 3],
    sampling=common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=6, ignore_eos=True),
)
REFUSALS = {
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.FAILED_PRECONDITION,
}  # fmt: skip


def near(*values: float) -> st.SearchStrategy[float]:
    """A strategy that mostly draws from `values`, which are permitted, and sometimes any float."""
    return st.sampled_from(values) | st.sampled_from(values) | st.sampled_from(values) | FLOAT


TOKEN_IDS = st.lists(st.integers(0, VOCAB_SIZE), max_size=6)
GRAMMARS = st.builds(
    lambda kind, text: common_pb2.Grammar(**{kind: text}),
    st.sampled_from(["json_schema", "regex", "lark"]),
    st.sampled_from(
        [
            "",
            "{}",
            '{"type":"integer"}',
            "[a-c]{1,3}",
            "(",
            'start: "a" | "b"',
            "start: start",
            "\0",
            "x" * 999,
        ]
    ),
)
# Few tokens, so that it is not long before the next.
SAMPLING = messages(
    common_pb2.SamplingParams,
    temperature=near(0.0, 1e-45, 1e-6, 0.7, 2.0),
    top_p=near(1.0, 1e-45, 0.5),
    top_k=st.sampled_from([0, 1, 5, VOCAB_SIZE, 2**32 - 1]),
    min_p=near(0.0, 1e-45, 1.0),
    typical_p=near(1.0, 1e-45, 0.3),
    presence_penalty=near(0.0, 2.0, -2.0, 1e-45),
    frequency_penalty=near(0.0, 2.0, -2.0, 1e-45),
    repetition_penalty=near(1.0, 10.0, 1e-45, 1e-30),
    max_tokens=st.integers(0, 9),
    min_tokens=st.integers(0, 10),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE), near(0.0, -100.0, 100.0), max_size=4),
    bad_words=st.lists(st.builds(common_pb2.TokenSequence, token_ids=TOKEN_IDS), max_size=3),
    allowed_token_ids=TOKEN_IDS,
    stop_token_ids=TOKEN_IDS,
    num_logprobs=st.integers(0, 21),
    num_prompt_logprobs=st.integers(0, 21),
    logprobs_mode=st.integers(0, 2),
    grammar=GRAMMARS,
)
NEARLY_RIGHT = st.builds(
    lambda token_ids, num_prompt, sampling, speculation: target_pb2.GenerateRequest(
        session_id="fuzz",
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        sampling=sampling,
        speculation=speculation,
    ),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12),
    st.integers(0, 13),
    SAMPLING,
    messages(common_pb2.SpeculationParams, num_speculative_tokens=st.integers(0, 33), draft_probs_bits=st.just(0)),
)
# Should such a one be right, too, it is not to generate for long.
ANY = messages(
    target_pb2.GenerateRequest,
    sampling=messages(common_pb2.SamplingParams, max_tokens=st.integers(0, 9)),
    # A request for another life is not looked at any further.
    incarnation=st.sampled_from(["", "", "", "another life"]),
)


@pytest.fixture(scope="module")
def target() -> Iterator[ServedTarget]:
    with served_target() as opened:
        yield opened


def check_service(target: ServedTarget) -> None:
    async def check() -> None:
        assert await target.text(GREEDY) == RIGHT_TEXT
        await target.until_idle()

    target.runner.run(check())


RIGHT_TEXT: list[int] = []


@pytest.fixture(scope="module", autouse=True)
def right_text(target: ServedTarget) -> None:
    RIGHT_TEXT[:] = target.runner.run(target.text(GREEDY))


@pytest.mark.thorough
@EFFORTS
def test_any_request_to_generate_is_answered(target: ServedTarget, effort: int) -> None:
    def check(request: target_pb2.GenerateRequest) -> None:
        code, answers = target.call(GENERATE, request.SerializeToString())
        assert code in REFUSALS, code
        if code is grpc.StatusCode.OK:
            assert target_pb2.GenerateEvent.FromString(answers[-1]).HasField("finished")
        assert not target.failures

    try_out(check, effort, 250, request=NEARLY_RIGHT | ANY)
    check_service(target)


@EFFORTS
def test_any_bytes_are_answered(target: ServedTarget, effort: int) -> None:
    def check(raw: bytes, method: str) -> None:
        code, _ = target.call(method, raw, is_streaming=method == GENERATE)
        # gRPC's own word for what is no message.
        assert code in REFUSALS | {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}, code
        assert not target.failures

    raw = mangled(NEARLY_RIGHT) | st.binary(max_size=40)
    try_out(check, effort, 120, raw=raw, method=st.sampled_from([GENERATE, SET_SPECULATION]))
    check_service(target)


@EFFORTS
def test_any_change_of_speculation_is_answered(target: ServedTarget, effort: int) -> None:
    change = messages(
        target_pb2.SetSpeculationRequest,
        session_id=st.sampled_from(["good", "", "x" * 65, "\U0001f600" * 100_000]),
        speculation=messages(common_pb2.SpeculationParams, num_speculative_tokens=UINT32),
    )

    def check(changes: list[target_pb2.SetSpeculationRequest]) -> None:
        async def both() -> None:
            saying = target.runner.get_loop().create_task(target.text(GREEDY))
            for each in changes:
                code, _ = await target.calling(SET_SPECULATION, each.SerializeToString(), is_streaming=False)
                assert code in REFUSALS, code
            assert await saying == RIGHT_TEXT

        target.runner.run(both())

    try_out(check, effort, 40, changes=st.lists(change, max_size=4))
    check_service(target)


@pytest.mark.parametrize(
    "request_",
    [
        {"token_ids": [1] * MANY},
        {"token_ids": [2**32 - 1] * 200},
        {"session_id": "x" * 3_000_000},
        {"sampling": {"logit_bias": dict.fromkeys(range(MANY), 0.5)}},
        {"sampling": {"bad_words": [common_pb2.TokenSequence(token_ids=[1])] * MANY}},
        {"sampling": {"bad_words": [common_pb2.TokenSequence(token_ids=[1] * MANY)]}},
        {"sampling": {"allowed_token_ids": range(MANY)}},
        {"sampling": {"stop_token_ids": range(MANY)}},
        {"sampling": {"grammar": common_pb2.Grammar(regex="a" * 3_000_000)}},
        {"sampling": {"grammar": common_pb2.Grammar()}},
        {"sampling": {"grammar": common_pb2.Grammar(json_schema='{"multipleOf":' + "9" * 5000 + "}")}},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_request_of_any_size_is_refused_by_name(target: ServedTarget, request_: dict[str, object]) -> None:
    sampling = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 5} | request_.pop("sampling", {})  # type: ignore[operator]
    fields = {"session_id": "fuzz", "token_ids": [1, 2]} | request_
    request = target_pb2.GenerateRequest(**fields, sampling=common_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]
    code, answers = target.call(GENERATE, request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert {*map(event_kind, answers)} <= {"waiting"}
    check_service(target)


def test_a_message_over_the_limit_ends_its_call_only(target: ServedTarget) -> None:
    for method in (GENERATE, SET_SPECULATION):
        code, _ = target.call(method, b"\x0a" + b"\0" * MAX_MESSAGE_BYTES, is_streaming=method == GENERATE)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    check_service(target)
