"""Tests of the nodes that a draft worker feeds next: of all sessions, those that are most likely to be reached."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.limits import DraftLimits
from draft_worker.messages import Action, AttachSession, CommitReceived, Expansion, SendHints, Step, StepItem
from draft_worker.runner import expand
from draft_worker.scheduler import DraftScheduler
from draft_worker.session import DraftSession
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.sampling.randomness import mix
from outrider.hints.confidence import Calibration, confidence_level
from outrider.hints.hint_tree import ROOT_ID, Hint
from outrider.sampling_params import SamplingParams

VOCAB_SIZE = 50
GREEDY = SamplingParams(temperature=0.0, max_tokens=900)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=900)
Text = tuple[int, ...]
Draft = Callable[[Text], Expansion]


def guess(text: Text) -> Expansion:
    """A primary child with some probability and up to three alternatives, all determined by the sequence; no two
    probabilities are equal."""
    value = 11
    for token_id in text:
        value = mix(value ^ (token_id + 1))
    token_ids = random.Random(value).sample(range(VOCAB_SIZE), 1 + value % 4)
    first = 0.3 + 0.65 * ((value >> 8) % 10_007) / 10_007
    chances, left = [first], 1.0 - first
    for _ in token_ids[1:]:
        chances.append(0.6 * left)
        left -= chances[-1]
    return Expansion(token_ids, chances, None)


def steady(primary: float, *alternatives: float) -> Draft:
    """A draft that gives the same probabilities everywhere."""
    chances = [primary, *alternatives]

    def draft(text: Text) -> Expansion:
        first = mix(len(text) + sum(text))
        return Expansion([(first + i) % VOCAB_SIZE for i in range(len(chances))], chances, None)

    return draft


class Garden:
    """A draft scheduler whose model is a function; it knows every chance by itself and checks every choice."""

    def __init__(self, draft: Draft = guess, num_sessions: int = 1, **limits: object) -> None:
        values: dict[str, object] = {"max_num_seqs": 40, "max_model_len": 500, "max_nodes_per_step": 3}
        self.limits = DraftLimits(**(values | limits))  # type: ignore[arg-type]
        self.scheduler = DraftScheduler(self.limits, BlockAllocator(40 * 90, 16), VOCAB_SIZE)
        self.drafts: dict[str, Draft] = {}
        self.sent: dict[str, list[Hint]] = {}  # in the last step
        self.num_fed: dict[str, int] = {}
        for number in range(num_sessions):
            self.attach(f"s{number}", (number + 1, 2), draft)

    def attach(self, name: str, text: Text, draft: Draft, sampling: SamplingParams = GREEDY) -> None:
        self.drafts[name] = draft
        self.num_fed[name] = 0
        self.scheduler.handle(AttachSession(name, 1, "target", list(text), sampling, 7))

    def session(self, name: str = "s0") -> DraftSession:
        found = self.scheduler.progress(name)
        assert found is not None
        return found

    @property
    def sessions(self) -> list[DraftSession]:
        return [self.session(name) for name in self.drafts]

    # What ought to be.

    def branch(self, session: DraftSession, node_id: int) -> Text:
        """The tokens of the branch from the cursor's child to a node."""
        said: list[int] = []
        while node_id != session.cursor:
            said.append(session.nodes[node_id].hint.token_id)
            node_id = session.nodes[node_id].hint.parent_id
        return tuple(reversed(said))

    def reach(self, session: DraftSession, branch: Text) -> float:
        """The probability that the sequence continues with this branch."""
        chance, text = 1.0, tuple(session.token_ids)
        for token_id in branch:
            expansion = self.drafts[session.session_id](text)
            chance *= dict(zip(expansion.token_ids, expansion.chances, strict=True))[token_id]
            text = (*text, token_id)
        return chance

    def open_branches(self, session: DraftSession) -> set[Text]:
        """Branches that could be fed if there were room: nodes that are not fed yet, and tokens that are not nodes
        yet."""
        if session.num_pending:
            return set()
        found: set[Text] = set()
        known = {self.branch(session, node_id): node for node_id, node in session.nodes.items()}
        fed = [(), *(branch for branch, node in known.items() if node.entry is not None)]
        found |= {branch for branch, node in known.items() if node.entry is None}
        for branch in fed:
            expansion = self.drafts[session.session_id]((*session.token_ids, *branch))
            found |= {(*branch, token_id) for token_id in expansion.token_ids} - set(known)
        is_sampled = session.sampling.temperature > 0.0
        least = self.limits.min_sampled_reach if is_sampled else self.limits.min_reach
        return {
            branch
            for branch in found
            if len(branch) < self.limits.max_lookahead and self.reach(session, branch) >= least
        }

    def expected_reaches(self) -> dict[str, list[float]]:
        """Reach probabilities of the nodes that the next step should feed, by session, most likely first."""
        room = {s.session_id: self.limits.max_nodes - len(s.nodes) for s in self.sessions}
        known = {s.session_id: {self.branch(s, node_id) for node_id in s.nodes} for s in self.sessions}
        every = [
            (self.reach(session, branch), session.session_id, branch)
            for session in self.sessions
            for branch in self.open_branches(session)
        ]
        chosen: dict[str, list[float]] = {}
        is_full: set[str] = set()
        num_chosen = 0
        for reach, name, branch in sorted(every, reverse=True):
            if num_chosen == self.limits.max_nodes_per_step:
                break
            if room[name] < 2:
                is_full.add(name)
            if name in is_full:
                continue
            room[name] -= 1 if branch in known[name] else 2
            chosen.setdefault(name, []).append(reach)
            num_chosen += 1
        return chosen

    # What happens.

    def turn(self, *, is_checked: bool = True) -> bool:
        expected = self.expected_reaches() if is_checked else {}
        was_known = {s.session_id: set(s.nodes) for s in self.sessions}
        step = self.scheduler.next_step()
        if step is None:
            assert not expected
            return False
        for session in self.sessions:
            assert len(session.nodes) + session.num_owed <= self.limits.max_nodes
        fed = {item.session_id: item for item in step.items if item.paths is not None}
        if is_checked:
            found = {
                name: [self.reach(self.session(name), self.branch(self.session(name), n)) for n in item.node_ids]
                for name, item in fed.items()
            }
            assert found.keys() == expected.keys()
            for name, reaches in found.items():
                assert reaches == pytest.approx(expected[name])
        self.finish(step)
        for name, item in fed.items():
            self.num_fed[name] += len(item.node_ids)
            session = self.session(name)
            said = {hint.node_id for hint in self.sent.get(name, [])}
            new = set(item.node_ids) - was_known[name]
            assert new <= said, "an alternative is sent with the step that feeds it"
            for hint in self.sent.get(name, []):
                is_primary = session.nodes[hint.node_id].entry is None
                assert is_primary or hint.node_id in new, "what is sent is a primary child or was just fed"
        for session in self.sessions:
            assert session.num_owed == 0
            assert len(session.nodes) <= self.limits.max_nodes
            assert all(node.is_sent for node in session.nodes.values())
        return True

    def finish(self, step: Step) -> None:
        expansions = [
            [self.drafts[item.session_id]((*item.context.token_ids, *said)) for said in item.context.continuations]
            for item in step.items
        ]
        self.hear(self.scheduler.finish_step(step, expansions))

    def hear(self, actions: Sequence[Action]) -> None:
        self.sent = {}
        for action in actions:
            if isinstance(action, SendHints):
                self.sent.setdefault(action.session_id, []).extend(action.hints)

    def rest(self) -> None:
        for _ in range(2000):
            if not self.turn(is_checked=False):
                return
        raise AssertionError("it never rests")

    def commit(self, name: str, token_ids: Sequence[int], num_tried: int = 0, num_held: int = 0) -> None:
        known_len = len(self.session(name).token_ids)
        event = CommitReceived(name, known_len, list(token_ids), True, False, num_tried, num_held)
        self.scheduler.handle(event)

    def primary(self, name: str = "s0") -> list[int]:
        session, path = self.session(name), []
        children = session.cursor_node.children
        while children:
            path.append(session.nodes[children[0]].hint.token_id)
            children = session.nodes[children[0]].children
        return path


class TestChoice:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        seed=st.integers(0, 10_000),
        num_sessions=st.integers(1, 5),
        max_nodes=st.sampled_from([2, 3, 5, 12, 60]),
        max_nodes_per_step=st.integers(1, 6),
        max_lookahead=st.sampled_from([1, 2, 5, 20]),
    )
    def test_the_likeliest_of_all_sessions_are_fed(
        self, seed: int, num_sessions: int, max_nodes: int, max_nodes_per_step: int, max_lookahead: int
    ) -> None:
        """While commits come that follow primary children, alternatives, or neither."""
        rng = random.Random(seed)
        garden = Garden(
            num_sessions=num_sessions,
            max_nodes=max_nodes,
            max_nodes_per_step=max_nodes_per_step,
            max_lookahead=max_lookahead,
        )
        for _ in range(30):
            garden.turn()
            if rng.random() < 0.4:
                session = rng.choice(garden.sessions)
                nodes = sorted(session.nodes)
                branch = list(garden.branch(session, rng.choice(nodes))) if nodes else []
                if not branch or rng.random() < 0.2:
                    branch.append(rng.randrange(VOCAB_SIZE))
                garden.commit(session.session_id, branch)

    def test_of_two_sessions_the_surer_one_is_grown(self) -> None:
        garden = Garden(max_nodes_per_step=1)
        garden.attach("sure", (9,), steady(0.95))
        garden.drafts["s0"] = steady(0.4)
        for _ in range(10):
            garden.turn()
        assert len(garden.primary("sure")) > 6
        assert len(garden.primary("s0")) == 1

    def test_a_likely_alternative_comes_before_an_unlikely_continuation(self) -> None:
        garden = Garden(steady(0.5, 0.4), max_nodes_per_step=1)
        fed: list[Text] = []
        for _ in range(4):
            before = set(garden.session().entry_nodes)
            garden.turn()
            new = [n for n in garden.session().entry_nodes if n not in before]
            fed += [garden.branch(garden.session(), n) for n in new]
        assert [len(branch) for branch in fed] == [1, 1, 2]
        assert fed[0] != fed[1]

    def test_what_ends_the_text_is_sent_and_not_fed(self) -> None:
        draft = steady(0.9, 0.1)
        text: Text = (5, 6)
        for _ in range(2):
            text = (*text, draft(text).token_ids[0])
        end = draft(text).token_ids[0]  # what comes third
        garden = Garden(draft, num_sessions=0)
        sampling = SamplingParams(temperature=0.0, max_tokens=90, stop_token_ids=frozenset({end}))
        garden.attach("ends", (5, 6), draft, sampling)
        garden.rest()
        ended = [node for node in garden.session("ends").nodes.values() if node.hint.token_id == end]
        assert ended
        assert all(node.is_sent and node.entry is None for node in ended)
        assert garden.primary("ends")[2:] == [end]


class TestAlternatives:
    def test_unlikely_ones_are_no_nodes_and_not_sent_before_their_turn(self) -> None:
        garden = Garden(steady(0.9, 0.04, 0.03))
        garden.turn()
        assert [len(hints) for hints in garden.sent.values()] == [1]
        assert len(garden.session().nodes) == 1

    def test_likely_ones_are_sent_at_once_and_fed_later(self) -> None:
        garden = Garden(steady(0.6, 0.3, 0.04), max_nodes_per_step=1)
        garden.turn()
        primary, likely = garden.sent["s0"]
        assert primary.parent_id == likely.parent_id == ROOT_ID
        assert likely.confidence == confidence_level(0.3)
        assert garden.session().nodes[likely.node_id].entry is None
        garden.rest()
        assert garden.session().nodes[likely.node_id].entry is not None

    def test_under_rejection_none_is_sent_before_its_turn_nor_with_a_confidence(self) -> None:
        """The draft's own probability of a token must not reach the target (I4)."""
        garden = Garden(steady(0.6, 0.3), num_sessions=0, max_nodes_per_step=1)
        garden.attach("s0", (1, 2), steady(0.6, 0.3), SamplingParams(temperature=1.0))
        garden.turn()
        assert len(garden.sent["s0"]) == 1
        garden.rest()
        assert all(node.hint.confidence == 0 for node in garden.session().nodes.values())

    def test_an_unlikely_one_that_is_sent_has_a_continuation_in_the_same_message(self) -> None:
        garden = Garden(steady(0.9, 0.045), max_nodes_per_step=1, min_reach=0.01)
        num_alternatives = 0
        while garden.turn():
            hints = garden.sent.get("s0", [])
            if len(hints) == 2:
                num_alternatives += 1
                assert hints[1].parent_id == hints[0].node_id
            else:
                assert len(hints) == 1
        assert num_alternatives > 5

    def test_one_that_was_not_sent_is_not_in_the_tree_when_it_is_committed(self) -> None:
        """The target's cursor could not go there either."""
        garden = Garden(steady(0.9, 0.001))
        garden.rest()
        unsent = garden.drafts["s0"](tuple(garden.session().token_ids)).token_ids[1]
        garden.commit("s0", [unsent])
        assert garden.session().num_roots == 2

    def test_the_primary_child_is_the_first_child_whatever_is_fed_when(self) -> None:
        garden = Garden(num_sessions=3, max_nodes=60)
        garden.rest()
        for session in garden.sessions:
            for node_id, node in [(session.cursor, session.cursor_node), *session.nodes.items()]:
                if not node.children:
                    continue
                first = session.nodes[node.children[0]].hint.token_id
                text = (*session.token_ids, *garden.branch(session, node_id))
                assert first == garden.drafts[session.session_id](text).token_ids[0]


class TestBounds:
    @pytest.mark.parametrize("max_nodes", [1, 2, 3, 4, 7, 30, 240])
    @pytest.mark.parametrize("max_nodes_per_step", [1, 8, 64])
    def test_nodes_and_the_children_that_are_owed_stay_within_the_limit(
        self, max_nodes: int, max_nodes_per_step: int
    ) -> None:
        garden = Garden(num_sessions=2, max_nodes=max_nodes, max_nodes_per_step=max_nodes_per_step)
        garden.rest()  # `turn` checks it during every step
        for name in ("s0", "s1"):
            assert 1 <= len(garden.session(name).nodes) <= max_nodes
            garden.commit(name, garden.primary(name)[:2])
        garden.rest()

    def test_a_tree_with_room_for_two_is_filled(self) -> None:
        """An alternative needs room for itself and a child, a node for a child alone."""
        garden = Garden(steady(0.95, 0.04), max_nodes=12, max_lookahead=40)
        garden.rest()
        assert len(garden.session().nodes) >= 11

    @pytest.mark.parametrize("min_reach", [0.3, 0.1, 0.02])
    def test_nothing_less_likely_than_min_reach_is_fed(self, min_reach: float) -> None:
        garden = Garden(num_sessions=4, min_reach=min_reach, max_nodes=200)
        garden.rest()
        for session in garden.sessions:
            fed = [garden.reach(session, garden.branch(session, n)) for n in session.entry_nodes]
            assert all(reach >= min_reach for reach in fed)
            left = [garden.reach(session, branch) for branch in garden.open_branches(session)]
            assert left == [], "what is likely enough is fed"

    def test_a_sampled_session_has_a_bound_of_its_own(self) -> None:
        garden = Garden(min_reach=0.01, min_sampled_reach=0.2, max_nodes=200)
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            garden.attach(name, (3, 4), steady(0.7, 0.25), sampling)
        garden.rest()
        sampled = garden.session("sampled")
        least = min(garden.reach(sampled, garden.branch(sampled, n)) for n in sampled.entry_nodes)
        assert 0.2 <= least < 0.4
        assert len(garden.session("greedy").entry_nodes) > len(sampled.entry_nodes)


class TestCursor:
    @pytest.mark.parametrize("num_committed", [1, 2, 3])
    def test_chances_count_from_the_new_cursor(self, num_committed: int) -> None:
        garden = Garden(num_sessions=5, max_nodes=100)
        garden.rest()
        for session in garden.sessions:
            garden.commit(session.session_id, garden.primary(session.session_id)[:num_committed])
            assert session.cursor_node.reach == 1.0
            for node_id, node in session.nodes.items():
                assert node.reach == pytest.approx(garden.reach(session, garden.branch(session, node_id)))

    def test_what_was_too_unlikely_is_fed_once_the_cursor_is_nearer(self) -> None:
        garden = Garden(steady(0.5, 0.3), min_reach=0.1)
        garden.rest()
        first = garden.primary()
        assert not garden.turn()
        garden.commit("s0", first[:1])
        assert garden.turn()
        garden.rest()
        assert len(garden.primary()) == len(first)

    def test_alternatives_are_still_known_after_the_cursor_came_to_their_parent(self) -> None:
        garden = Garden(steady(0.8, 0.1), min_reach=0.09, max_lookahead=4)
        garden.turn()
        garden.turn()
        path = garden.primary()
        beside = garden.drafts["s0"]((*garden.session().token_ids, path[0])).token_ids[1]
        garden.commit("s0", path[:1])
        garden.rest()
        said = {garden.session().nodes[child].hint.token_id for child in garden.session().cursor_node.children}
        assert beside in said

    def test_a_session_that_is_heard_again_goes_on_with_the_same_candidates(self) -> None:
        garden = Garden(max_nodes=100)
        for _ in range(5):
            garden.turn()
        before = garden.open_branches(garden.session())
        length = len(garden.session().token_ids)
        for accepts_hints in (False, True):
            garden.scheduler.handle(CommitReceived("s0", length, [], accepts_hints, False))
        assert garden.open_branches(garden.session()) == before
        while garden.turn():
            pass


def real_expansion(item: StepItem, row_logits: torch.Tensor) -> list[Expansion]:
    """The expansions that the draft worker's runner makes of the same logits at every node."""
    return expand(item, row_logits.expand(len(item.node_ids), -1).clone())


class TestExperience:
    """The draft's confidence and its acceptance so far: each alone misleads."""

    def grown(self, logits: torch.Tensor, num_held_of_five: int, num_rounds: int = 60) -> list[int]:
        """Lengths of the primary path, round after round, while this number of five hints is accepted."""
        garden = Garden(min_reach=0.01, max_nodes_per_step=8)
        lengths = []
        for _ in range(num_rounds):
            while (step := garden.scheduler.next_step()) is not None:
                garden.scheduler.finish_step(step, [real_expansion(item, logits) for item in step.items])
            path = garden.primary()
            lengths.append(len(path))
            held = path[: min(num_held_of_five, len(path))]
            extra = [] if num_held_of_five else [(path[0] + 7) % VOCAB_SIZE]
            garden.commit("s0", held + extra, min(5, len(path)), len(held))
        return lengths

    def test_a_flat_draft_that_always_holds_keeps_growing(self) -> None:
        flat = torch.zeros(1, VOCAB_SIZE)
        lengths = self.grown(flat, 5)
        assert min(lengths[20:]) >= 6
        assert lengths[-1] > lengths[0]

    def test_a_flat_draft_that_never_holds_does_not_go_deep(self) -> None:
        assert self.grown(torch.zeros(1, VOCAB_SIZE), 0)[-1] <= 3

    def test_a_sure_draft_that_never_holds_goes_less_deep_than_one_that_does(self) -> None:
        sure = torch.zeros(1, VOCAB_SIZE)
        sure[0, 3] = 8.0
        assert self.grown(sure, 0)[-1] <= 8 < self.grown(sure, 5)[-1]

    def test_of_drafts_without_a_record_the_surer_one_goes_deeper(self) -> None:
        sure = torch.zeros(1, VOCAB_SIZE)
        sure[0, 3] = 8.0
        assert self.grown(sure, 5, num_rounds=1)[0] > self.grown(torch.zeros(1, VOCAB_SIZE), 5, num_rounds=1)[0]

    def test_what_its_confidence_is_worth_is_learned_for_all_sessions(self) -> None:
        """A new one begins with what those before it have shown."""
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, 3] = 4.0  # half of the mass

        def expected_of_a_new_session(num_rounds: int, num_held: int) -> float:
            garden = Garden(num_sessions=1)
            for _ in range(num_rounds):
                while (step := garden.scheduler.next_step()) is not None:
                    garden.scheduler.finish_step(step, [real_expansion(item, logits) for item in step.items])
                path = garden.primary()
                num_tried = min(num_held, len(path))
                garden.commit("s0", path[:num_tried], num_tried, num_tried)
            garden.attach("new", (30,), steady(0.5))
            growing = garden.scheduler.next_step()
            assert growing is not None
            (item,) = (item for item in growing.items if item.session_id == "new")
            (expansion,) = real_expansion(item, logits)
            assert expansion.confidence == confidence_level(torch.softmax(logits, dim=-1).max().item())
            return expansion.chances[0]

        assert expected_of_a_new_session(60, 5) > expected_of_a_new_session(0, 5) + 0.05

    @pytest.mark.parametrize(
        ("num_held", "misses", "seen"),
        [
            (2, True, [True, True, False]),  # those behind the first that did not hold were not tried
            (3, False, [True, True, True]),  # what lies beyond is not known yet
            (0, True, [False]),
        ],
    )
    def test_the_primary_path_is_held_against_what_was_committed(
        self, num_held: int, misses: bool, seen: list[bool]
    ) -> None:
        """Whether the target verified it or found its tokens elsewhere."""
        found: list[tuple[int, bool]] = []

        class Recorder(Calibration):
            def observe(self, confidence: int, record: float, *, is_accepted: bool) -> None:
                found.append((confidence, is_accepted))

        garden = Garden(lambda text: replace(steady(0.9, 0.05)(text), confidence=1 + len(text)))
        for _ in range(6):
            garden.turn()
        session, path = garden.session(), garden.primary()
        session.calibration = Recorder()
        first = session.nodes[session.cursor_node.children[0]].hint.confidence
        garden.commit("s0", path[:num_held] + [(path[num_held] + 20) % VOCAB_SIZE] * misses)
        assert found == [(first + place, is_accepted) for place, is_accepted in enumerate(seen)]

    @pytest.mark.parametrize("rate", [0.05, 0.5, 0.99])
    @pytest.mark.parametrize("height", [0.0, 2.0, 12.0])
    def test_chances_of_a_node_stay_chances(self, rate: float, height: float) -> None:
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, 5] = height
        garden = Garden()
        session = garden.session()
        session.acceptance.accepted.total, session.acceptance.accepted.weight = rate * 100, 100
        step = garden.scheduler.next_step()
        assert step is not None
        (expansion,) = real_expansion(step.items[0], logits)
        assert len(set(expansion.token_ids)) == len(expansion.token_ids)
        assert all(0.0 < chance <= 1.0 for chance in expansion.chances)
        assert sum(expansion.chances) <= 1.0 + 1e-6
        assert expansion.chances[1:] == sorted(expansion.chances[1:], reverse=True)


class TestFairness:
    def test_each_of_eight_sessions_gets_primary_nodes(self) -> None:
        garden = Garden(num_sessions=8, max_nodes_per_step=8)
        for _ in range(12):
            garden.turn()
        assert all(len(garden.primary(name)) >= 4 for name in garden.drafts), garden.num_fed

    def test_equals_are_served_alike(self) -> None:
        garden = Garden(steady(0.8, 0.1), num_sessions=8, max_nodes_per_step=8)
        for _ in range(40):
            garden.turn(is_checked=False)
            assert max(garden.num_fed.values()) - min(garden.num_fed.values()) <= 8
        assert min(garden.num_fed.values()) > 20

    def test_one_unsure_session_among_seven_whose_text_runs_on_is_not_forgotten(self) -> None:
        garden = Garden(steady(0.97, 0.02), num_sessions=7, max_nodes_per_step=8)
        garden.attach("unsure", (30,), steady(0.35, 0.2, 0.1))
        for _ in range(60):
            garden.turn(is_checked=False)
            for number in range(7):
                if len(garden.primary(f"s{number}")) > 2:
                    garden.commit(f"s{number}", garden.primary(f"s{number}")[:1])
        assert len(garden.primary("unsure")) >= 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heavy_alternatives_come_before_the_primary_path_but_not_where_it_is_sampled(
    temperature: float,
) -> None:
    """I4: what the alternatives weigh depends on the token drawn, and must not decide whether it gets a successor."""
    limits = DraftLimits(max_nodes_per_step=1, min_sampled_reach=0.0, max_model_len=100)
    scheduler = DraftScheduler(limits, BlockAllocator(64, 16), VOCAB_SIZE)
    sampling = SamplingParams(temperature=temperature, max_tokens=90, ignore_eos=True)
    scheduler.handle(AttachSession("a", 1, "target:1", [1, 2, 3], sampling, 7))
    session = scheduler.progress("a")
    assert session is not None
    was_tip = []
    for _ in range(8):
        step = scheduler.next_step()
        assert step is not None
        (item,) = step.items
        path = [session.cursor]
        while children := (session.nodes[path[-1]].children if len(path) > 1 else session.cursor_node.children):
            path.append(children[0])
        was_tip.append(item.node_ids == path[-1:])
        scheduler.finish_step(step, [[Expansion([1, 2, 3], [0.1, 0.5, 0.4], None)]])
    assert all(was_tip) == (temperature > 0)
