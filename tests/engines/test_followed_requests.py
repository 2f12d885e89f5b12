"""Draft workers are told of an engine's requests, and the engine of their hints, and neither more than it may know."""

from __future__ import annotations

from outrider.engines.followed_requests import FollowedRequests
from outrider.engines.frames import BYTES_MAX, MAX_FRAME_NODES, MAX_FRAME_REQUESTS, FrameKind
from outrider.hint_service.messages import CloseStream, CommitPublished, HintsArrived, SubscribeDraft, UnsubscribeDraft
from outrider.hint_service.pending_hints import NODES_MAX
from outrider.hint_service.session_names import session_name
from outrider.hints.hint_tree import Hint
from protos.outrider.v1 import draft_pb2, hints_pb2

NAME = session_name("s", "secret")
STREAM = 4


def opened() -> FollowedRequests:
    requests = FollowedRequests()
    requests.open(7, draft_pb2.AttachRequest(session_id="s", hint_token="secret", token_ids=[1, 2, 3]))
    return requests


def commit(
    from_len: int, token_ids: list[int], *, paused: bool = False, finished: bool = False
) -> hints_pb2.CommitFrame:
    made = hints_pb2.SessionCommit(
        channel=7, from_len=from_len, token_ids=token_ids, is_paused=paused, is_finished=finished
    )
    return hints_pb2.CommitFrame(commits=[made])


def frames(requests: FollowedRequests) -> list[hints_pb2.HintFrame]:
    """All that the engine is told, which takes each frame at once."""
    found = []
    while (told := requests.take_hints()) is not None:
        found.append(told[0])
        requests.taken(1)
    return found


def frame_of(requests: FollowedRequests) -> hints_pb2.HintFrame:
    """The one frame that the engine is told, or an empty one."""
    found = frames(requests)
    assert len(found) <= 1
    return found[0] if found else hints_pb2.HintFrame()


def told(actions: list[CommitPublished]) -> list[tuple[int, list[int]]]:
    return [(action.from_len, action.token_ids) for action in actions]


def test_a_follower_is_told_what_it_lacks_then_every_commit() -> None:
    requests = opened()
    assert told(requests.handle(SubscribeDraft(STREAM, NAME, 1))) == [(1, [2, 3])]
    actions, ended = requests.take_commits(commit(3, [4, 5]))
    assert told(actions) == [(3, [4, 5])]
    assert not ended


def test_without_the_token_a_session_does_not_exist() -> None:
    requests = opened()
    for name in ("s", session_name("s", "guessed"), session_name("t", "secret")):
        assert requests.handle(SubscribeDraft(STREAM, name, 1)) == []
        requests.handle(HintsArrived(name, 1, 3, [Hint(1, 0, 9)], 0.0))
    assert not frame_of(requests).nodes


def test_a_paused_follower_gets_tokens_when_it_is_resumed() -> None:
    requests = opened()
    requests.handle(SubscribeDraft(STREAM, NAME, 3))
    assert told(requests.take_commits(commit(3, [4], paused=True))[0]) == [(3, [4])]
    assert told(requests.take_commits(commit(4, [5], paused=True))[0]) == []
    actions, _ = requests.take_commits(commit(5, [6]))
    assert told(actions) == [(4, [5, 6])]
    assert actions[0].accepts_hints


def test_the_end_is_told_and_the_request_forgotten() -> None:
    requests = opened()
    requests.handle(SubscribeDraft(STREAM, NAME, 3))
    actions, ended = requests.take_commits(commit(3, [4], finished=True))
    assert actions[0].is_finished
    assert ended == [7]
    assert requests.committed_by(7) == []
    assert requests.take_commits(commit(4, [5]))[0] == []


def test_the_engine_is_told_of_an_attachment_with_its_first_hints() -> None:
    requests = opened()
    requests.handle(SubscribeDraft(STREAM, NAME, 3))
    assert not frame_of(requests).subscribe
    requests.handle(HintsArrived(NAME, 2, 3, [Hint(1, 0, 9)], 0.0))
    requests.handle(HintsArrived(NAME, 2, 3, [Hint(2, 1, 8)], 0.0))
    frame = frame_of(requests)
    assert [(each.channel, each.attachment) for each in frame.subscribe] == [(7, 2)]
    assert [list(each.token_ids) for each in frame.nodes] == [[9, 8]], "what has gathered is one message"


def test_the_engine_is_told_when_the_last_follower_leaves() -> None:
    for event in (UnsubscribeDraft(STREAM, NAME), CloseStream(STREAM)):
        requests = opened()
        requests.handle(SubscribeDraft(STREAM, NAME, 3))
        requests.handle(HintsArrived(NAME, 2, 3, [Hint(1, 0, 9)], 0.0))
        requests.handle(event)
        assert requests.take_hints() is None, "the attachment that it was to be told of is over"
        requests.handle(SubscribeDraft(STREAM, NAME, 3))
        requests.handle(HintsArrived(NAME, 2, 3, [Hint(1, 0, 9)], 0.0))
        assert frame_of(requests).subscribe
        requests.handle(event)
        assert list(frame_of(requests).unsubscribe) == ["7"]
        requests.handle(event)
        assert not frame_of(requests).unsubscribe


def test_hints_of_an_earlier_attachment_are_not_passed_on() -> None:
    requests = opened()
    requests.handle(HintsArrived(NAME, 2, 3, [Hint(1, 0, 9)], 0.0))
    frame_of(requests)
    requests.handle(HintsArrived(NAME, 1, 3, [Hint(1, 0, 5)], 0.0))
    assert not frame_of(requests).nodes


def test_the_engine_is_told_of_the_attachment_as_it_is_now() -> None:
    requests = opened()
    requests.handle(HintsArrived(NAME, 2, 3, [Hint(1, 0, 9)], 0.0))
    frame_of(requests)
    for attachment in range(3, 1000):  # a draft worker that comes and goes without end
        requests.handle(SubscribeDraft(STREAM, NAME, 3))
        requests.handle(HintsArrived(NAME, attachment, 3, [Hint(1, 0, 9)], 0.0))
        requests.handle(CloseStream(STREAM))
    requests.handle(HintsArrived(NAME, 1000, 4, [Hint(1, 0, 8)], 0.0))
    frame = frame_of(requests)
    assert list(frame.unsubscribe) == ["7"]
    assert [(each.channel, each.attachment) for each in frame.subscribe] == [(7, 1000)]
    assert [list(each.token_ids) for each in frame.nodes] == [[8]]


def test_a_paused_request_costs_the_engine_nothing() -> None:
    requests = opened()
    requests.handle(SubscribeDraft(STREAM, NAME, 3))
    requests.take_commits(commit(3, [4], paused=True))
    requests.handle(HintsArrived(NAME, 1, 4, [Hint(1, 0, 9)], 0.0))
    assert requests.take_hints() is None


def test_hints_that_wait_until_the_tokens_have_left_them_cost_the_engine_nothing() -> None:
    requests = opened()
    requests.handle(SubscribeDraft(STREAM, NAME, 3))
    requests.handle(HintsArrived(NAME, 1, 3, [Hint(1, 0, 9), Hint(2, 1, 8)], 0.0, stream_id=STREAM))
    requests.take_commits(commit(3, [5]))
    assert not frame_of(requests).nodes
    requests.handle(HintsArrived(NAME, 1, 4, [Hint(3, 0, 6), Hint(4, 3, 7)], 0.0, stream_id=STREAM))
    requests.take_commits(commit(4, [6]))
    assert list(frame_of(requests).nodes[0].token_ids) == [6, 7], "those that they follow stay"


def test_one_draft_worker_may_send_what_a_step_of_many_requests_takes() -> None:
    requests, num_requests = FollowedRequests(), 256
    for number in range(1, num_requests + 1):
        requests.open(number, draft_pb2.AttachRequest(session_id=str(number), hint_token="x", token_ids=[1]))
        name = session_name(str(number), "x")
        requests.handle(SubscribeDraft(STREAM, name, 1))
        hints = [Hint(node_id, node_id - 1, 7) for node_id in range(1, 9)]
        requests.handle(HintsArrived(name, 1, 1, hints, 0.0, stream_id=STREAM))
    num_sent = 0
    while (told := requests.take_hints()) is not None:  # the engine takes none of them
        num_sent += sum(len(nodes.parent_ids) for nodes in told[0].nodes)
    assert num_sent == 8 * num_requests


def test_an_id_that_fits_into_no_message_costs_its_hint_alone() -> None:
    requests = opened()
    requests.handle(HintsArrived(NAME, 1, 3, [Hint(2**32 - 1, 0, 9), Hint(2**32, 0, 8)], 0.0))
    assert [list(each.token_ids) for each in frame_of(requests).nodes] == [[9]]


def test_the_largest_frame_that_is_made_fits() -> None:
    """Every number as large as it can be, and every request attached anew."""
    requests, most = FollowedRequests(), 2**32 - 1
    names = [session_name(f"s{index}", "secret") for index in range(2 * MAX_FRAME_REQUESTS)]
    for index in range(len(names)):
        opening = draft_pb2.AttachRequest(session_id=f"s{index}", hint_token="secret", token_ids=[1])
        requests.open(most - index, opening)
    hints = [Hint(most - 2 * index, most - 1, most, None, 127, True) for index in range(2 * MAX_FRAME_NODES)]
    for attachment in (most - 1, most):
        for name in names:
            requests.handle(HintsArrived(name, attachment, most, hints, 0.0))
        found = frames(requests)
        num_nodes = [sum(len(each.parent_ids) for each in frame.nodes) for frame in found]
        assert max(num_nodes) == MAX_FRAME_NODES
        assert sum(num_nodes) == len(names) * len(hints)
        assert sum(len(frame.subscribe) for frame in found) == len(names)
        assert max(frame.ByteSize() for frame in found) <= BYTES_MAX[FrameKind.HINTS]


class TestExpectedRequests:
    """A target worker knows a request before its engine does."""

    def expected(self) -> FollowedRequests:
        requests = FollowedRequests()
        requests.expect(NAME, [1, 2, 3], is_on=True)
        return requests

    def announce(self, requests: FollowedRequests, number: int = 7) -> None:
        # Under its whole name, which holds the token's digest.
        requests.open(number, draft_pb2.AttachRequest(session_id=NAME, token_ids=[1, 2, 3]))

    def test_hints_that_come_before_the_engine_opens_it_are_kept(self) -> None:
        requests = self.expected()
        assert told(requests.handle(SubscribeDraft(STREAM, NAME, 1))) == [(1, [2, 3])]
        requests.handle(HintsArrived(NAME, 1, 3, [Hint(1, 0, 9)], 0.0))
        assert not frame_of(requests).nodes
        self.announce(requests)
        hints = frame_of(requests)
        assert [(each.channel, each.attachment) for each in hints.subscribe] == [(7, 1)]
        assert [list(each.token_ids) for each in hints.nodes] == [[9]]

    def test_no_more_of_them_are_kept_than_a_tree_holds(self) -> None:
        requests = self.expected()
        for first in range(0, 2 * NODES_MAX, 64):
            nodes = [Hint(first + index + 1, first + index, 9) for index in range(64)]
            requests.handle(HintsArrived(NAME, 1, 3, nodes, 0.0))
        self.announce(requests)
        assert sum(len(nodes.parent_ids) for frame in frames(requests) for nodes in frame.nodes) == NODES_MAX
        assert requests.num_dropped == NODES_MAX

    def test_one_whose_hints_are_turned_off_gets_none(self) -> None:
        requests = self.expected()
        self.announce(requests)
        requests.handle(SubscribeDraft(STREAM, NAME, 3))
        requests.handle(HintsArrived(NAME, 1, 3, [Hint(1, 0, 9)], 0.0))
        frame_of(requests)
        assert [each.accepts_hints for each in requests.switch(NAME, is_on=False)] == [False]
        assert list(frame_of(requests).unsubscribe) == ["7"]
        requests.handle(HintsArrived(NAME, 1, 3, [Hint(2, 1, 8)], 0.0))
        assert not frame_of(requests).nodes
        assert [each.accepts_hints for each in requests.switch(NAME, is_on=True)] == [True]
        requests.handle(HintsArrived(NAME, 1, 3, [Hint(2, 1, 8)], 0.0))
        hints = frame_of(requests)
        assert [each.attachment for each in hints.subscribe] == [1]
        assert hints.nodes

    def test_its_end_is_told_once_by_the_engine_or_else_by_the_worker(self) -> None:
        for engine_says_so in (True, False):
            requests = self.expected()
            self.announce(requests)
            requests.handle(SubscribeDraft(STREAM, NAME, 3))
            ends = requests.take_commits(commit(3, [], finished=True))[0] if engine_says_so else []
            ends += requests.close(NAME)
            assert [each.is_finished for each in ends] == [True]
            assert len(requests) == 0
            assert requests.named(NAME) is None

    def test_an_engine_that_comes_back_announces_it_again(self) -> None:
        requests = self.expected()
        self.announce(requests)
        requests.handle(SubscribeDraft(STREAM, NAME, 3))
        assert [each.accepts_hints for each in requests.lose_engine()] == [False]
        self.announce(requests, number=1)
        frame = commit(3, [4])
        frame.commits[0].channel = 1
        assert [each.accepts_hints for each in requests.take_commits(frame)[0]] == [True]
