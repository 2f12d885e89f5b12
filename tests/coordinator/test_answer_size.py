"""Tests of the estimated size of a whole answer: at least the memory that writing it takes, and not many times that."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass

import pytest

from coordinator.api.answer.choice_writer import AnswerFormat
from coordinator.api.answer.json_text import to_json_text
from coordinator.api.answer.openai_response import ResponseWriter
from coordinator.formats.answer_parts import AnswerRules, ReasoningStart, ToolMode, ToolUse
from coordinator.formats.output_format import AnswerPlan, choose_format
from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.observability.statistics import RequestTimes, SpeculationCounts
from coordinator.output.output_queue import size_of
from coordinator.output.sequence_output import SequenceFinished
from coordinator.output.text_output import VisibleOutput
from coordinator.request.choices import ChoiceOutput, RequestFinished
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import common_pb2
from tests.coordinator.fakes import served_model

NUM_TOKENS = 512
EMOJI = "\U0001f600"


@dataclass
class Tokens:
    """A vocabulary whose tokens are each a number followed by the same ending."""

    ending: bytes

    def token_bytes(self, token_id: int) -> bytes:
        return b"%05d" % (token_id % 100_000) + self.ending


def text_of(
    num_top: int | None, ending: str, *, tokens_per_step: int, num_choices: int, has_tools: bool
) -> list[ChoiceOutput]:
    """Outputs whose first token has a character that makes all text take four bytes a character."""
    outputs = []
    for place in range(NUM_TOKENS // tokens_per_step):
        token_ids = tuple(range(place * tokens_per_step, (place + 1) * tokens_per_step))
        pieces = tuple(f"{token_id:05d}{ending}" + ("" if token_id else EMOJI) for token_id in token_ids)
        logprobs = [
            common_pb2.TokenLogprobs(
                logprob=-1.2345678,
                rank=2,
                top_token_ids=[31 * token_id + 7 * other for other in range(num_top)],
                top_logprobs=[-1.2345678 - other for other in range(num_top)],
            )
            for token_id in token_ids
            if num_top is not None
        ]
        output = VisibleOutput(
            "".join(pieces),
            token_ids,
            (common_pb2.TOKEN_ORIGIN_BONUS,) * len(token_ids),
            pieces,
            tuple(logprobs),
        )
        outputs.append(ChoiceOutput(place % num_choices, output))
    if has_tools:
        outputs.insert(0, ChoiceOutput(0, VisibleOutput('<tool_call>\n{"name": "f", "arguments": "', (), (), ())))
    return outputs + [ChoiceOutput(index, end()) for index in range(num_choices)]


def end() -> SequenceFinished:
    return SequenceFinished(
        text="",
        finish_reason="length",
        stop_reason=None,
        num_prompt_tokens=1,
        num_output_tokens=NUM_TOKENS,
        decoding_mode=common_pb2.DECODING_MODE_GREEDY,
        counts=SpeculationCounts(),
        times=RequestTimes(0.0),
        num_cached_tokens=None,
    )


@pytest.mark.parametrize(
    ("num_top", "ending", "options"),
    [
        (None, "", {}),
        (None, "", {"tokens_per_step": 8}),
        (None, "", {"is_detailed": True, "returns_token_ids": True, "tokens_per_step": 8}),
        (None, "\x01" * 3, {"is_detailed": True}),
        (None, " " * 123, {"num_choices": 4}),
        (None, "", {"has_tools": True}),
        (None, "", {"has_reasoning": True}),
        (0, "", {}),
        (5, "", {}),
        (20, "", {}),
        (20, "", {"num_choices": 4, "tokens_per_step": 8}),
        (20, "", {"as_token_ids": True}),
        (20, " " * 11, {"is_detailed": True, "returns_token_ids": True}),
        (20, " " * 123, {}),
        (20, "\x01" * 3, {}),
    ],
)
@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
def test_writing_takes_no_more_memory_than_is_counted_for_it(
    num_top: int | None, ending: str, options: dict[str, int], is_chat: bool
) -> None:
    num_choices = options.get("num_choices", 1)
    request = GenerationInput(
        request_id="r" * 32,
        n=num_choices,
        is_detailed=bool(options.get("is_detailed")),
        sampling=SamplingParams(num_logprobs=num_top),
        tools=ToolUse((("f", None),), ToolMode.AUTO, False) if options.get("has_tools") and is_chat else None,
    )
    reasoning = ReasoningStart.OPEN if options.get("has_reasoning") else ReasoningStart.ABSENT
    plan = AnswerPlan(choose_format("</think>"), AnswerRules(request.tools, reasoning=reasoning))
    spec = GenerationSpec(
        request=request,
        plan=plan if is_chat and plan.new_parser() else None,
        model="demo",
        prompt_token_ids=(1,),
        max_tokens=NUM_TOKENS,
        sampling=request.sampling,
        deadline_s=60.0,
        served=served_model(),
    )
    form = AnswerFormat(
        is_chat=is_chat,
        returns_token_ids=bool(options.get("returns_token_ids")),
        as_token_ids=bool(options.get("as_token_ids")),
    )
    tokens = Tokens(ending.encode())
    writer = ResponseWriter([spec], form, tokens, request_id="r", created_s=0, new_call_id=lambda: "call")  # type: ignore[arg-type]
    outputs = text_of(
        *(num_top, ending),
        tokens_per_step=options.get("tokens_per_step", 1),
        num_choices=num_choices,
        has_tools=request.tools is not None,
    )
    counted = sum(map(writer.size_of, outputs))
    finished = RequestFinished((end(),) * num_choices)
    gc.collect()
    tracemalloc.start()
    try:
        begin_bytes = tracemalloc.get_traced_memory()[0]
        text = to_json_text(writer.whole(outputs, finished))
        taken = tracemalloc.get_traced_memory()[1] - begin_bytes
    finally:
        tracemalloc.stop()
    assert EMOJI in text
    assert taken < counted
    outputs_bytes = sum(size_of(each.item) for each in outputs)
    assert counted + outputs_bytes < 2 * (taken + outputs_bytes), f"{taken} bytes are taken"
