"""SGLang's decode batches: the form of hints that SGLang verifies, and the life of its requests, without SGLang."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.engines.engine_hints import EngineHints
from outrider.engines.frames import FrameKind
from outrider.engines.hinted_requests import HintedRequests
from outrider.engines.sglang.batches import PADDING, BatchHints, chain_masks, chains
from outrider.hints.hint_tree import Hint
from outrider.hints.hint_wire import HintEncoder
from protos.outrider.v1 import draft_pb2, hints_pb2

VOCAB_SIZE = 100
WIDTH = 6
EOS = 99


def next_token(token_ids: list[int]) -> int:
    return (31 * sum(token_ids[-3:]) + len(token_ids)) % EOS


def continuation(token_ids: list[int], num_tokens: int) -> list[int]:
    found = list(token_ids)
    for _ in range(num_tokens):
        found.append(next_token(found))
    return found[len(token_ids) :]


@pytest.mark.parametrize("num_hints", range(WIDTH))
def test_a_mask_row_has_the_token_and_its_ancestors(num_hints: int) -> None:
    """As SGLang's n-gram cache builds masks: each row is its parent's, and itself."""
    tokens = chains([7, 8], [list(range(1, num_hints + 1)), []], WIDTH).reshape(2, WIDTH)
    masks = chain_masks(2, WIDTH).reshape(2, WIDTH, WIDTH)
    for mask in masks:
        for node in range(WIDTH):
            expected = np.zeros(WIDTH, dtype=np.int64) if node == 0 else mask[node - 1].copy()
            expected[node] = 1
            assert mask[node].tolist() == expected.tolist()
    assert tokens[0].tolist() == [7, *range(1, num_hints + 1), *[PADDING] * (WIDTH - 1 - num_hints)]
    assert tokens[1].tolist() == [8, *[PADDING] * (WIDTH - 1)]
    assert tokens.dtype == masks.dtype == np.int64


def test_no_two_drafts_stand_at_one_position() -> None:
    """SGLang's sampler adds up the probabilities of such drafts, so that equal ones would be accepted too often."""
    mask = chain_masks(1, WIDTH).reshape(WIDTH, WIDTH)
    assert sorted(mask.sum(axis=1)) == list(range(1, WIDTH + 1))


def request(rid: str, prompt: list[int], **changes: Any) -> SimpleNamespace:
    params = SimpleNamespace(
        max_new_tokens=500, min_new_tokens=0, stop_token_ids=None, ignore_eos=False, temperature=1.0, top_k=1,
        beam_width=None, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, custom_params=None,
    )  # fmt: skip
    made = SimpleNamespace(
        rid=rid, origin_input_ids_unpadded=array("q", prompt), output_ids=array("q"), multimodal_inputs=None,
        input_embeds=None, session=None, eos_token_ids={EOS}, tokenizer=None, cache_salt=None, extra_key=None,
        sampling_params=params, is_finished=False,
    )  # fmt: skip
    made.finished = lambda: made.is_finished
    for name, value in changes.items():
        setattr(params if hasattr(params, name) else made, name, value)
    return made


class Link:
    """A hint server that keeps what it is told, and checks it."""

    is_open = True
    is_busy = False

    def __init__(self) -> None:
        self.frames: list[hints_pb2.HintFrame] = []
        self.open_: dict[int, list[int]] = {}
        self.sessions: dict[int, str] = {}
        self.ended: dict[int, list[int]] = {}

    def open(self, now: float) -> bool:
        return False

    def flush(self, now: float) -> None:
        pass

    def close(self) -> None:
        self.is_open = False

    def receive(self, now: float) -> list[tuple[hints_pb2.HintFrame, float]]:
        frames, self.frames = self.frames, []
        return [(frame, now) for frame in frames]

    def send(self, kind: FrameKind, body: bytes, number: int = 0) -> None:
        if kind is FrameKind.OPEN:
            message = draft_pb2.AttachRequest.FromString(body)
            self.open_[number], self.sessions[number] = list(message.token_ids), message.session_id
            return
        for commit in hints_pb2.CommitFrame.FromString(body).commits:
            assert commit.from_len == len(self.open_[commit.channel]), "commits have no gaps and no overlaps"
            self.open_[commit.channel] += commit.token_ids
            if commit.is_finished:
                self.ended[commit.channel] = self.open_.pop(commit.channel)

    def hint(self, number: int, token_ids: list[int]) -> None:
        """Hints after all that is known of a request."""
        frame = hints_pb2.HintFrame()
        frame.subscribe.add(channel=number, attachment=1)
        message = hints_pb2.HintNodes(channel=number)
        nodes = [Hint(index + 1, index, token_id, None, 120) for index, token_id in enumerate(token_ids)]
        HintEncoder().encode(message, len(self.open_[number]), nodes)
        frame.nodes.append(message)
        self.frames.append(frame)


@dataclass
class Engine:
    """SGLang's order of events. With overlap a step's tokens reach `output_ids` one step later."""

    has_overlap: bool = False
    link: Link = field(default_factory=Link)
    running: list[SimpleNamespace] = field(default_factory=list)
    latest: dict[str, list[int]] = field(default_factory=dict)
    num_accepted: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        requests = HintedRequests(VOCAB_SIZE, may_pause=False, has_fixed_width=True)
        self.hints = EngineHints(requests, self.link)  # type: ignore[arg-type]
        self.batches = BatchHints(self.hints, WIDTH)

    def prefill(self, *requests: SimpleNamespace) -> None:
        self.batches.prefill(requests)
        for each in requests:
            self._take(each, [next_token([*each.origin_input_ids_unpadded, *each.output_ids])])
        self.running += requests

    def _take(self, each: SimpleNamespace, token_ids: list[int]) -> None:
        if self.has_overlap:
            each.output_ids.extend(self.latest.pop(each.rid, []))
            self.latest[each.rid] = token_ids
        else:
            each.output_ids.extend(token_ids)

    def text(self, each: SimpleNamespace) -> list[int]:
        return [*each.origin_input_ids_unpadded, *each.output_ids, *self.latest.get(each.rid, [])]

    def step(self) -> dict[str, list[int]]:
        latest = [self.latest.get(each.rid, []) if self.has_overlap else [] for each in self.running]
        hints = self.batches.choose(self.running, latest)
        rows = chains([self.text(each)[-1] for each in self.running], hints, WIDTH).reshape(-1, WIDTH)
        self.num_steps += 1
        for each, row in zip(self.running, rows.tolist(), strict=True):
            text, new = self.text(each), list[int]()
            for draft in row[1:]:
                new.append(next_token([*text, *new]))
                if new[-1] != draft:
                    break
            else:
                new.append(next_token([*text, *new]))
            self.num_accepted += len(new) - 1
            self._take(each, new)
        return {each.rid: own for each, own in zip(self.running, hints, strict=True)}

    def finish(self, each: SimpleNamespace) -> None:
        self.running.remove(each)
        each.is_finished = True
        self.latest.pop(each.rid, None)
        self.batches.close(each.rid)

    def retract(self, each: SimpleNamespace) -> None:
        self.running.remove(each)
        each.output_ids.extend(self.latest.pop(each.rid, []))


@pytest.fixture(params=[False, True], ids=["one after the other", "overlap"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(has_overlap=request.param)


def test_a_request_is_announced_when_its_prefill_begins(engine: Engine) -> None:
    engine.batches.prefill([request("a", [1, 2, 3])])
    assert list(engine.link.open_.values()) == [[1, 2, 3]]
    assert engine.link.sessions[1].startswith("sglang-")


def test_right_hints_are_accepted_and_told(engine: Engine) -> None:
    one = request("a", [1, 2, 3])
    engine.prefill(one)
    engine.link.hint(1, continuation([1, 2, 3], 5))
    assert engine.step() == {"a": continuation([1, 2, 3], 5)[1:]}, "the first of them was the prefill's own token"
    assert engine.text(one) == [1, 2, 3, *continuation([1, 2, 3], 6)]
    engine.step()
    assert engine.link.open_[1] == [1, 2, 3, *continuation([1, 2, 3], 6)], "commits are told when the next step begins"


def test_all_hints_that_fit_are_verified_because_none_costs_any(engine: Engine) -> None:
    one = request("a", [1, 2, 3])
    engine.prefill(one)
    for _ in range(10):
        engine.step()
        engine.link.hint(1, continuation(engine.link.open_[1], 30))
        assert len(engine.step()["a"]) == WIDTH - 1


def test_a_hint_that_ends_the_sequence_is_not_verified(engine: Engine) -> None:
    one = request("a", [1, 2, 3])
    engine.prefill(one)
    engine.link.hint(1, [*continuation([1, 2, 3], 2), EOS, 5])
    assert engine.step() == {"a": continuation([1, 2, 3], 2)[1:]}


def test_a_request_that_ends_is_told_once(engine: Engine) -> None:
    one, other = request("a", [1, 2, 3]), request("b", [4, 5])
    engine.prefill(one, other)
    engine.step()
    engine.finish(one)
    engine.step()
    engine.batches.close("a")
    assert list(engine.link.ended) == [1]
    assert len(engine.batches) == 1


def test_one_that_ends_at_its_first_token_is_closed_by_the_next_batch(engine: Engine) -> None:
    """SGLang says nothing of these: the end of token at once, and an abort between two chunks of a prompt."""
    one, other = request("a", [1, 2, 3]), request("b", [4, 5])
    engine.prefill(other)
    engine.batches.prefill([one])
    one.is_finished = True
    engine.step()
    assert list(engine.link.ended) == [2]


def test_a_prompt_in_chunks_stays_open_while_others_decode(engine: Engine) -> None:
    one, other = request("a", [1, 2, 3]), request("b", [4, 5])
    engine.prefill(other)
    engine.batches.prefill([one])
    engine.step()
    engine.batches.prefill([one])
    engine.step()
    assert sorted(engine.link.open_) == [1, 2]
    engine.prefill(one)
    engine.link.hint(2, continuation([1, 2, 3], 4))
    assert engine.step()["a"] == continuation([1, 2, 3], 4)[1:]


@pytest.mark.parametrize("is_reset", [False, True], ids=["goes on", "begins anew"])
def test_a_retracted_request_is_a_new_session_when_it_comes_back(engine: Engine, *, is_reset: bool) -> None:
    one, other = request("a", [1, 2, 3]), request("b", [4, 5])
    engine.prefill(one, other)
    engine.step()
    engine.step()
    engine.retract(one)
    engine.step()
    assert list(engine.link.ended) == [1]
    if is_reset:
        one.output_ids = array("q")
    engine.prefill(one)
    engine.step()
    engine.step()
    (number,) = set(engine.link.open_) - {2}
    assert engine.link.open_[number] == engine.text(one)[: len(engine.link.open_[number])]
    assert engine.link.sessions[number] != engine.link.sessions[1]


def test_a_request_of_the_same_name_is_another_one(engine: Engine) -> None:
    engine.prefill(request("a", [1, 2, 3]))
    engine.step()
    engine.running.clear()
    engine.latest.clear()
    again = request("a", [9, 9])
    engine.running = [again]
    engine._take(again, [next_token([9, 9])])
    engine.step()
    engine.step()
    assert list(engine.link.ended) == [1]
    assert engine.link.open_[2][:2] == [9, 9]


@pytest.mark.parametrize(
    "changes",
    [
        {"multimodal_inputs": object()},
        {"input_embeds": [[0.1]]},
        {"session": object()},
        {"beam_width": 4},
        {"max_new_tokens": 1},
        {"custom_params": {"outrider_hints": 0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_wants_no_hints_is_not_announced_and_decodes(engine: Engine, changes: dict[str, Any]) -> None:
    one = request("a", [1, 2, 3], **changes)
    engine.prefill(one)
    for _ in range(3):
        assert engine.step() == {"a": []}
    assert not engine.link.open_
    assert engine.text(one)[:3] == [1, 2, 3]


def test_a_request_may_ask_for_fewer_hints(engine: Engine) -> None:
    engine.prefill(request("a", [1, 2, 3], custom_params={"outrider_hints": 2}))
    engine.link.hint(1, continuation([1, 2, 3], 9))
    assert len(engine.step()["a"]) == 2


def test_without_hints_the_engine_goes_on(engine: Engine) -> None:
    one = request("a", [1, 2, 3])
    engine.prefill(one)
    engine.step()
    engine.hints.turn_off()
    engine.prefill(request("b", [4]))
    for _ in range(3):
        assert set(map(tuple, engine.step().values())) == {()}
    assert engine.text(one) == [1, 2, 3, *continuation([1, 2, 3], len(engine.text(one)) - 3)]


def test_a_draft_whose_hints_are_never_accepted_is_paused() -> None:
    link = Link()
    requests = HintedRequests(VOCAB_SIZE, has_fixed_width=True)
    engine = Engine()
    engine.link, engine.batches = link, BatchHints(EngineHints(requests, link), WIDTH)  # type: ignore[arg-type]
    engine.prefill(request("a", [1, 2, 3]))
    link.hint(1, [0] * 3)  # once a draft worker has sent something, it is told of each step
    fed = []
    for _ in range(200):
        text = engine.text(engine.running[0])
        if text == link.open_[1]:
            link.hint(1, [(next_token(text) + 1) % EOS] * 3)
        fed.append(len(engine.step()["a"]))
        engine.batches.choose(engine.running, [[]])  # what the step committed is told
    assert requests._requests["a"].intake.is_paused


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_texts_and_commits_are_right(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    retracted: list[SimpleNamespace] = []
    for turn in range(150):
        if len(engine.running) < 4 and rng.random() < 0.3:
            engine.prefill(request(f"r{turn}", [rng.randrange(EOS) for _ in range(rng.randint(1, 6))]))
        if retracted and rng.random() < 0.3:
            engine.prefill(retracted.pop())
        if not engine.running:
            continue
        for number in list(engine.link.open_):
            if rng.random() < 0.6:
                hints = continuation(engine.link.open_[number], rng.randint(1, 9))
                if rng.random() < 0.4:
                    hints[rng.randrange(len(hints))] = rng.randrange(EOS)
                engine.link.hint(number, hints)
        engine.step()
        for each in list(engine.running):
            prompt = list(each.origin_input_ids_unpadded)
            text = engine.text(each)
            assert text == [*prompt, *continuation(prompt, len(text) - len(prompt))]
            if rng.random() < 0.05:
                engine.finish(each)
            elif rng.random() < 0.05:
                engine.retract(each)
                retracted.append(each)
        engine.batches.prefill([])
        assert len(engine.link.open_) >= len(engine.running)
        for token_ids in engine.link.open_.values():
            assert any(token_ids == engine.text(each)[: len(token_ids)] for each in [*engine.running, *retracted])
    assert engine.hints.is_on
    assert engine.num_accepted > engine.num_steps / 10
