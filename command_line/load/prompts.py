"""Prompts from a file or built in, and the body of each request. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from command_line.client import CHAT
from outrider.errors import InvalidRequest

# Only streams can be timed, and --prompts sets the prompts.
_NOT_EXTRA: Final = ("stream", "prompt", "messages")
_SINGLE: Final = ("n", "best_of")  # several answers in one stream have no TPOT


def parse_prompts(text: str) -> tuple[str, ...]:
    """Prompts of a file: JSON lines with a "prompt" each, or plain text with blank lines between prompts.

    It is JSON if the first non-empty line is an object. Raises InvalidRequest naming the line.
    """
    # Not splitlines: JSON may contain U+2028 and similar line separators.
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    first = next((line for line in lines if line.strip()), "")
    if _is_object(first):
        prompts = tuple(_prompt_of(number, line) for number, line in enumerate(lines, 1) if line.strip())
    else:
        prompts = tuple(part.strip("\n") for part in re.split(r"\n\s*\n", "\n".join(lines)) if part.strip())
    if not prompts:
        raise InvalidRequest("prompts", "there is no prompt in it")
    return prompts


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _prompt_of(number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("prompts", f"line {number} is not valid JSON: {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest("prompts", f'line {number} has no text as its "prompt"')
    return prompt


def parse_extra_body(text: str) -> dict[str, Any]:
    """The object to merge into every request. Raises InvalidRequest."""
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("extra_body", f"not valid JSON: {error}") from error
    if not isinstance(extra, dict):
        raise InvalidRequest("extra_body", 'not a JSON object like {"top_p": 0.9}')
    for name in _NOT_EXTRA:
        if name in extra:
            raise InvalidRequest("extra_body", f"{name!r} cannot be set here")
    for name in _SINGLE:
        if extra.get(name) not in (None, 1):
            raise InvalidRequest("extra_body", f"{name!r} may only be 1: each answer is timed on its own")
    return extra


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a turn, by index. Every server gets the same ones in the same order."""

    path: str  # COMPLETIONS or CHAT
    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    seed: int | None  # None: requests have no seed
    ignore_eos: bool
    extra: Mapping[str, Any]  # overrides everything; null removes a field

    def body(self, model: str, index: int) -> dict[str, Any]:
        """The body of request `index`, from 0; prompts repeat if there are fewer."""
        prompt = self.prompts[index % len(self.prompts)]
        body: dict[str, Any] = {"model": model}
        if self.path == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        body |= {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seed is not None:
            body["seed"] = self.seed + index  # one seed for all would make a repeated prompt's answers equal
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {name: value for name, value in (body | dict(self.extra)).items() if value is not None}
