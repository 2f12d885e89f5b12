"""Bugs to plant, each of the kind that one feature of a run is there to find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator import grpc_api
from coordinator.generation_request import GenerationSpec
from coordinator.journal import Journal, JournalEntry
from coordinator.rate_limits import RateLimits
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import generation_pb2
from target_worker import server
from target_worker.messages import StartSession
from tests.simulation.actors import Target
from tests.simulation.features import Feature

CHUNK, PARSE_GENERATE, LOAD = grpc_api._chunk, server.parse_generate, Journal.load


def sample_all_choices_alike(self: GenerationSpec, index: int) -> SamplingParams:
    return self.sampling


def lose_a_log_probability(*arguments: Any) -> generation_pb2.GenerationChunk:
    chunk = CHUNK(*arguments)
    del chunk.logprobs[1:]
    return chunk


def forget_the_grammar(*arguments: Any) -> StartSession:
    event = PARSE_GENERATE(*arguments)
    return replace(event, sampling=replace(event.sampling, grammar=None))


async def let_everybody_in(self: RateLimits, *arguments: Any, **named: Any) -> None: ...


async def make_up_what_is_not_there(self: Journal, request_id: str) -> JournalEntry | None:
    return await LOAD(self, request_id) or JournalEntry("grpc", b"")


def announce_the_same_weights(weights: int) -> str:
    return "the same"


PLANTED: dict[str, tuple[Feature, object, str, object, str]] = {
    "all choices have one seed": (
        *(Feature.CHOICES, GenerationSpec, "sampling_of", sample_all_choices_alike, "tokens"),
    ),
    "a log probability is lost where a step has several tokens": (
        *(Feature.LOGPROBS, grpc_api, "_chunk", lose_a_log_probability, "log probabilities"),
    ),
    "a target forgets the grammar": (
        *(Feature.GRAMMAR, server, "parse_generate", forget_the_grammar, "tokens"),
    ),
    "a tenant's limit is not kept": (*(Feature.KEYS, RateLimits, "admit", let_everybody_in, "its limit"),),
    "a stream that the journal has lost is gone on with": (
        *(Feature.JOURNAL_LOSS, Journal, "load", make_up_what_is_not_there, "failed"),
    ),
    "a worker announces other weights than it has": (
        *(Feature.WEIGHTS, Target, "fingerprint_of", staticmethod(announce_the_same_weights), "I2"),
    ),
}
"""By what is wrong: the feature, what is replaced and by what, and what the simulation says of it."""
