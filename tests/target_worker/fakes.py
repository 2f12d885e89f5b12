"""A target model that is a function of the text so far, run over a KV cache that remembers what was written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.sampling.randomness import mix
from outrider.engine.sampling.verification import Verdict
from outrider.sampling_params import DecodingMode, SamplingParams, SpeculationSettings
from target_worker.messages import Drafted, HeadResult, HeadTurn, StartSession, Step, StepItem, StepResult

VOCAB_SIZE = 5
END = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
_CHUNK_LEN: Final = 8
_REMEMBERED_LEN_MAX: Final = 256


def next_token(prefix: Sequence[int], seed: int = 0) -> int:
    """The token after a prefix: depends on all of it, and on the seed in coupled mode; END about once in 31 tokens."""
    return _token(_digest(prefix, seed))


def _digest(prefix: Sequence[int], seed: int) -> int:
    return digest_after(mix(seed) if seed else 1, tuple(prefix))


def digest_after(value: int, token_ids: tuple[int, ...]) -> int:
    """A digest after more tokens. Sequences grow a few tokens at a time, so results for whole chunks are cached."""
    num_known = min(len(token_ids), _REMEMBERED_LEN_MAX) // _CHUNK_LEN * _CHUNK_LEN
    if num_known:
        value = _digest_of_chunks(value, token_ids[:num_known])
    for token_id in token_ids[num_known:]:
        value = mix(value ^ (token_id + 1))
    return value


@lru_cache(maxsize=1 << 14)
def _digest_of_chunks(value: int, token_ids: tuple[int, ...]) -> int:
    if len(token_ids) > _CHUNK_LEN:
        value = _digest_of_chunks(value, token_ids[:-_CHUNK_LEN])
    for token_id in token_ids[-_CHUNK_LEN:]:
        value = mix(value ^ (token_id + 1))
    return value


def _token(digest: int) -> int:
    return END if digest % 31 == 0 else digest % END


def seed_of(sampling: SamplingParams, seed: int) -> int:
    """The seed that the output depends on beside the prompt: 0 unless decoding is coupled."""
    return seed if sampling.decoding_mode is DecodingMode.COUPLED else 0


def greedy_text(
    prompt: Sequence[int], max_len: int, stop_token_ids: frozenset[int], seed: int = 0
) -> tuple[list[int], int | None]:
    """The prompt with its output by plain decoding, and the stop token that ended it, if one did."""
    text = list(prompt)
    while len(text) < max_len:
        token_id = next_token(text, seed)
        if token_id in stop_token_ids:
            return text, token_id
        text.append(token_id)
    return text, None


def said_in(item: StepItem, cache: Sequence[int]) -> list[list[int]]:
    """Returns the tokens that a cache has after the committed ones, for each row that decides. They must be the
    item's."""
    first = item.kv.length - item.num_fed_hints
    assert len(item.context.token_ids) == first
    entries = [[*range(first, first + row)] for row in range(1 + item.num_fed_on_path)]
    entries += [item.seen_entries(branch) for branch in item.branches]
    slots = item.kv.slots(0, item.kv.length)
    said = [[cache[slots[entry]] for entry in own] for own in entries]
    assert said == [list(each) for each in item.context.continuations]
    return said


def decided(item: StepItem, choices: Sequence[int]) -> Verdict:
    """The verdict where `choices[i]` follows the text of row i: token by token, as far as there is a row for it."""
    rows: dict[tuple[int, ...], int] = {}
    for row, said in enumerate(item.context.continuations):
        rows.setdefault(tuple(said), row)
    text: tuple[int, ...] = ()
    row = 0
    while text in rows:
        row = rows[text]
        text = (*text, choices[row])
    hinted = [hint.token_id for hint in item.hints]
    branch = row - 1 - item.num_fed_on_path
    trail = item.branches[branch].trail if branch >= 0 else ()
    num_accepted = len(text) - 1 - len(trail)
    assert list(text[:num_accepted]) == hinted[:num_accepted]
    is_guessed = not trail and hinted[num_accepted:][:1] == [text[-1]]
    return Verdict(list(text), num_accepted, num_accepted + is_guessed, trail=trail)


class FakeModel:
    """Runs a step as the engine does. Reads the prefix back from its cache, so that wrong KV gives wrong text."""

    def __init__(self, num_slots: int) -> None:
        self.cache = [-1] * num_slots

    def run(self, step: Step, step_ms: float = 1.0) -> StepResult:
        for item in step.items:
            first = item.kv.length - len(item.token_ids)
            for slot, token_id in zip(item.kv.slots(first, item.kv.length), item.token_ids, strict=True):
                self.cache[slot] = token_id
        verdicts = [self.decide(item) if item.num_decided else None for item in step.items]
        for item, verdict in zip(step.items, verdicts, strict=True):
            if verdict is not None:
                slots = item.kv.slots(0, item.kv.length)
                sources, destinations = item.moved_entries(verdict)
                moved = [self.cache[slots[source]] for source in sources]
                for destination, token_id in zip(destinations, moved, strict=True):
                    self.cache[slots[destination]] = token_id
        return StepResult(verdicts, step_ms)

    def decide(self, item: StepItem) -> Verdict:
        assert item.num_fed_on_path <= len(item.hints) <= item.num_fed_on_path + 1
        position = len(item.context.token_ids)
        text = [self.cache[slot] for slot in item.kv.slots(0, position)]
        digest = _digest(text, seed_of(item.sampling, item.seed))
        return decided(item, [_token(digest_after(digest, tuple(said))) for said in said_in(item, self.cache)])


def start(
    session_id: str = "a",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    num_given: int = 0,
    speculation: SpeculationSettings | None = None,
    **sampling: object,
) -> StartSession:
    """A greedy session; `num_given` tokens after the prompt were already committed elsewhere."""
    text = list(prompt)
    for _ in range(num_given):
        text.append(next_token(text))
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | sampling))  # type: ignore[arg-type]
    return StartSession(session_id, text, len(prompt), params, speculation or SpeculationSettings(), 7)


class FakeHead:
    """A draft head with KV of its own: right always or never, or with `luck` at times; a pass takes `pass_ms`."""

    max_depth = 8

    def __init__(
        self, *, is_right: bool = True, pass_ms: float = 0.5, num_blocks: int = 400, luck: int | None = None
    ) -> None:
        self.allocator: BlockAllocator | None = BlockAllocator(num_blocks, 4)
        self.is_right, self.pass_ms = is_right, pass_ms
        self._rng = None if luck is None else random.Random(luck)
        self.turns: list[HeadTurn] = []
        self.spent_ms = 0.0

    def draft(self, turn: HeadTurn) -> HeadResult:
        self.turns.append(turn)
        drafts, num_rows = [], 0
        for item in turn.items:
            assert item.kv is not None
            assert item.kv.length == item.start < item.end <= len(item.token_ids)
            assert item.target_kv.length >= item.end - 1, "the target's states are not there yet"
            item.kv.extend(item.end - item.start)
            num_rows += item.end - item.start
            token_ids: list[int] = []
            while item.context is not None and len(token_ids) < len(item.records):
                right = next_token([*item.token_ids, *token_ids], seed_of(item.sampling, item.seed))
                is_right = self.is_right if self._rng is None else self._rng.random() < 0.7
                token_ids.append(right if is_right else (right + 1) % VOCAB_SIZE)
            drafts.append(Drafted(token_ids, [100] * len(token_ids)))
        depth = max(len(item.records) for item in turn.items)
        self.spent_ms += depth * self.pass_ms
        return HeadResult(drafts, [(num_rows, self.pass_ms), *[(len(turn.items), self.pass_ms)] * (depth - 1)])
