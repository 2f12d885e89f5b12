"""The modes that `ahead` compares, and what it makes of slices."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.shared.worker_pair import Generation
from benchmarks.speculation.ahead import (
    AHEAD,
    ENUMERATE,
    KINDS,
    PLAIN,
    SYNCHRONOUS,
    best_synchronous,
    draw,
    modes,
    parse_arguments,
    summarize,
    vain_wait_share,
)
from benchmarks.speculation.bound import expected_tokens
from benchmarks.speculation.modes import ModeSlice, window
from draft_worker.__main__ import parse_arguments as draft_arguments
from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, CommitReceived, SendHints
from draft_worker.runner import expand
from draft_worker.scheduler import DraftScheduler
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.errors import ConfigurationError
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import common_pb2
from target_worker.__main__ import parse_arguments as target_arguments
from tests.benchmarks.figures import slice_of, window_of

VOCAB_SIZE = 50
ACCEPTED, PLAIN_TOKEN = common_pb2.TOKEN_ORIGIN_ACCEPTED, common_pb2.TOKEN_ORIGIN_PLAIN
RECOVERED, BONUS = common_pb2.TOKEN_ORIGIN_RECOVERED, common_pb2.TOKEN_ORIGIN_BONUS


class TestModes:
    def test_workers_understand_every_flag(self) -> None:
        for mode in modes(KINDS, [2, 7]):
            assert target_arguments(["--model", "m", *mode.target_arguments]).model == Path("m")
            assert draft_arguments(["--model", "m", *(mode.draft_arguments or ())]).model == Path("m")

    def test_plain_decoding_is_always_measured(self) -> None:
        assert [mode.name for mode in modes([], [3])] == [PLAIN]
        assert [mode.name for mode in modes([SYNCHRONOUS, AHEAD], [3, 5])] == [
            *(PLAIN, "synchronous-3", "synchronous-5", AHEAD)
        ]

    def test_defaults_are_all_modes_at_one_and_eight_streams(self) -> None:
        arguments = parse_arguments([])
        assert arguments.modes == list(KINDS)
        assert arguments.batch == [1, 8]


class SynchronousDraft:
    """A draft scheduler with a synchronous mode's flags; its model says the sum of what it sees, evenly likely."""

    def __init__(self, num_hints: int, sampling: SamplingParams) -> None:
        (mode,) = (each for each in modes([SYNCHRONOUS], [num_hints]) if each.name != PLAIN)
        flags = draft_arguments(["--model", "m", *(mode.draft_arguments or ())])
        limits = DraftLimits(
            max_lookahead=flags.max_lookahead,
            max_alternatives=flags.max_alternatives,
            min_reach=flags.min_reach,
        )
        self.scheduler = DraftScheduler(limits, BlockAllocator(400, 16), VOCAB_SIZE)
        self.scheduler.handle(AttachSession("a", 1, "target:1", [1, 2, 3], sampling, 7))
        self.text = [1, 2, 3]

    def said(self) -> list[int]:
        """Tokens that it sends until it has nothing more to do, in one line below the committed ones."""
        found: list[int] = []
        while (step := self.scheduler.next_step()) is not None:
            expansions = []
            for item in step.items:
                logits = torch.zeros(len(item.node_ids), VOCAB_SIZE)
                for row, said in enumerate(item.context.continuations):
                    logits[row, sum([*item.context.token_ids, *said]) % VOCAB_SIZE] = 2.0
                expansions.append(expand(item, logits, 1 + self.scheduler.limits.max_alternatives))
            for action in self.scheduler.finish_step(step, expansions):
                assert isinstance(action, SendHints)
                found += [hint.token_id for hint in action.hints]
        return found

    def commit(self, token_ids: list[int], num_tried: int, num_held: int) -> None:
        start = len(self.text)
        self.text += token_ids
        self.scheduler.handle(CommitReceived("a", start, token_ids, True, False, num_tried, num_held))


@pytest.mark.parametrize("num_hints", [1, 2, 3, 5])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_a_synchronous_draft_sends_its_hints_and_then_waits_for_the_verdict(
    num_hints: int, params: dict[str, float]
) -> None:
    draft = SynchronousDraft(num_hints, SamplingParams(max_tokens=200, ignore_eos=True, **params))  # type: ignore[arg-type]
    for held in (num_hints, 0, num_hints, num_hints // 2, num_hints):
        hints = draft.said()
        assert len(hints) == num_hints, "no alternatives, and none beyond"
        assert draft.said() == []
        extra = (hints[held] + 1) % VOCAB_SIZE if held < num_hints else 9
        draft.commit([*hints[:held], extra], num_hints, held)


class TestAlternatives:
    """`--max-alternatives` of the draft worker."""

    def test_more_or_fewer_than_permitted_are_refused(self) -> None:
        for number in (-1, 33):
            with pytest.raises(ConfigurationError, match="--max-alternatives"):
                DraftLimits(max_alternatives=number)

    def test_the_flag_and_the_limit_agree_on_what_is_usual(self) -> None:
        assert draft_arguments(["--model", "m"]).max_alternatives == DraftLimits().max_alternatives

    @pytest.mark.parametrize("number", [0, 1, 4])
    @pytest.mark.parametrize(
        "sampling",
        [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0, seed=3),
            SamplingParams(temperature=1.0),
        ],
        ids=["greedy", "coupled", "rejection"],
    )
    def test_a_node_keeps_as_many_as_it_may(self, sampling: SamplingParams, number: int) -> None:
        scheduler = DraftScheduler(DraftLimits(), BlockAllocator(400, 16), VOCAB_SIZE)
        scheduler.handle(AttachSession("a", 1, "target:1", [1, 2, 3], sampling, 7))
        step = scheduler.next_step()
        assert step is not None
        logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
        (usual,) = expand(step.items[0], logits)
        (expansion,) = expand(step.items[0], logits, 1 + number)
        assert len(expansion.token_ids) == len(expansion.chances) == 1 + number
        assert expansion.token_ids == usual.token_ids[: 1 + number]
        assert expansion.chances == pytest.approx(usual.chances[: 1 + number])
        assert expansion.distribution == usual.distribution


class TestWindow:
    def generation(self) -> Generation:
        """Steps at 1.0 (prefill), 1.1 (two of three hints held), 1.2 (all of one held), 1.4 (no hints)."""
        origins: list[int] = [PLAIN_TOKEN, ACCEPTED, ACCEPTED, RECOVERED, ACCEPTED, BONUS, PLAIN_TOKEN]
        arrivals = [(1.0, 1), (1.1, 3), (1.2, 2), (1.4, 1)]
        return Generation(list(range(7)), origins, first_token_at=1.0, ended_at=1.4, arrivals=arrivals)

    def test_counts_tokens_steps_and_hints(self) -> None:
        found = window([self.generation()], 0.5, 2.5)
        assert found.tokens_per_s == pytest.approx(7 / 2)
        assert (found.num_steps, found.num_tokens) == (3, 6), "the step that reads the prompt is left out"
        assert (found.num_accepted, found.num_rejected) == (3, 1)
        assert found.intervals_ms == pytest.approx([100, 100, 200])
        assert found.tpot_ms == pytest.approx([400 / 6])

    def test_what_lies_outside_does_not_count(self) -> None:
        found = window([self.generation(), Generation()], 1.15, 1.3)
        assert (found.num_steps, found.num_tokens, found.num_accepted, found.num_rejected) == (1, 2, 1, 0)
        assert found.tpot_ms == []


class TestSummary:
    def slices(self) -> dict[str, list[ModeSlice]]:
        plain = [slice_of(window_of(speed, num_steps=200), step_ms=5.0) for speed in (200.0, 190.0, 210.0)]

        def speculating(speedup: float, step_ms: float) -> list[ModeSlice]:
            own = [
                window_of(
                    speedup * each.window.tokens_per_s,
                    num_steps=200,
                    num_accepted=400,
                    num_rejected=100,
                    intervals_ms=(10.0, 9.0, 70.0, 8.0),
                )
                for each in plain
            ]
            return [slice_of(each, step_ms=step_ms, num_hints=600) for each in own]

        return {
            PLAIN: list(plain),
            "synchronous-3": speculating(1.5, 6.0),
            "synchronous-5": speculating(1.4, 6.0),
            AHEAD: speculating(1.8, 6.0),
            ENUMERATE: speculating(2.0, 6.0),
        }

    def test_speeds_are_compared_round_by_round_and_with_the_bound(self) -> None:
        summary = summarize(self.slices())
        own = summary["modes"][ENUMERATE]
        assert own["speedup"] == 2.0
        assert own["tokens_per_step"] == 3.0
        assert own["acceptance"] == 0.8
        assert own["hints_per_step"] == 3.0
        assert own["bound"] == pytest.approx(3.0 * 5 / 6)
        assert own["share_of_bound"] == pytest.approx(2.0 / 2.5)
        assert own["decode_share_of_bound"] == pytest.approx(own["decode_speedup"] / 2.5, abs=1e-3)
        assert own["analytic_tokens_per_step"] == pytest.approx(expected_tokens(0.8, 3), abs=1e-3)
        assert own["free_draft"]["speedup"] >= own["analytic_speedup"]
        assert "speedup" not in summary["modes"][PLAIN]

    def test_the_best_synchronous_setting_is_what_ahead_is_measured_by(self) -> None:
        summary = summarize(self.slices())
        assert summary["best_synchronous"] == "synchronous-3"
        assert summary["over_best_synchronous"][AHEAD]["ratio"] == pytest.approx(1.2)

    def test_without_synchronous_modes_there_is_no_best_one(self) -> None:
        slices = self.slices()
        assert best_synchronous({AHEAD: 2.0}) is None
        summary = summarize({name: slices[name] for name in (PLAIN, ENUMERATE)})
        assert "best_synchronous" not in summary

    def test_waits_to_the_limit_are_told_from_steps(self) -> None:
        own = slice_of(window_of(100.0, intervals_ms=(55.0, 60.0, 8.0, 51.0)))
        assert vain_wait_share([own], 5.0) == 0.5
        assert vain_wait_share([slice_of(window_of(1.0, intervals_ms=()))], 5.0) == 0.0

    def test_the_result_can_be_written_and_drawn(self, tmp_path: Path) -> None:
        batch = {"1": summarize(self.slices())}
        result = json.loads(json.dumps({"load": {"target": "t"}, "batch": batch}))
        draw(result, tmp_path / "ahead.svg")
        assert "best synchronous" in ElementTree.tostring(
            ElementTree.parse(tmp_path / "ahead.svg").getroot(), encoding="unicode"
        )
