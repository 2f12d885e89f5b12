"""Attacks by what constrains an output: grammars, literals, biases, bans and stop strings at their bounds."""

from __future__ import annotations

import itertools
from typing import Any

from protos.outrider.v1 import common_pb2, generation_pb2
from tests.e2e.tenants.attacker import CHATS, Attacker
from tests.e2e.tenants.scenario import scenario

VOCAB_SIZE = 4096  # of the demo pair
LONG_LITERAL = 250_000
LITERAL = 15_000


async def constrained(a: Attacker, constraint: dict[str, Any], **parameters: Any) -> None:
    body = {"structured_outputs": constraint, "ignore_eos": False} | parameters
    await a.complete("Say it:", parameters.pop("max_tokens", 8), **body)


async def chat(a: Attacker, max_tokens: int = 8, **parameters: Any) -> None:
    body = {"messages": [{"role": "user", "content": a.words(40)}], "max_tokens": max_tokens}
    await a.post(CHATS, body | parameters)


@scenario(1, clients=1)
async def literal_regex_of_250_kb(a: Attacker) -> None:
    """A regular expression that is one literal of 250 KB."""
    await constrained(a, {"regex": a.letters(LONG_LITERAL)})


@scenario(1, clients=2, is_short=True)
async def literal_regex_for_eight(a: Attacker) -> None:
    """A literal of 15 KB as a regular expression, for eight choices at once."""
    await constrained(a, {"regex": a.letters(LITERAL)}, n=8)


@scenario(1, clients=2)
async def literal_choice(a: Attacker) -> None:
    """One choice among texts of 15 KB that begin alike, eight times."""
    begin = a.letters(LITERAL)
    await constrained(a, {"choice": [begin + a.letters(20) for _ in range(4)]}, n=8)


@scenario(1, clients=2)
async def literal_in_a_schema(a: Attacker) -> None:
    """A JSON schema whose const has 15 KB, for eight choices at once."""
    schema = {"type": "object", "properties": {"a": {"const": a.letters(LITERAL)}}, "required": ["a"]}
    await chat(a, n=8, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


@scenario(1, clients=2)
async def literal_in_a_tool(a: Attacker) -> None:
    """A tool that has to be called with a const of 15 KB."""
    parameters = {"type": "object", "properties": {"a": {"const": a.letters(LITERAL)}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    await chat(a, n=8, tools=[tool], tool_choice="required")


@scenario(1, clients=2)
async def literal_over_grpc(a: Attacker) -> None:
    """A literal of 15 KB as a regular expression over gRPC, eight choices."""
    sampling = common_pb2.SamplingParams(max_tokens=8, grammar=common_pb2.Grammar(regex=a.letters(LITERAL)))
    await a.generate(generation_pb2.GenerationRequest(prompt="Say it:", n=8, sampling=sampling))


@scenario(1, clients=2)
async def literal_in_lark(a: Attacker) -> None:
    """A grammar in Lark of a thousand literals that follow each other."""
    rule = " ".join(f'"{a.letters(200)}"' for _ in range(1000))
    await constrained(a, {"grammar": f"start: {rule}"}, n=8)


@scenario(1, clients=4)
async def repetitions(a: Attacker) -> None:
    """Regular expressions whose nested repetitions are as large as they may be."""
    inner = a.letters(3)
    await constrained(a, {"regex": f"(({inner}|{a.letters(3)}){{1,200}}x?){{1,200}}"}, max_tokens=32)


@scenario(2, clients=4, times=10)
async def refused_schemas(a: Attacker) -> None:
    """Forty schemas of 1,500 properties that compile and are refused then, each a new one."""
    schema = {"type": "object", "properties": {a.letters(12): {} for _ in range(1500)}}
    await chat(a, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


@scenario(2, clients=4, times=10)
async def schemas_that_do_not_compile(a: Attacker) -> None:
    """Forty schemas of 1,500 properties of which the last has a pattern that is not served."""
    properties: dict[str, Any] = {a.letters(12): {"type": "string", "minLength": 1} for _ in range(1499)}
    properties["last"] = {"type": "string", "pattern": "(?=a)b"}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    await chat(a, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


@scenario(2, clients=4, times=10)
async def schemas_that_contradict_themselves(a: Attacker) -> None:
    """Forty schemas of 1,500 properties of which one can have no value."""
    properties: dict[str, Any] = {a.letters(12): {"type": "integer"} for _ in range(1499)}
    properties["last"] = {"type": "string", "minLength": 9, "maxLength": 3}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    await chat(a, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


@scenario(2, clients=4)
async def refused_lark(a: Attacker) -> None:
    """Grammars in Lark of 2,000 rules, the last of which names one that is not there."""
    names = [a.letters(10) for _ in range(2000)]
    rules = "\n".join(f'{name}: "{name}" {following}' for name, following in itertools.pairwise(names))
    await constrained(a, {"grammar": f"start: {names[0]}\n{rules}\n{names[-1]}: nowhere"})


@scenario(2, clients=4)
async def large_schemas(a: Attacker) -> None:
    """New schemas of 1,500 properties that compile, one after the other."""
    properties: dict[str, Any] = {a.letters(12): {"type": "integer"} for _ in range(1500)}
    schema = {"type": "object", "properties": properties}
    await chat(a, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


@scenario(2, clients=8)
async def small_schemas(a: Attacker) -> None:
    """A stream of small schemas, each a new one, as caches of grammars of other servers have been filled."""
    schema = {"type": "object", "properties": {a.letters(12): {"enum": [a.letters(4)]}}}
    await chat(a, 1, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


@scenario(1, clients=8)
async def biases_at_their_bound(a: Attacker) -> None:
    """1,024 biases, 2,000 permitted tokens and 64 stop tokens, over many tokens."""
    ids = a.rng.sample(range(3, VOCAB_SIZE), 2000)
    biases = {str(token_id): a.rng.uniform(-5, 5) for token_id in ids[:1024]}
    await a.complete(a.words(60), 64, logit_bias=biases, allowed_token_ids=ids, stop_token_ids=ids[:64])


@scenario(1, clients=8)
async def bans_at_their_bound(a: Attacker) -> None:
    """256 bad words of 200 letters each, over many tokens."""
    await a.complete(a.words(60), 64, bad_words=[a.letters(200) for _ in range(256)])


@scenario(1, clients=8)
async def stops_at_their_bound(a: Attacker) -> None:
    """64 stop strings of 256 letters that begin alike, for eight choices."""
    begin = a.letters(200)
    await a.complete(a.words(60), 32, n=8, stop=[begin + a.letters(56) for _ in range(64)])
