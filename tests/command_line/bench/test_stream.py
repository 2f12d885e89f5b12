"""Bytes to events, events to TTFT, ITL and tokens: with times handed in, to the last digit."""

from __future__ import annotations

import pytest

from command_line.load import stream
from command_line.load.stream import EventSplitter, Observation, RequestError
from tests.command_line.bench.fake_server import DONE, event, text_event, usage_event


def data_of(line: bytes) -> bytes:
    return line.removeprefix(b"data: ").strip()


def seen(*events: tuple[float, bytes]) -> Observation:
    """An answer to a request sent at 10 s, of events at these times."""
    observation = Observation(sent_s=10.0)
    for at_s, line in events:
        observation.absorb(data_of(line), at_s)
    return observation


class TestSplitter:
    BODY = b': hello\r\nevent: x\ndata: {"a": 1}\r\n\r\ndata:{"b": 2}\nid: 7\n\ndata: [DONE]\n\n'

    @pytest.mark.parametrize("size", [1, 2, 7, 1000])
    def test_events_are_the_same_wherever_the_network_cuts(self, size: int) -> None:
        splitter = EventSplitter()
        parts = [self.BODY[start : start + size] for start in range(0, len(self.BODY), size)]
        found = [data for part in parts for data in splitter.feed(part)]
        assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]

    def test_a_line_without_an_end_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream, "LINE_BYTES_MAX", 100)
        splitter = EventSplitter()
        splitter.feed(b"x" * 90)
        with pytest.raises(RequestError, match="malformed stream"):
            splitter.feed(b"x" * 20)


class TestObservation:
    def test_times_are_those_of_text(self) -> None:
        role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        observation = seen(
            (10.5, role), (11.0, text_event("a")), (11.25, text_event("b")), (11.5, text_event("", "stop")),
            (12.0, usage_event(5)), (13.0, DONE),
        )  # fmt: skip
        observation.check_complete()
        assert observation.ttft_s == 1.0, "a role is no text"
        assert observation.e2el_s == 1.5, "the finish reason comes with the last token; usage is no token"
        assert observation.itl_s == (0.25,)
        assert observation.num_output_tokens == 5

    def test_without_usage_chunks_are_counted(self) -> None:
        observation = seen((11.0, text_event("a")), (12.0, text_event("b", "length")))
        observation.check_complete()
        assert observation.num_usage_tokens is None
        assert observation.num_output_tokens == 2

    def test_one_chunk_has_no_gaps(self) -> None:
        observation = seen((11.0, text_event("all of it", "stop")), (11.0, usage_event(4)), (11.0, DONE))
        assert (observation.ttft_s, observation.e2el_s, observation.itl_s) == (1.0, 1.0, ())

    def test_a_token_that_is_not_seen_has_a_time(self) -> None:
        observation = seen((11.0, text_event("", "stop")), (11.5, usage_event(1)), (11.5, DONE))
        observation.check_complete()
        assert (observation.ttft_s, observation.e2el_s) == (1.0, 1.0)

    def test_no_token_has_no_ttft(self) -> None:
        observation = seen((11.0, text_event("", "stop")), (11.5, usage_event(0)), (11.5, DONE))
        observation.check_complete()
        assert (observation.ttft_s, observation.e2el_s) == (None, 1.0)
        assert observation.num_output_tokens == 0

    @pytest.mark.parametrize(
        "delta",
        [
            {"content": "a"}, {"reasoning_content": "a"}, {"reasoning": "a"},
            {"tool_calls": [{"function": {"arguments": "{"}}]},
        ],
    )  # fmt: skip
    def test_whatever_a_chat_says_is_text(self, delta: dict[str, object]) -> None:
        assert seen((11.0, event({"choices": [{"delta": delta}]}))).text_s == [11.0]

    def test_acceptance_is_read_where_it_is_said(self) -> None:
        said = {"mean_acceptance_length": 2.5, "num_spec_steps": 4}
        observation = seen((11.0, usage_event(1, speculative_decoding=said)))
        assert (observation.mean_acceptance_length, observation.num_spec_steps) == (2.5, 4)
        silent = seen((11.0, usage_event(1, speculative_decoding={"mean_acceptance_length": None})))
        assert silent.mean_acceptance_length is None

    @pytest.mark.parametrize(
        ("line", "cause"),
        [
            (b"data: {nonsense", "malformed stream"),
            (b"data: 7", "malformed stream"),
            (b'data: {"choices": [7]}', "malformed stream"),
            (b'data: {"choices": [{"delta": "a"}]}', "malformed stream"),
            (b'data: {"usage": {"completion_tokens": "x"}}', "malformed stream"),
            (b'data: {"error": {"message": "the test says no"}}', "error in stream: the test says no"),
            (b'data: {"error": "the test says no"}', "error in stream: the test says no"),
            (
                b'data: {"object": "error", "message": "the test says no"}',
                "error in stream: the test says no",
            ),
        ],
    )
    def test_what_is_no_chunk_is_an_error_with_a_name(self, line: bytes, cause: str) -> None:
        with pytest.raises(RequestError, match=cause):
            seen((11.0, line))

    @pytest.mark.parametrize(
        ("lines", "cause"),
        [
            ([], "not an event stream"),
            ([text_event("a")], "stream cut"),
            ([DONE], "empty answer"),
        ],
    )
    def test_an_answer_that_is_not_whole_is_an_error(self, lines: list[bytes], cause: str) -> None:
        with pytest.raises(RequestError, match=cause):
            seen(*((11.0, line) for line in lines)).check_complete()
