"""A draft without a model that says whatever may do harm, within what a stream can carry.

Where tokens are the target's own choice (greedy, coupled) it may lie about everything. Under rejection sampling one
thing binds it, as it binds every draft (I5): a hint that carries a distribution was sampled from it. The distribution
itself may be anything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from draft_worker import messages as draft_messages
from draft_worker.memory.options import MemoryLimits
from draft_worker.memory.scheduler import MemoryScheduler
from outrider.hints.hint_tree import WEIGHT_TOTAL_MAX, DraftDistribution, Hint
from outrider.sampling_params import DecodingMode
from target_worker import messages as target_messages
from tests.exactness.in_process import (
    MEMORY_STREAM_ID,
    STREAM_ID,
    Draft,
    ModelDraft,
    Request,
    TinyModel,
    draft_of,
    hint,
    hints_arrived,
    subscription,
)


class HostileDraft:
    """Everything it does follows from `luck`."""

    def __init__(self, vocab_size: int, luck: int, *, is_memory: bool = False) -> None:
        """is_memory: whether it claims to be a memory worker."""
        self._is_memory = is_memory
        self._vocab_size = vocab_size
        self._rng = random.Random(luck)
        self._requests: dict[str, Request] = {}
        self._attachments: dict[str, int] = {}
        self._texts: dict[str, list[int]] = {}
        self._sent: dict[str, list[target_messages.HintsArrived]] = {}
        self._next_node_id = 1

    def attach(self, request: Request, known: Sequence[int]) -> list[target_messages.Event]:
        session_id = request.session_id
        self._requests[session_id] = request
        self._attachments[session_id] = self._attachments.get(session_id, 0) + 1
        self._texts[session_id] = list(known)
        self._sent[session_id] = []
        known_len = self._rng.choice([len(known), len(known), 0, len(known) + 50])
        return [subscription(session_id, known_len, is_memory=self._is_memory)]

    def hear(self, commit: target_messages.CommitPublished) -> list[target_messages.Event]:
        if commit.session_id in self._texts and commit.from_len <= len(self._texts[commit.session_id]):
            text = self._texts[commit.session_id]
            text[commit.from_len :] = commit.token_ids
        return []

    def detach(self, session_id: str) -> list[target_messages.Event]:
        del self._requests[session_id], self._attachments[session_id]
        del self._texts[session_id], self._sent[session_id]
        return []

    def run(self) -> list[target_messages.Event] | None:
        if not self._requests or self._rng.random() < 0.4:
            return None
        return [
            event for request in self._requests.values() if self._rng.random() < 0.8 for event in self._speak(request)
        ]

    def close(self) -> None:
        pass

    def _speak(self, request: Request) -> list[target_messages.Event]:
        text = self._texts[request.session_id]
        attachment = self._attachments[request.session_id]
        sent = self._sent[request.session_id]
        kind = self._rng.choices(
            ["tree", "wrong", "stale", "early", "again", "nonsense", "old", "anew"],
            [10, 3, 2, 1, 1, 2, 1, 2],
        )[0]
        base_len = len(text)
        match kind:
            case "again" if sent:
                return [self._rng.choice(sent)]
            case "stale":  # an older root, with what was committed since, or with something else
                base_len = self._rng.randint(1, len(text))
            case "early":
                base_len = self._rng.choice([0, len(text) + 1, len(text) + self._rng.randint(1, 9), 2**32 - 1])
            case "old":
                attachment = max(attachment - 1, 0)
            case "anew":
                self._attachments[request.session_id] = attachment = attachment + 1
        follow = kind != "wrong"
        hints = self._tree(request, text, base_len, follow=follow)
        if kind == "nonsense":
            hints = self._garbled(hints)
        match_len = self._rng.choice([0, 3, 24, 2**32 - 1]) if self._is_memory else 0
        told: dict[str, Any] = {"is_memory": self._is_memory, "match_len": match_len}
        messages = [hints_arrived(request.session_id, attachment, base_len, hints, **told)]
        if len(hints) > 2 and self._rng.random() < 0.3:  # in pieces, of which one may be lost
            cut = self._rng.randrange(1, len(hints))
            messages = [
                hints_arrived(request.session_id, attachment, base_len, part, **told)
                for part in (hints[:cut], hints[cut:])
                if self._rng.random() < 0.85
            ]
        self._sent[request.session_id] = [*sent[-3:], *messages]
        return list(messages)

    def _tree(self, request: Request, text: Sequence[int], base_len: int, *, follow: bool) -> list[Hint]:
        """A path of primary children with alternatives here and there, which have children of their own."""
        right = [*request.prompt, *request.right_text]
        hints: list[Hint] = []
        parents = [(0, base_len)]
        for _ in range(self._rng.choice([1, 3, 8, 20])):
            parent_id, position = parents[-1] if self._rng.random() < 0.7 else self._rng.choice(parents)
            known = text if position < len(text) else right
            if position < len(known) and follow and self._rng.random() < 0.85:
                token_id, distribution = known[position], None
                if position >= len(text) and request.sampling.decoding_mode is not DecodingMode.REJECTION:
                    distribution = self._distribution() if self._rng.random() < 0.1 else None
            else:
                token_id, distribution = self._guess(request, follow=follow)
            hints.append(hint(self._next_node_id, parent_id, token_id, distribution))
            parents.append((self._next_node_id, position + 1))
            self._next_node_id += 1
        if request.sampling.decoding_mode is not DecodingMode.REJECTION:  # where an order may follow from the tokens
            hints = [each._replace(is_promoted=self._rng.random() < 0.1) for each in hints]
        return hints

    def _guess(self, request: Request, *, follow: bool) -> tuple[int, DraftDistribution | None]:
        """A token, and most often what it was sampled from; outside rejection mode the latter may be a lie."""
        token_id = self._rng.randrange(self._vocab_size)
        if self._rng.random() < 0.25:
            return token_id, None
        distribution = self._distribution()
        if request.sampling.decoding_mode is DecodingMode.REJECTION or not follow:
            token_id = self._rng.choices(distribution.token_ids, distribution.weights)[0]
        return token_id, distribution

    def _distribution(self) -> DraftDistribution:
        """Anything that is well-formed: one token, all alike, one nearly certain, wild, with few entries."""
        size = self._rng.choice([1, 2, self._vocab_size, self._rng.randint(1, self._vocab_size)])
        token_ids = self._rng.sample(range(self._vocab_size), min(size, 64))
        weights = [1] * len(token_ids)
        kind = self._rng.choice(["flat", "sure", "wild"])
        if kind == "sure":
            weights[0] = 1000
        elif kind == "wild":
            weights = [1 + int(self._rng.paretovariate(0.6)) for _ in token_ids]
        return distribution_of(token_ids, weights)

    def _garbled(self, hints: list[Hint]) -> list[Hint]:
        """Cycles, gaps, parents that come after their children, ids used twice, the root's own id."""
        ids = [each.node_id for each in hints]
        garbled = []
        for each in hints:
            node_id, parent_id = each.node_id, each.parent_id
            match self._rng.randrange(8):
                case 0:
                    parent_id = node_id
                case 1:
                    parent_id = self._rng.choice(ids)
                case 2:
                    parent_id = node_id + 1000
                case 3:
                    node_id = self._rng.choice([0, *ids])
            garbled.append(hint(node_id, parent_id, each.token_id, each.distribution))
        if self._rng.random() < 0.3:
            self._rng.shuffle(garbled)
        return garbled


class LyingDraft(HostileDraft):
    """Breaks the one rule: it says the first token of its distributions and claims to have sampled it."""

    def _guess(self, request: Request, *, follow: bool) -> tuple[int, DraftDistribution | None]:
        distribution = self._distribution()
        return distribution.token_ids[0], distribution

    def _distribution(self) -> DraftDistribution:
        return distribution_of(range(self._vocab_size), [1] * self._vocab_size)


class MemoryDraft(ModelDraft):
    """A memory worker's scheduler: what one session was given is a hint for the next ones and those beside it."""

    is_memory = True

    def __init__(self, luck: int, max_num_seqs: int = 1024) -> None:
        self._scheduler = MemoryScheduler(MemoryLimits(max_num_seqs=max_num_seqs))
        self._rng = random.Random(luck)
        self._requests = {}

    def run(self) -> list[target_messages.Event] | None:
        return None

    def close(self) -> None:
        assert self._scheduler.num_sessions == 0

    def _handle(self, event: draft_messages.Event) -> list[target_messages.Event]:
        return self._events(self._scheduler.handle(event, 0.0))


class DraftAndMemory:
    """A draft worker and a memory worker beside it. Streams are cut and opened again, each for itself, and the memory
    is full at times."""

    def __init__(self, draft: ModelDraft, memory: MemoryDraft | HostileDraft, luck: int) -> None:
        self._workers: dict[int, ModelDraft | MemoryDraft | HostileDraft] = {STREAM_ID: draft, MEMORY_STREAM_ID: memory}
        self._rng = random.Random(luck)
        self._cut: set[int] = set()

    def _sent(self, stream_id: int, events: list[target_messages.Event] | None) -> list[target_messages.Event]:
        return [] if events is None or stream_id in self._cut else events

    def attach(self, request: Request, known: Sequence[int]) -> list[target_messages.Event]:
        order = self._rng.sample(list(self._workers.items()), len(self._workers))
        return [event for stream, worker in order for event in self._sent(stream, worker.attach(request, known))]

    def hear(self, commit: target_messages.CommitPublished) -> list[target_messages.Event]:
        stream = commit.stream_id
        return [] if stream in self._cut else self._sent(stream, self._workers[stream].hear(commit))

    def detach(self, session_id: str) -> list[target_messages.Event]:
        return [
            event for stream, each in self._workers.items() for event in self._sent(stream, each.detach(session_id))
        ]

    def run(self) -> list[target_messages.Event] | None:
        events = self._upset()
        for stream, worker in self._workers.items():
            found = worker.run()
            if found is not None:
                events = (events or []) + self._sent(stream, found)
        return events

    def _upset(self) -> list[target_messages.Event] | None:
        """Cuts a stream, or opens it again."""
        stream = self._rng.choice(list(self._workers))
        if stream in self._cut and self._rng.random() < 0.2:
            self._cut.discard(stream)
            worker = self._workers[stream]
            return worker.reopen() if isinstance(worker, ModelDraft) else None
        if stream not in self._cut and self._rng.random() < 0.01:
            self._cut.add(stream)
            return [target_messages.CloseStream(stream)]
        return None

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


def distribution_of(token_ids: Sequence[int], weights: Sequence[int]) -> DraftDistribution:
    """Proportional to `weights`, roughly where these add up to more than can travel."""
    total = sum(weights)
    if total > WEIGHT_TOTAL_MAX:
        room = WEIGHT_TOTAL_MAX - len(weights)
        weights = [1 + weight * room // total for weight in weights]
    return DraftDistribution(tuple(token_ids), tuple(weights))


DRAFTS = ("none", "good", "masks", "hostile", "self", "head", "memory", "good+memory", "good+hostile-memory")


def make_draft(name: str, target: TinyModel, luck: int) -> Draft | None:
    """None, one that is mostly right, the same with mask tokens, one that means harm, and other kinds of drafts."""
    match name:
        case "none":
            return None
        case "good":
            return ModelDraft(draft_of(target), luck)
        case "masks":
            return ModelDraft(draft_of(target), luck, mask_token_id=target.vocab_size - 1)
        case "self":
            return ModelDraft(target, luck)
        case "head":
            return ModelDraft(target, luck, is_head=True)
        case "memory":
            return MemoryDraft(luck)
        case "good+memory":
            memory = MemoryDraft(luck, max_num_seqs=1024 if luck % 4 else 4)  # full at times
            return DraftAndMemory(ModelDraft(draft_of(target), luck), memory, luck)
        case "good+hostile-memory":
            hostile = HostileDraft(target.vocab_size, luck, is_memory=True)
            return DraftAndMemory(ModelDraft(draft_of(target), luck), hostile, luck)
    return HostileDraft(target.vocab_size, luck)
