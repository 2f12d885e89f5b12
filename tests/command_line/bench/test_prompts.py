"""Prompts from files and bodies of requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from command_line.client import CHAT, COMPLETIONS
from command_line.load.prompts import Workload, parse_extra_body, parse_prompts
from outrider.errors import InvalidRequest

WORKLOAD = Workload(COMPLETIONS, ("a", "b"), 8, 0.0, None, False, {})


class TestPrompts:
    @pytest.mark.parametrize(
        ("text", "prompts"),
        [
            ('{"prompt": "a"}\n\n{"prompt": "b\\n\\nc", "more": 1}\n', ("a", "b\n\nc")),
            ('{"prompt": "a\u2028b"}', ("a\u2028b",)),
            ("one\ntwo\n\n  \n\nthree\n", ("one\ntwo", "three")),
            ("    indented\r\n\r\nlast", ("    indented", "last")),
            ("{ no json }", ("{ no json }",)),
        ],
    )
    def test_files_are_json_lines_or_plain_text(self, text: str, prompts: tuple[str, ...]) -> None:
        assert parse_prompts(text) == prompts

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("", "no prompt"),
            (" \n\n", "no prompt"),
            ('{"prompt": "a"}\nnonsense', "line 2 is not valid JSON"),
            ('{"prompt": "a"}\n\n{"text": "b"}', "line 3 has no text"),
            ('{"prompt": [1, 2]}', "line 1 has no text"),
        ],
    )
    def test_what_holds_no_prompt_is_refused_by_line(self, text: str, complaint: str) -> None:
        with pytest.raises(InvalidRequest, match=complaint):
            parse_prompts(text)


class TestBodies:
    def test_prompts_repeat(self) -> None:
        assert [WORKLOAD.body("m", index)["prompt"] for index in range(3)] == ["a", "b", "a"]

    def test_a_completion_asks_for_usage_and_for_nothing_unasked(self) -> None:
        assert WORKLOAD.body("m", 0) == {
            "model": "m", "prompt": "a", "max_tokens": 8, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip

    def test_a_chat_has_a_message(self) -> None:
        body = replace(WORKLOAD, path=CHAT).body("m", 1)
        assert body["messages"] == [{"role": "user", "content": "b"}]
        assert "prompt" not in body

    def test_requests_have_seeds_of_their_own(self) -> None:
        seeded = replace(WORKLOAD, seed=7)
        assert [seeded.body("m", index)["seed"] for index in range(2)] == [7, 8]

    def test_extra_fields_win_and_null_takes_away(self) -> None:
        extra = {"speculation": {"enabled": False}, "max_tokens": 3, "stream_options": None}
        body = replace(WORKLOAD, ignore_eos=True, extra=extra).body("m", 0)
        assert body["speculation"] == {"enabled": False}
        assert body["max_tokens"] == 3
        assert body["ignore_eos"] is True
        assert "stream_options" not in body

    @pytest.mark.parametrize(
        "text", ["nonsense", "[1]", '{"stream": false}', '{"prompt": "a"}', '{"messages": []}', '{"n": 2}']
    )
    def test_what_would_break_the_measurement_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequest):
            parse_extra_body(text)
        assert parse_extra_body('{"n": 1, "top_p": 0.5}') == {"n": 1, "top_p": 0.5}
