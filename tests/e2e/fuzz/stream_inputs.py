"""Streams that are cut, and odd ways to come back to them. Pure.

What a mutation makes of the id of the last event depends on the run, so an input names the mutation and what it draws
from, and `comeback` makes the request when the id is known.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from tests.e2e.fuzz.http_inputs import COMPLETIONS, PROMPTS, request
from tests.e2e.fuzz.inputs import StreamInput

MAX_TOKENS = 24
MUTATIONS = (
    "as it was",
    "journal",
    "journal from the beginning",
    "bits flipped",
    "earlier",
    "later",
    "huge",
    "negative",
    "not ASCII",
    "no position",
    "no fingerprint",
    "two points",
    "ended",
    "empty",
    "of another stream",
    "another body",
    "another seed",
    "another tenant",
    "another tenant's journal",
    "journal, bits flipped",
    "journal of an odd id",
    "another id",
    "at once",
)
# Whose rest must come, and be right.
GOOD = ("as it was", "journal", "journal from the beginning")
OTHERS: dict[str, dict[str, object]] = {  # requests
    "another body": {"prompt": "something else"},
    "another seed": {"seed": 77, "temperature": 1},
}


@dataclass(frozen=True, slots=True)
class Comeback:
    """The request that a client sends after it has lost its stream."""

    raw: bytes
    is_good: bool  # nothing was changed: its rest has to come, whole
    is_own: bool  # same request, same tenant: what comes, if anything, is the rest from some place on
    from_token: int | None  # where the rest has to begin, if it comes; None: anywhere


def cut_streams(count: int, seed: int) -> list[StreamInput]:
    """One mutation after the other, on greedy and seeded streams."""
    chance = random.Random(seed)
    found = []
    for index in range(count):
        body = {
            "prompt": chance.choice(PROMPTS),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        if chance.random() < 0.3:
            body |= {"temperature": 1, "seed": chance.choice([1, 2])}
        found.append(
            StreamInput(
                kind="SSE: reconnects",
                what=MUTATIONS[index % len(MUTATIONS)],
                body=json.dumps(body),
                cut_after=chance.choice([1, 1, 2, 3, 5]),
                mutation=MUTATIONS[index % len(MUTATIONS)],
                chance=chance.randrange(2**32),
            )
        )
    return found


def stream_body(body: str) -> dict[str, object]:
    """The completion as a stream that can be resumed and whose tokens are shown."""
    return json.loads(body) | {
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_event_ids": True},
    }


def comeback(each: StreamInput, request_id: str, event_id: str, other_event_id: str) -> Comeback:
    """Returns the request that resumes a stream. `event_id` is that of the last event that came, `other_event_id` of
    another stream."""
    chance = random.Random(each.chance)
    last_id, from_token = _last_event(each.mutation, chance, event_id, other_event_id)
    is_by_journal = "journal" in each.mutation
    headers = () if not last_id and is_by_journal else (("Last-Event-ID", last_id),)
    key = "Bearer {OTHER_KEY}" if "another tenant" in each.mutation else "Bearer {KEY}"
    if is_by_journal:
        is_odd = each.mutation == "journal of an odd id"
        path_id = chance.choice(_odd_ids(request_id)) if is_odd else request_id
        raw = request("GET", f"/v1/streams/{path_id}", None, headers, key=key)
    else:
        own_id = f"{request_id}-other" if each.mutation == "another id" else request_id
        body = stream_body(each.body) | OTHERS.get(each.mutation, {})
        headers = (("X-Request-Id", own_id), *headers)
        raw = request("POST", COMPLETIONS, json.dumps(body).encode(), headers, key=key)
    is_own = each.mutation not in OTHERS and "another tenant" not in each.mutation
    return Comeback(raw, each.mutation in GOOD, is_own, from_token)


def _last_event(mutation: str, chance: random.Random, event_id: str, other_event_id: str) -> tuple[str, int | None]:
    """The id that the client says it has seen last, and the token from which its rest has to begin, if it comes."""
    fingerprint, _, place = event_id.rpartition(":")
    seen = int(place.rstrip("e"))
    match mutation:
        case "as it was" | "journal" | "at once":  # at once: while the first one may still run
            return event_id, seen
        case "journal from the beginning":
            return "", 0
        case "bits flipped" | "journal, bits flipped":
            raw = bytearray(event_id.encode())
            for _ in range(chance.randrange(1, 4)):
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            return raw.decode("latin-1"), None
        case "earlier":
            from_token = chance.randrange(seen)
            return f"{fingerprint}:{from_token}", from_token
        case "later":
            from_token = seen + chance.randrange(1, 50)
            return f"{fingerprint}:{from_token}", from_token
        case "ended":
            return f"{fingerprint}:{place}e", None
        case "empty":
            return "", None
        case "of another stream":
            return other_event_id, None
        case "huge" | "negative" | "not ASCII" | "no position" | "no fingerprint" | "two points":
            return chance.choice(_odd_event_ids(fingerprint, place)[mutation]), None
        case _ if mutation in MUTATIONS:
            return event_id, None
    raise ValueError(f"there is no mutation {mutation!r}")


def _odd_event_ids(fingerprint: str, place: str) -> dict[str, list[str]]:
    """Malformed event ids, by the name of the mutation."""
    here = f"{fingerprint}:{place}"
    return {
        "huge": [f"{fingerprint}:{each}" for each in ("9" * 9, "9" * 10, "9" * 400, str(2**63))],
        "negative": [f"{fingerprint}:-{each}" for each in ("1", "0", "99", "-")],
        "not ASCII": [*(f"{fingerprint}:é", f"{fingerprint}:\u0663", "é" * 20, f"\x7f{here}", f"{fingerprint}:\uff11")],
        "no position": [fingerprint, f"{fingerprint}:", f"{fingerprint}:x", ":", "x"],
        "no fingerprint": [*(place, f":{place}", f"-:{place}", f"{fingerprint[:5]}:{place}", f"{fingerprint}:{here}")],
        "two points": [f"{here}.{place}"],
    }


def _odd_ids(request_id: str) -> list[str]:
    """Ids of streams that do not exist or are malformed, as they stand in a path."""
    before = ["x", "%2e%2e", f"..%2f{request_id}", f"{request_id}%00", "%ff"]
    return [*before, request_id[:-1], request_id.upper(), "x" * 300]


def is_rest(token_ids: list[int], right: list[int], from_token: int | None) -> bool:
    """Whether these are the tokens of the undisturbed output from a place on, from anywhere where none is named."""
    if from_token is not None:
        return token_ids == right[from_token:]
    return token_ids == right[len(right) - len(token_ids) :]
