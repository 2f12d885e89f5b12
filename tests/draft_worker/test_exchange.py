"""Draft and target talking through queues: late, twice, in pieces, and with streams that break (I2, I3).

Both sides are the real schedulers with fake models. A stream keeps its order, as gRPC's do; when it breaks, what was
under way in both directions is lost and the draft worker is told that a new one was opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from draft_worker.limits import DraftLimits
from draft_worker.messages import Action as DraftAction
from draft_worker.messages import CommitReceived, LinkOpened, SendHints, Subscribe, Unsubscribe
from outrider.hints.hint_tree import Hint
from outrider.sampling_params import SpeculationSettings
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    ChangeSpeculation,
    CloseStream,
    CommitPublished,
    HintsArrived,
    SubscribeDraft,
    UnsubscribeDraft,
    WaitForHints,
)
from tests.draft_worker.test_scheduler import TARGET, attach
from tests.draft_worker.test_scheduler import World as DraftWorld
from tests.target_worker.fakes import start
from tests.target_worker.test_scheduler import World as TargetWorld

TARGET_LIMITS = SchedulerLimits(
    may_pause=False,
    max_num_seqs=2,
    max_num_batched_tokens=24,
    max_model_len=400,
    num_speculative_tokens=4,
    hint_wait_ms_max=2.0,
)
DRAFT_LIMITS = DraftLimits(
    max_num_seqs=2,
    max_num_batched_tokens=40,
    max_model_len=500,
    max_nodes=40,
    max_lookahead=8,
    max_nodes_per_step=4,
)
PROMPT = (1, 2, 3)


class Exchange:
    """One session on both sides, and the stream between them."""

    def __init__(self, alignment: int = 200, num_children: int = 3) -> None:
        self.target = TargetWorld(TARGET_LIMITS, num_blocks=300)
        self.draft = DraftWorld(DRAFT_LIMITS, 300, alignment, num_children)
        self.stream_id = 1
        self.to_target: deque[DraftAction] = deque()
        self.to_draft: deque[CommitPublished] = deque()

    def start_target(self) -> None:
        self.listen(self.target.tell(start(prompt=PROMPT, ignore_eos=True, max_tokens=390)))

    def start_draft(self) -> None:
        self.to_target += self.draft.tell(attach(token_ids=PROMPT))

    def listen(self, actions: Sequence[object]) -> None:
        """Keeps what the target published on the open stream."""
        self.to_draft += [
            action for action in actions if isinstance(action, CommitPublished) and action.stream_id == self.stream_id
        ]

    def deliver_to_target(self, twice: bool = False) -> None:
        if not self.to_target:
            return
        match self.to_target.popleft():
            case Subscribe(session_id=name, known_len=known_len):
                event = SubscribeDraft(self.stream_id, name, known_len)
                self.listen(self.target.scheduler.handle(event, self.target.now))
            case Unsubscribe(session_id=name):
                self.target.tell(UnsubscribeDraft(self.stream_id, name))
            case SendHints() as sent:
                for _ in range(2 if twice else 1):
                    self.target.tell(
                        HintsArrived(sent.session_id, sent.attachment, sent.base_len, sent.hints, self.target.now)
                    )

    def deliver_to_draft(self) -> None:
        if not self.to_draft:
            return
        commit = self.to_draft.popleft()
        self.draft.texts["a"] = list(self.target.texts["a"])
        self.to_target += self.draft.tell(
            CommitReceived(
                commit.session_id, commit.from_len, commit.token_ids, commit.accepts_hints, commit.is_finished
            )
        )

    def step_target(self) -> None:
        decision = self.target.scheduler.next_step(self.target.now)
        if isinstance(decision, WaitForHints):
            self.target.now = decision.until
        elif decision is not None:
            self.target.check_step(decision)
            self.target.now += 0.002
            result = self.target.model.run(decision)
            actions = self.target.scheduler.finish_step(decision, result, self.target.now)
            self.target.hear([a for a in actions if not isinstance(a, CommitPublished)])
            self.listen(list(actions))

    def step_draft(self) -> bool:
        step = self.draft.scheduler.next_step()
        if step is None:
            return False
        actions = self.draft.scheduler.finish_step(step, self.draft.model.run(step))
        self.draft.hear(actions)
        self.to_target += actions
        return True

    def break_stream(self) -> None:
        self.to_target.clear()
        self.to_draft.clear()
        self.target.tell(CloseStream(self.stream_id))
        self.stream_id += 1
        self.to_target += self.draft.tell(LinkOpened(TARGET))

    def settle(self) -> None:
        """Everything is delivered and the draft has grown what it can; the target takes no step."""
        for _ in range(300):
            while self.to_target or self.to_draft:
                self.deliver_to_target()
                self.deliver_to_draft()
            if not self.step_draft() and not self.to_target and not self.to_draft:
                return
        raise AssertionError("they talk without end")

    def draft_path(self) -> list[Hint]:
        session, path = self.draft.session(), []
        children = session.cursor_node.children
        while children:
            node = session.nodes[children[0]]
            path.append(node.hint)
            children = node.children
        return path

    def target_path(self) -> list[Hint]:
        return self.target.scheduler._sessions["a"].tree.primary_path(100)

    def check_agreement(self) -> None:
        """Both sides have the same text, and the target can verify all that the draft says next."""
        text = self.target.texts["a"]
        assert self.draft.session().token_ids == text
        assert self.draft_path(), "the draft has nothing to say"
        said = [hint.token_id for hint in self.draft_path()]
        assert [hint.token_id for hint in self.target_path()] == said
        self.target.check()
        self.draft.check()


class RandomTalk(RuleBasedStateMachine):
    can_pause = False
    can_break = False

    @initialize(alignment=st.sampled_from([100, 220, 256]), num_children=st.integers(1, 3), draft_first=st.booleans())
    def begin(self, alignment: int, num_children: int, draft_first: bool) -> None:
        self.exchange = Exchange(alignment, num_children)
        if draft_first:
            self.exchange.start_draft()
            self.exchange.step_draft()
            for _ in range(4):
                self.exchange.deliver_to_target()
        self.exchange.start_target()
        if not draft_first:
            self.exchange.step_target()
            self.exchange.start_draft()
        # Subscriptions that waited for the session are answered by `start_target`.

    @rule(count=st.integers(1, 4), twice=st.booleans())
    def hints_travel(self, count: int, twice: bool) -> None:
        for _ in range(count):
            self.exchange.deliver_to_target(twice)

    @rule(count=st.integers(1, 4))
    def commits_travel(self, count: int) -> None:
        for _ in range(count):
            self.exchange.deliver_to_draft()

    @rule()
    def target_steps(self) -> None:
        if len(self.exchange.target.texts["a"]) < 300:
            self.exchange.step_target()

    @rule(count=st.integers(1, 3))
    def draft_steps(self, count: int) -> None:
        for _ in range(count):
            self.exchange.step_draft()

    @rule()
    def stream_breaks(self) -> None:
        if self.can_break:
            self.exchange.break_stream()

    @rule(accepts_hints=st.booleans())
    def speculation_changes(self, accepts_hints: bool) -> None:
        if self.can_pause:
            actions = self.exchange.target.scheduler.handle(
                ChangeSpeculation("a", SpeculationSettings(accepts_hints)), self.exchange.target.now
            )
            self.exchange.listen(list(actions))

    @rule()
    def they_come_to_agree(self) -> None:
        self.exchange.settle()
        if self.exchange.target.scheduler._sessions["a"].accepts_hints:
            self.exchange.check_agreement()

    def teardown(self) -> None:
        if not hasattr(self, "exchange"):
            return
        if self.can_pause:
            actions = self.exchange.target.scheduler.handle(
                ChangeSpeculation("a", SpeculationSettings(True)), self.exchange.target.now
            )
            self.exchange.listen(list(actions))
        self.exchange.settle()
        self.exchange.check_agreement()


class TalkOverBreakingStreams(RandomTalk):
    can_break = True


class TalkWithPauses(RandomTalk):
    can_pause = True


SETTINGS = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # shrinking a conversation takes minutes
)
TestRandomTalk = RandomTalk.TestCase
TestTalkOverBreakingStreams = TalkOverBreakingStreams.TestCase
TestTalkWithPauses = TalkWithPauses.TestCase
TestRandomTalk.settings = TestTalkOverBreakingStreams.settings = TestTalkWithPauses.settings = SETTINGS


def talking(alignment: int = 256) -> Exchange:
    exchange = Exchange(alignment)
    exchange.start_target()
    exchange.step_target()
    exchange.start_draft()
    exchange.settle()
    return exchange


def test_a_perfect_draft_is_followed_without_a_new_root() -> None:
    exchange = talking()
    for _ in range(40):
        exchange.step_target()
        exchange.settle()
        exchange.check_agreement()
    stats = exchange.target.scheduler._sessions["a"].stats
    assert stats.num_accepted_draft_tokens >= 0.99 * stats.num_draft_tokens
    assert stats.num_accepted_draft_tokens > 100
    assert exchange.draft.session().num_roots <= 2


def test_a_perfect_draft_is_heard_again_after_its_stream_broke() -> None:
    """Its cursor is among hints that were lost; always right, the draft never plants a root by itself."""
    exchange = talking()
    exchange.step_target()
    exchange.deliver_to_draft()
    while exchange.step_draft():  # none of this arrives
        pass
    for _ in range(12):
        exchange.step_target()
        exchange.deliver_to_draft()
        if not exchange.target_path() and exchange.draft_path():
            break  # the target knows nothing more, the draft is somewhere below
    exchange.step_target()
    exchange.deliver_to_draft()
    exchange.break_stream()
    for _ in range(5):
        exchange.settle()
        exchange.step_target()
    exchange.settle()
    exchange.check_agreement()


def test_a_perfect_draft_is_heard_again_after_a_pause() -> None:
    exchange = talking()
    exchange.step_target()
    exchange.deliver_to_draft()
    while exchange.step_draft():  # under way when listening ends
        pass
    for accepts_hints in (False, True):
        settings_ = SpeculationSettings(accepts_hints)
        actions = exchange.target.scheduler.handle(ChangeSpeculation("a", settings_), exchange.target.now)
        exchange.listen(list(actions))
        exchange.settle()
    for _ in range(5):
        exchange.step_target()
        exchange.settle()
    exchange.check_agreement()
