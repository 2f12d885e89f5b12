"""Which hints an engine's next step verifies: none that are stale, no more than permitted, and zero where it pays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from outrider.engines.hinted_requests import Fed, HintedRequests
from outrider.hints.hint_tree import Hint
from outrider.hints.hint_wire import HintEncoder
from protos.outrider.v1 import draft_pb2, hints_pb2

VOCAB_SIZE = 100
NUM_HINTS = 7
STOP = 99


def next_token(token_ids: list[int]) -> int:
    """The next token of the engine's model: a function of everything before."""
    return (31 * sum(token_ids[-3:]) + len(token_ids)) % STOP


def continuation(token_ids: list[int], num_tokens: int) -> list[int]:
    found = list(token_ids)
    for _ in range(num_tokens):
        found.append(next_token(found))
    return found[len(token_ids) :]


def nodes(
    number: int, base_len: int, token_ids: list[int], *, first_id: int = 1, confidence: int = 120
) -> hints_pb2.HintNodes:
    """A chain of hints below the root at `base_len`."""
    hints = [
        Hint(first_id + index, first_id + index - 1 if first_id + index > 1 else 0, token_id, None, confidence)
        for index, token_id in enumerate(token_ids)
    ]
    message = hints_pb2.HintNodes(channel=number)
    HintEncoder().encode(message, base_len, hints)
    return message


@dataclass
class Engine:
    """An engine of which a step costs `fixed_ms`, and `token_ms` per token fed."""

    requests: HintedRequests = field(default_factory=lambda: HintedRequests(VOCAB_SIZE, may_pause=False))
    texts: dict[str, list[int]] = field(default_factory=dict)
    fixed_ms: float = 10.0
    token_ms: float = 0.5
    now: float = 0.0
    num_steps: int = 0
    told: dict[int, list[int]] = field(default_factory=dict)  # what the hint server knows, by number
    is_paused: dict[int, bool] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def open(self, request_id: str, prompt: list[int], *, is_sampled: bool = False, is_always: bool = False) -> int:
        self.texts[request_id] = list(prompt)
        announcement = draft_pb2.AttachRequest(session_id=request_id)
        announcement.speculation.always = is_always
        self.requests.open(request_id, self.texts[request_id], announcement, frozenset({STOP}), is_sampled=is_sampled)
        self.exchange()
        return max(self.told)

    def exchange(self) -> None:
        """Takes what the hint server is told, and checks it as that would."""
        for number, announcement in self.requests.announcements():
            self.told[number] = list(announcement.token_ids)
        frame = self.requests.take_commits()
        for commit in frame.commits if frame is not None else ():
            assert commit.from_len == len(self.told[commit.channel]), "commits have no gaps and no overlaps"
            assert commit.num_held_hints <= commit.num_tried_hints
            self.told[commit.channel] += commit.token_ids
            self.is_paused[commit.channel] = commit.is_paused
            if commit.is_finished:
                self.finished.add(commit.channel)

    def step(self, limit: int = NUM_HINTS, budget: int = 1000) -> dict[str, int]:
        """Runs a step; returns the hints that it fed by request."""
        chosen = self.requests.choose(dict.fromkeys(self.texts, limit), len(self.texts), budget)
        num_tokens = len(self.texts)
        for request_id, text in self.texts.items():
            for hint in chosen.get(request_id, []):
                num_tokens += 1
                expected = next_token(text)
                if hint != expected:
                    break
                text.append(expected)
            text.append(next_token(text))
        step_ms = self.fixed_ms + self.token_ms * num_tokens
        self.now += step_ms / 1e3
        self.num_steps += 1
        fed = [Fed(request_id, len(chosen.get(request_id, []))) for request_id in self.texts]
        num_fed = len(self.texts) + sum(each.num_hints for each in fed)
        self.requests.finish_step(fed, num_fed, step_ms, self.now, only_decodes=True)
        self.exchange()
        return {each.request_id: each.num_hints for each in fed}

    def hint(self, number: int, base_len: int, token_ids: list[int], *, attachment: int = 1) -> None:
        frame = hints_pb2.HintFrame(nodes=[nodes(number, base_len, token_ids)])
        frame.subscribe.add(channel=number, attachment=attachment)
        self.requests.take(frame, self.now)
        self.exchange()


class TestHints:
    def test_right_hints_are_accepted_and_reported(self) -> None:
        engine = Engine()
        number = engine.open("a", [1, 2, 3])
        engine.hint(number, 3, continuation([1, 2, 3], 5))
        assert engine.step() == {"a": 5}
        assert engine.texts["a"] == [1, 2, 3, *continuation([1, 2, 3], 6)]
        assert engine.told[number] == engine.texts["a"]

    @pytest.mark.parametrize("num_right", range(5))
    def test_text_is_the_same_whatever_the_hints_say(self, num_right: int) -> None:
        engine = Engine()
        number = engine.open("a", [1, 2, 3])
        right = continuation([1, 2, 3], num_right)
        wrong = [(token_id + 1) % STOP for token_id in continuation([1, 2, 3, *right], 5 - num_right)]
        engine.hint(number, 3, right + wrong)
        engine.step()
        assert engine.texts["a"] == [1, 2, 3, *continuation([1, 2, 3], num_right + 1)]

    def test_what_lies_beyond_accepted_hints_is_verified_next(self) -> None:
        engine = Engine()
        number = engine.open("a", [1, 2, 3])
        engine.hint(number, 3, continuation([1, 2, 3], 9))
        assert engine.step(limit=3) == {"a": 3}
        assert engine.step(limit=7) == {"a": 5}, "of nine hints four are committed: the last token matched, too"

    def test_stale_hints_are_dropped(self) -> None:
        engine = Engine()
        number = engine.open("a", [1, 2, 3])
        engine.hint(number, 3, [(next_token([1, 2, 3]) + 1) % STOP, 5, 6])
        engine.step()
        assert engine.step() == {"a": 0}

    def test_after_a_new_hint_server_attachments_count_anew(self) -> None:
        engine = Engine()
        number = engine.open("a", [1, 2, 3])
        engine.hint(number, 3, continuation([1, 2, 3], 2), attachment=9)
        engine.requests.disconnect()
        engine.told.clear()
        assert engine.step() == {"a": 0}
        assert engine.told == {number: engine.texts["a"]}
        engine.hint(number, 4, continuation(engine.texts["a"], 4), attachment=1)
        assert engine.step() == {"a": 4}

    def test_a_hint_that_ends_the_sequence_is_not_fed(self) -> None:
        engine = Engine()
        number = engine.open("a", [1, 2, 3])
        engine.hint(number, 3, [*continuation([1, 2, 3], 2), STOP, 5])
        assert engine.step() == {"a": 2}

    def test_limits_hold(self) -> None:
        engine = Engine(token_ms=0.01)
        numbers = {name: engine.open(name, [index, 2, 3]) for index, name in enumerate("abcd")}
        for index, name in enumerate("abcd"):
            engine.hint(numbers[name], 3, continuation([index, 2, 3], 20))
        chosen = engine.requests.choose({"a": 3, "b": 0, "c": -1, "d": 7, "unknown": 7}, 4, 8)
        assert set(chosen) <= {"a", "d"}
        assert len(chosen["a"]) <= 3
        assert sum(map(len, chosen.values())) == 8
        assert engine.requests.choose({"a": 3}, 4, -1) == {}


class TestNumberOfHints:
    def test_hints_that_are_never_accepted_are_not_fed_any_more(self) -> None:
        engine = Engine(HintedRequests(VOCAB_SIZE), token_ms=5.0)
        number = engine.open("a", [1, 2, 3])
        fed = []
        for _ in range(150):
            text = engine.texts["a"]
            engine.hint(number, len(text), [(next_token(text) + 1) % STOP, 1, 1, 1])
            fed.append(engine.step()["a"])
        assert max(fed) > 0
        assert sum(fed[-100:]) < 10

    def test_where_a_token_costs_nothing_all_are_fed(self) -> None:
        engine = Engine(token_ms=0.0)
        number = engine.open("a", [1, 2, 3])
        for _ in range(30):
            text = engine.texts["a"]
            engine.hint(number, len(text), continuation(text, NUM_HINTS))
            fed = engine.step()["a"]
        assert fed == NUM_HINTS

    def test_the_batch_pauses_where_hints_do_not_pay(self) -> None:
        """Hints that are right, on a machine where every hint costs as much as a token."""
        engine = Engine(HintedRequests(VOCAB_SIZE), fixed_ms=0.5, token_ms=10.0)
        number = engine.open("a", [1, 2, 3])
        rng = random.Random(1)
        for _ in range(400):
            text = engine.texts["a"]
            right = continuation(text, NUM_HINTS)
            if rng.random() < 0.6:
                right[0] = (right[0] + 1) % STOP
            if not engine.is_paused.get(number, False):
                engine.hint(number, len(text), right)
            engine.step()
        assert engine.is_paused[number]

    def test_a_request_that_always_speculates_verifies_all_hints_and_teaches_nothing(self) -> None:
        engine = Engine(HintedRequests(VOCAB_SIZE), fixed_ms=0.5, token_ms=10.0)
        number = engine.open("a", [1, 2, 3], is_always=True)
        for _ in range(300):
            text = engine.texts["a"]
            wrong = (next_token(text) + 1) % STOP
            engine.hint(number, len(text), [wrong, 1, 1, 1])
            assert engine.step() == {"a": 4}
        assert not engine.is_paused.get(number, False)
        assert engine.requests.speed is None

    def test_the_batch_accepts_hints_where_they_pay(self) -> None:
        engine = Engine(HintedRequests(VOCAB_SIZE))
        number = engine.open("a", [1, 2, 3])
        for _ in range(300):
            text = engine.texts["a"]
            if not engine.is_paused.get(number, False):
                engine.hint(number, len(text), continuation(text, NUM_HINTS))
            engine.step()
        assert not engine.is_paused[number]
        assert (engine.requests.speed or 0.0) > 1.5


class TestWait:
    """A draft worker whose hints come a while after the tokens that they follow."""

    def run(self, engine: Engine, delay_s: float, *, num_steps: int = 100) -> list[float]:
        """Runs steps; returns the wait before each, seconds."""
        number, waits = engine.open("a", [1, 2, 3]), []
        under_way: list[tuple[float, list[int]]] = []  # when hints come, and what they follow

        def deliver() -> None:
            while under_way and under_way[0][0] <= engine.now:
                at, text = under_way.pop(0)
                frame = hints_pb2.HintFrame(nodes=[nodes(number, len(text), continuation(text, NUM_HINTS))])
                frame.subscribe.add(channel=number, attachment=1)
                engine.requests.take(frame, at)
                engine.exchange()

        for _ in range(num_steps):
            began = engine.now
            under_way.append((began + delay_s, list(engine.texts["a"])))
            while (until := engine.requests.wait_until({"a": NUM_HINTS}, 1, engine.now)) is not None:
                engine.now = min(until, under_way[0][0]) if under_way else until
                deliver()
            waits.append(engine.now - began)
            engine.step()
            deliver()
        return waits

    def test_hints_that_come_soon_are_waited_for(self) -> None:
        engine = Engine(HintedRequests(VOCAB_SIZE, may_pause=False, hint_wait_ms=10.0))
        waits = self.run(engine, 0.002)
        assert waits[-50:] == [pytest.approx(0.002)] * 50
        assert len(engine.texts["a"]) > 400, "each step commits several tokens"

    def test_hints_that_come_late_are_not(self) -> None:
        engine = Engine(HintedRequests(VOCAB_SIZE, may_pause=False, hint_wait_ms=1000.0))
        waits = self.run(engine, 0.3, num_steps=200)
        assert waits[-100:] == [0.0] * 100

    @pytest.mark.parametrize("hint_wait_ms", [0.0, 1.0])
    def test_the_bound_holds(self, hint_wait_ms: float) -> None:
        engine = Engine(HintedRequests(VOCAB_SIZE, may_pause=False, hint_wait_ms=hint_wait_ms))
        assert max(self.run(engine, 0.002)) <= hint_wait_ms / 1e3 + 1e-9

    def test_nobody_is_waited_for_who_has_sent_nothing(self) -> None:
        engine = Engine(HintedRequests(VOCAB_SIZE, may_pause=False, hint_wait_ms=10.0))
        number = engine.open("a", [1, 2, 3])
        assert engine.requests.wait_until({"a": NUM_HINTS}, 1, 0.0) is None
        frame = hints_pb2.HintFrame()
        frame.subscribe.add(channel=number, attachment=1)
        engine.requests.take(frame, 0.0)
        for _ in range(20):
            assert engine.requests.wait_until({"a": NUM_HINTS}, 1, engine.now) is None
            engine.step()


class TestLife:
    def test_the_hint_server_is_told_of_the_end_once(self) -> None:
        engine = Engine()
        number = engine.open("a", [1, 2, 3])
        engine.step()
        del engine.texts["a"]
        engine.requests.close("a")
        engine.requests.close("a")
        engine.exchange()
        assert engine.finished == {number}
        assert len(engine.requests) == 0

    def test_one_that_wants_no_hints_is_not_announced(self) -> None:
        requests = HintedRequests(VOCAB_SIZE)
        requests.open("a", [1, 2], None, frozenset(), is_sampled=False)
        assert list(requests.announcements()) == []
        requests.finish_step([Fed("a", 0)], 1, 1.0, 1.0, only_decodes=True)
        requests.close("a")
        assert requests.take_commits() is None

    def test_numbers_are_not_given_twice(self) -> None:
        engine = Engine()
        first = engine.open("a", [1])
        del engine.texts["a"]
        engine.requests.close("a")
        assert engine.open("b", [1]) > first


@pytest.mark.parametrize("seed", range(30))
def test_whatever_a_draft_worker_sends_the_text_stays_and_nothing_is_raised(seed: int) -> None:
    """Random hints, right and wrong, for open, ended and unknown requests, with disconnections in between."""
    rng = random.Random(seed)
    engine = Engine(HintedRequests(VOCAB_SIZE, may_pause=bool(seed % 2)))
    prompts, numbers = {}, {}
    for turn in range(120):
        if len(engine.texts) < 4 and rng.random() < 0.3:
            name = f"request {turn}"
            prompts[name] = [rng.randrange(STOP) for _ in range(rng.randint(1, 5))]
            numbers[name] = engine.open(name, prompts[name], is_sampled=rng.random() < 0.5)
        if not engine.texts:
            continue
        for _ in range(rng.randrange(4)):
            engine.requests.take(random_frame(rng, engine, list(numbers.values())), engine.now)
            engine.exchange()
        limit = rng.randrange(NUM_HINTS + 1)
        assert max(engine.step(limit, budget=rng.randrange(20)).values()) <= limit
        for name, text in list(engine.texts.items()):
            assert text == [*prompts[name], *continuation(prompts[name], len(text) - len(prompts[name]))]
            assert engine.told[numbers[name]] == text
            if rng.random() < 0.05:
                del engine.texts[name]
                engine.requests.close(name)
        if rng.random() < 0.03:
            engine.requests.disconnect()
            engine.told.clear()
        engine.exchange()


def random_frame(rng: random.Random, engine: Engine, numbers: list[int]) -> hints_pb2.HintFrame:
    frame = hints_pb2.HintFrame()
    if rng.random() < 0.5:
        frame.subscribe.add(channel=rng.choice([*numbers, 77]), attachment=rng.randrange(5))
    if rng.random() < 0.2:
        frame.unsubscribe.append(rng.choice([str(rng.choice(numbers)), "x", "٣", "-1", "99999999999999999999"]))
    number = rng.choice([*numbers, 77])
    text = engine.told.get(number, [1])
    base_len = rng.choice([len(text), len(text), max(len(text) - 2, 0), len(text) + 3, 0])
    right = continuation(text[:base_len], rng.randint(1, 12)) if 0 < base_len <= len(text) else [1, 2]
    if rng.random() < 0.4:
        right[rng.randrange(len(right))] = rng.randrange(VOCAB_SIZE + 20)
    message = nodes(number, base_len, right, first_id=rng.choice([1, 1, 1, 3]))
    if rng.random() < 0.1:
        message.parent_ids.append(5)  # columns of different lengths
    if rng.random() < 0.1:
        message.support_sizes.append(3)
    frame.nodes.append(message)
    return frame
