"""Messages of errors quote what was sent, and stay as short as a header has to be."""

from __future__ import annotations

import pickle

import pytest

from outrider.errors import MESSAGE_BYTES_MAX, InvalidRequest, NotFound


@pytest.mark.parametrize("character", ["x", "é", "\U0001f600", "\ud800"])
def test_a_long_message_loses_its_middle(character: str) -> None:
    error = NotFound(f"no model {character * 1_000_000} here", "model")
    assert len(error.message.encode()) <= MESSAGE_BYTES_MAX
    assert error.message.startswith("no model")
    assert error.message.endswith("here")
    assert str(error) == error.message
    assert pickle.loads(pickle.dumps(error)).message == error.message


def test_a_short_message_stays_as_it_is() -> None:
    assert InvalidRequest("stop", "stop is \U0001f600").message == "stop is \U0001f600"
