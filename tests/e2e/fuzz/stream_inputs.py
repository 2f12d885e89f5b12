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
    "journal from the beginning",  # good ones, whose rest must be right
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


@dataclass(frozen=True, slots=True)
class Comeback:
    """What a client sends that has lost its stream."""

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
    """`event_id` is that of the last event that came, `other_event_id` of another stream."""
    chance, body = random.Random(each.chance), stream_body(each.body)
    fingerprint, _, place = event_id.rpartition(":")
    seen = int(place.rstrip("e"))
    key, is_good, is_own = "{KEY}", False, True
    from_token: int | None = None
    by_journal = "journal" in each.mutation
    path_id = request_id
    match each.mutation:
        case "as it was" | "journal":
            is_good, from_token = True, seen
        case "journal from the beginning":
            is_good, from_token, event_id = True, 0, ""
        case "bits flipped" | "journal, bits flipped":
            raw = bytearray(event_id.encode())
            for _ in range(chance.randrange(1, 4)):
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            event_id = raw.decode("latin-1")
        case "earlier":
            from_token = chance.randrange(seen)
            event_id = f"{fingerprint}:{from_token}"
        case "later":
            from_token = seen + chance.randrange(1, 50)
            event_id = f"{fingerprint}:{from_token}"
        case "huge":
            event_id = f"{fingerprint}:{chance.choice(['9' * 9, '9' * 10, '9' * 400, str(2**63)])}"
        case "negative":
            event_id = f"{fingerprint}:-{chance.choice(['1', '0', '99', '-'])}"
        case "not ASCII":
            event_id = chance.choice(
                [
                    f"{fingerprint}:é",
                    f"{fingerprint}:\u0663",
                    "é" * 20,
                    f"\x7f{event_id}",
                    f"{fingerprint}:\uff11",
                ]
            )
        case "no position":
            event_id = chance.choice([fingerprint, f"{fingerprint}:", f"{fingerprint}:x", ":", "x"])
        case "no fingerprint":
            event_id = chance.choice(
                [
                    place,
                    f":{place}",
                    f"-:{place}",
                    f"{fingerprint[:5]}:{place}",
                    f"{fingerprint}:{fingerprint}:{place}",
                ]
            )
        case "two points":
            event_id = f"{fingerprint}:{place}.{place}"
        case "ended":
            event_id = f"{fingerprint}:{place}e"
        case "empty":
            event_id = ""
        case "of another stream":
            event_id = other_event_id
        case "another body":
            body |= {"prompt": "something else"}
            is_own = False
        case "another seed":
            body |= {"seed": 77, "temperature": 1}
            is_own = False
        case "another tenant" | "another tenant's journal":
            key, is_own = "{OTHER_KEY}", False
        case "journal of an odd id":
            path_id = chance.choice(
                [
                    "x",
                    "%2e%2e",
                    "..%2f" + request_id,
                    request_id + "%00",
                    "%ff",
                    request_id[:-1],
                    request_id.upper(),
                    "x" * 300,
                ]
            )
        case "another id":
            request_id = f"{request_id}-other"
        case "at once":  # while the first one may still run
            from_token = seen
        case other:
            raise ValueError(f"there is no mutation {other!r}")
    headers = () if not event_id and by_journal else (("Last-Event-ID", event_id),)
    auth = f"Bearer {key}"
    if by_journal:
        raw_request = request("GET", f"/v1/streams/{path_id}", None, headers, key=auth)
    else:
        headers = (("X-Request-Id", request_id), *headers)
        raw_request = request("POST", COMPLETIONS, json.dumps(body).encode(), headers, key=auth)
    return Comeback(raw_request, is_good, is_own, from_token)


def is_rest(token_ids: list[int], right: list[int], from_token: int | None) -> bool:
    """Whether these are the tokens of the undisturbed output from a place on, from anywhere where none is named."""
    if from_token is not None:
        return token_ids == right[from_token:]
    return token_ids == right[len(right) - len(token_ids) :]
