"""A target on another engine: its answers say what it promises, and draft workers draft so that it accepts most."""

from __future__ import annotations

import pytest

from coordinator.request.draft_link import drafting
from coordinator.request.sequence_events import exactness_of
from outrider.sampling_params import DecodingMode, Exactness, SamplingParams
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.messages import SessionAdmitted
from target_worker.serving.generate_messages import event_message

GREEDY, REJECTION = common_pb2.DECODING_MODE_GREEDY, common_pb2.DECODING_MODE_REJECTION
TOKENS, DISTRIBUTION = common_pb2.EXACTNESS_TOKENS, common_pb2.EXACTNESS_DISTRIBUTION


@pytest.mark.parametrize(
    ("started", "exactness"),
    [
        (target_pb2.SessionStarted(decoding_mode=GREEDY, exactness=DISTRIBUTION), DISTRIBUTION),
        (target_pb2.SessionStarted(decoding_mode=GREEDY), TOKENS),
        (target_pb2.SessionStarted(decoding_mode=common_pb2.DECODING_MODE_COUPLED), TOKENS),
        (target_pb2.SessionStarted(decoding_mode=REJECTION), DISTRIBUTION),
    ],
)
def test_a_worker_of_an_earlier_release_promises_what_its_mode_does(
    started: target_pb2.SessionStarted, exactness: common_pb2.Exactness
) -> None:
    assert exactness_of(started) == exactness


@pytest.mark.parametrize(
    ("mode", "exactness"),
    [
        (DecodingMode.GREEDY, TOKENS),
        (DecodingMode.COUPLED, TOKENS),
        (DecodingMode.REJECTION, DISTRIBUTION),
    ],
)
def test_our_own_engine_tells_what_its_mode_promises(mode: DecodingMode, exactness: common_pb2.Exactness) -> None:
    assert event_message(SessionAdmitted("s", mode)).started.exactness == exactness
    weaker = event_message(SessionAdmitted("s", mode, Exactness.DISTRIBUTION))
    assert weaker.started.exactness == DISTRIBUTION


def test_a_draft_worker_drafts_greedily_for_an_engine_that_takes_hints_as_certain() -> None:
    sampled = SamplingParams(temperature=0.8, seed=3, presence_penalty=0.5).to_proto()
    drafted = drafting(sampled, "vllm")
    assert (drafted.temperature, drafted.HasField("seed"), drafted.presence_penalty) == (0.0, False, 0.5)
    assert sampled.HasField("seed"), "the target's own parameters stay"
    assert drafting(sampled, "") is sampled
    greedy = SamplingParams(temperature=0.0).to_proto()
    assert drafting(greedy, "vllm") is greedy
