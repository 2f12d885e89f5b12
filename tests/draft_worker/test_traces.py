"""Traces of whole runs of the draft worker's scheduler (`traces/scheduler_*.txt`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draft_worker.limits import DraftLimits
from draft_worker.messages import (
    Action,
    AttachmentRefused,
    AttachSession,
    CommitReceived,
    DetachSession,
    Event,
    LinkOpened,
    SendHints,
    StepItem,
    Subscribe,
)
from draft_worker.scheduler import DraftScheduler
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.hints.hint_tree import Hint
from outrider.sampling_params import SamplingParams
from tests.draft_worker.fakes import VOCAB_SIZE, FakeDraftModel
from tests.golden import check_trace
from tests.target_worker.fakes import next_token

TRACES = Path(__file__).parent / "traces"
ALIGNMENT = 120
"""The number of continuations, out of 256, that the fake draft model guesses correctly."""


class Run:
    """A scheduler whose every event and decision is written down. All sessions are at one target, `t:1`."""

    def __init__(self, **limits: Any) -> None:
        chosen: dict[str, Any] = {
            "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 24, "max_nodes": 10, "max_lookahead": 4,
            "max_alternatives": 1, "max_nodes_per_step": 2, "max_chain_nodes": 0,
        }  # fmt: skip
        self.scheduler = DraftScheduler(DraftLimits(**(chosen | limits)), BlockAllocator(40, 4), VOCAB_SIZE)
        self.model = FakeDraftModel(160, ALIGNMENT, num_children=2)
        self.lines: list[str] = []

    def take(self, event: Event) -> None:
        self._write(told_event(event), self.scheduler.handle(event))

    def attach(self, session_id: str, token_ids: Sequence[int] = (1, 2, 3)) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=20)
        self.take(AttachSession(session_id, 1, "t:1", list(token_ids), sampling, 0))

    def commit(self, session_id: str, *token_ids: int, from_len: int = 3, **fields: Any) -> None:
        self.take(
            CommitReceived(
                session_id,
                from_len,
                list(token_ids),
                **({"accepts_hints": True, "is_finished": False} | fields),
            )
        )

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            step = self.scheduler.next_step()
            if step is None:
                self._write("nothing to grow")
                continue
            moves = [f"moves {len(move.source_slots)} KV entries" for move in step.moves]
            self._write("step: " + "; ".join([*moves, *map(self._told_item, step.items)]))
            self._write("step ended", self.scheduler.finish_step(step, self.model.run(step)))

    def check(self, name: str, title: str) -> None:
        """Compares the trace with `traces/scheduler_NAME.txt`."""
        check_trace(TRACES / f"scheduler_{name}.txt", "\n".join([title, "", *self.lines, ""]))

    def _told_item(self, item: StepItem) -> str:
        if item.paths is None:
            return f"{item.session_id} feeds {len(item.token_ids)} committed tokens"
        nodes = zip(item.node_ids, item.token_ids, strict=True)
        return f"{item.session_id} feeds " + ", ".join(f"node {node} ({token})" for node, token in nodes)

    def _write(self, what: str, actions: Sequence[Action] = ()) -> None:
        self.lines += [what, *(f"    -> {told_action(action)}" for action in actions)]


def told_event(event: Event) -> str:
    match event:
        case AttachSession():
            return f"AttachSession {event.session_id}: {len(event.token_ids)} tokens, target {event.target_address}"
        case CommitReceived():
            tokens = " ".join(map(str, event.token_ids)) or "no tokens"
            state = "finished" if event.is_finished else "accepts hints" if event.accepts_hints else "paused"
            return f"CommitReceived {event.session_id} from {event.from_len}: {tokens}, {state}"
        case LinkOpened():
            return f"LinkOpened to {event.target_address}"
        case DetachSession():
            return f"DetachSession {event.session_id}"


def told_action(action: Action) -> str:
    what = f"{type(action).__name__} {action.session_id}"
    match action:
        case AttachmentRefused():
            return f"{what}: {type(action.error).__name__}, {action.error.message}"
        case Subscribe():
            return f"{what}: knows {action.known_len} tokens"
        case SendHints():
            urgency = "urgent" if action.is_urgent else "may be gathered"
            return f"{what} below {action.base_len} tokens: {', '.join(map(told_hint, action.hints))}; {urgency}"
        case _:
            return what


def told_hint(hint: Hint) -> str:
    return f"{hint.parent_id}-{hint.node_id} ({hint.token_id})"


def truth(num_tokens: int) -> list[int]:
    """The target's next tokens after 1, 2, 3."""
    path = [1, 2, 3]
    for _ in range(num_tokens):
        path.append(next_token(path))
    return path[3:]


def test_a_tree_grows_and_follows_the_commits() -> None:
    run = Run()
    run.attach("a")
    run.step(4)
    run.commit("a", *truth(1))
    run.step(2)
    run.commit("a", *truth(2)[1:], from_len=4)
    run.step(2)
    run.commit("a", from_len=5, is_finished=True)
    run.check(
        "grows",
        "A tree grows where tokens are likeliest; its cursor follows two commits. Hints: parent-node (token).",
    )


def test_a_token_outside_the_tree_plants_a_new_one() -> None:
    run = Run()
    run.attach("a")
    run.step(3)
    run.commit("a", 4)
    run.step(3)
    run.check(
        "replanted",
        "A committed token is not in the tree: it is dropped, and a new one is planted below that token.",
    )


def test_a_paused_session_rests_and_sends_its_tree_again() -> None:
    run = Run()
    run.attach("a")
    run.step(2)
    run.commit("a", *truth(1), accepts_hints=False)
    run.step()
    run.commit("a", from_len=4)
    run.step()
    run.check(
        "paused",
        "The target accepts no hints for a while; when it does again, it gets the whole tree, below a new root.",
    )


def test_a_missed_commit_and_a_new_link_start_over() -> None:
    run = Run()
    run.attach("a")
    run.step(2)
    run.commit("a", *truth(3)[2:], from_len=5)
    run.commit("a", *truth(3))
    run.step()
    run.take(LinkOpened("t:1"))
    run.check(
        "link",
        "A missed commit is asked for again; when the link was opened anew, everything is sent again.",
    )


def test_sessions_share_a_step_and_the_third_is_refused() -> None:
    run = Run()
    run.attach("a")
    run.attach("b", [3, 2, 1, 0, 3, 2, 1, 0, 2])
    run.attach("c")
    run.attach("a")
    run.step(5)
    run.take(DetachSession("a", 1))
    run.step()
    run.check(
        "shared",
        "Two sessions share the steps, prompts in chunks and the likeliest nodes first; there is no slot for a third.",
    )
