"""Clients of many streams find the events in bytes that come in any pieces."""

from __future__ import annotations

from benchmarks.shared.stream_clients import Counts, events_of, text_of

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (b'{"id":"a","choices":[{"index":0,"text":"0aZ-","logprobs":null}]}', b'{"choices":[],"usage":{}}', b"[DONE]")


def chunked(events: tuple[bytes, ...]) -> bytes:
    bodies = [b"data: " + event + b"\n\n" for event in events]
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


def test_events_are_found_however_the_bytes_are_cut() -> None:
    sent = chunked(EVENTS)
    for size in (1, 2, 7, len(sent)):
        buffer, found = bytearray(), []
        for start in range(0, len(sent), size):
            buffer += sent[start : start + size]
            found += events_of(buffer)
        assert tuple(found) == EVENTS, size


def test_the_text_of_an_event_is_read_without_parsing_it() -> None:
    assert [text_of(event) for event in EVENTS] == ["0aZ-", "", ""]


def test_counts_are_told_in_milliseconds() -> None:
    counts = Counts(began_s=10.0)
    counts.fail("cut off")
    counts.fail("cut off")
    counts.delays_s.append(0.0125)
    told = counts.to_json(12.0)
    assert (told["seconds"], told["delays_ms"], told["failures"]) == (2.0, [12.5], {"cut off": 2})
