"""Pure parts of the comparison of sources: blocks, replays, rank and words."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from command_line.draft_kinds import Kind
from command_line.tune.advice import advise
from command_line.tune.agreement import DraftedRanks, Ranks, acceptances, committed_lengths, num_agreeing
from command_line.tune.findings import ModelProfile, Settings
from command_line.tune.model import HintPace, Pair, ahead_rate, mean_length, plain_rate
from command_line.tune.sources.commands import flags
from command_line.tune.sources.compare import judge
from command_line.tune.sources.comparison import Comparison, best_at, ranked
from command_line.tune.sources.document import as_dict
from command_line.tune.sources.forecasts import Place, Source, forecast, free_rate, series_rate
from command_line.tune.sources.lookup import lookup_blocks
from command_line.tune.sources.mask_path import MaskPath, accepted_by_length, mean_passes, num_leading
from command_line.tune.sources.offers import Offer
from command_line.tune.sources.report import acceptance_table, ranking_table, verdict, warnings
from command_line.tune.times import Overheads, StepTimes
from tests.command_line.tune.test_model import FREE, MIXED, flat, text

TARGET = StepTimes.measured([(1, 10.0), (16, 12.0), (64, 40.0)])


def drafted(*blocks: int, num_hints: int = 4) -> DraftedRanks:
    """A sequence whose blocks have so many accepted hints, by position."""
    accepted = [
        accepted_by_length(count, min(num_hints, len(blocks) - position)) for position, count in enumerate(blocks)
    ]
    return DraftedRanks(tuple(0 if count else 4 for count in blocks), tuple(accepted))


class TestDraftedRanks:
    def test_blocks_decide_and_not_the_ranks_of_later_positions(self) -> None:
        ranks = drafted(1, 3, 2, 1, 0)
        assert list(ranks) == [0, 0, 0, 0, 4]
        assert [num_agreeing(ranks, 0, count) for count in (0, 1, 2, 4)] == [0, 1, 1, 1]
        assert num_agreeing(ranks, 1, 3) == 3
        assert num_agreeing(ranks, 5, 3) == 0

    def test_a_replay_steps_from_block_to_block(self) -> None:
        ranks = drafted(1, 0, 2, 0, 0, 0, 0, 0)
        assert committed_lengths(ranks, 2) == [2, 3, 1]
        assert mean_length([ranks], 2) == 2.0

    def test_a_block_is_as_long_as_the_drafter_makes_it(self) -> None:
        assert num_agreeing(drafted(2, 0, 0, 0, num_hints=2), 0, 4) == 2

    def test_every_position_needs_a_block(self) -> None:
        with pytest.raises(ValueError, match="2 ranks"):
            DraftedRanks((0, 0), ((1,),))


class TestMaskPath:
    def test_a_pass_guesses_a_token_and_one_for_each_mask(self) -> None:
        path = MaskPath(actual=[1, 2, 3, 4, 5, 6])
        path.take([1, 2, 3], num_masks=2)
        assert (path.token_ids, path.unread, path.accepted) == ([1, 2, 3], [1, 2, 3], [1, 2, 3])
        path.take([2, 3, 4, 5, 6], num_masks=2)
        assert path.is_complete
        assert path.passes == [1, 1, 1, 2, 2, 2]

    def test_a_token_that_was_read_replaces_the_guess_of_a_mask_and_what_stands_behind(self) -> None:
        path = MaskPath(actual=[1, 2, 3, 4])
        path.take([1, 9, 8], num_masks=2)
        assert path.accepted == [1, 1, 1]  # by length, as the block was when it became so long
        path.take([2, 7, 7, 7, 7], num_masks=2)
        assert (path.token_ids, path.num_read, path.unread) == ([1, 2], 1, [2])
        path.take([3, 4, 5], num_masks=2)
        assert path.token_ids == [1, 2, 3, 4, 5]
        assert (path.accepted, path.passes) == ([1, 1, 1, 4], [1, 1, 1, 3])

    def test_without_masks_it_drafts_token_by_token(self) -> None:
        path = MaskPath(actual=[5, 6])
        path.take([5], num_masks=0)
        assert path.unread == [5]
        path.take([7], num_masks=0)
        assert (path.accepted, path.passes) == ([1, 1], [1, 2])

    def test_mean_passes_never_fall(self) -> None:
        assert mean_passes([[1, 1, 2], [1, 2], [1, 3]]) == (1.0, 2.0, 2.0)
        assert mean_passes([]) == ()

    def test_leading_guesses(self) -> None:
        assert num_leading([1, 2, 9], [1, 2, 3, 4]) == 2
        assert num_leading([1, 2], [1, 2, 3]) == 2
        assert num_leading([], [1]) == 0


class TestPasses:
    def test_hints_of_one_pass_arrive_together(self) -> None:
        pair = Pair(flat(10.0), flat(2.0), ((0,) * 31,), FREE, passes=(1.0, 1.0, 2.0, 2.0))
        pace = HintPace.of(pair, 1)
        assert [pace.delay_ms(index) for index in range(6)] == pytest.approx([3.0, 3.0, 5.0, 5.0, 5 + 2 / 3, 5 + 4 / 3])
        # One wait for two hints of the first pass, then all are there in time.
        assert ahead_rate(pair, 1, 2, num_waited=2) == pytest.approx(30 / (3.0 + 10 * 10.0))

    def test_a_chain_gives_several_hints_for_little_more_time(self) -> None:
        pair = Pair(flat(10.0), flat(2.0), ((0,),), FREE, num_chained=1)
        pace = HintPace.of(pair, 1)
        assert [pace.delay_ms(index) for index in range(4)] == [6.0, 6.0, 10.0, 10.0]

    def test_rows_of_masks_leave_less_room_for_other_sequences(self) -> None:
        plain = HintPace.of(MIXED, 4)
        masked = HintPace.of(replace(MIXED, rows_per_pass=4), 4)
        assert masked.gap_ms == 2 * plain.gap_ms


class TestLookup:
    def test_a_repetition_is_found_after_two_tokens(self) -> None:
        found = lookup_blocks([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 1, 2], 3)
        assert found.num_offered[:2] == (0, 0)  # nothing ends as the prompt does, then one token alone matches
        assert found.num_offered[2] == 3
        assert found.ranks.accepted[2] == (1, 2, 3)
        assert found.ranks.accepted[5] == (1, 2)

    def test_a_text_that_never_repeats_gets_none(self) -> None:
        found = lookup_blocks(range(10), range(10, 40), 4)
        assert found.num_offered == (0,) * 30
        assert set(found.ranks) == {4}

    def test_long_prompts_are_read_in_full(self) -> None:
        prompt = [random.Random(0).randrange(10**6) for _ in range(3000)]
        assert lookup_blocks(prompt, prompt[:8], 4).ranks.accepted[4] == (1, 2, 3, 4)

    def test_only_what_is_offered_is_verified(self) -> None:
        pair = Pair(StepTimes.measured([(1, 10.0), (3, 30.0)]), flat(1.0), (drafted(0, 0, 2, 0, 0, 0, 0),), FREE)
        source = Source(Offer(Kind.LOOKUP, Path("t")), Place.TARGET, pair, num_offered=((0, 0, 2, 0, 0, 0, 0),))
        # Two plain steps, then one of three tokens: 5 tokens in 50 ms.
        assert free_rate(source, 1, 2) == pytest.approx(5 / 50.0)


class TestSeries:
    def test_step_and_passes_follow_one_another(self) -> None:
        pair = Pair(flat(10.0), flat(2.0), (drafted(*[2] * 100),), FREE)
        # Three tokens for a step and two passes.
        assert series_rate(pair, 1, 2, reads_all=True) == pytest.approx(3 / 14.0)

    def test_the_first_pass_reads_what_was_committed(self) -> None:
        pair = Pair(flat(10.0), StepTimes.measured([(1, 1.0), (11, 11.0)]), (drafted(*[2] * 100),), FREE)
        assert series_rate(pair, 2, 2, reads_all=True) == pytest.approx(3 / (10.0 + 6.0 + 2.0))
        assert series_rate(pair, 2, 2, reads_all=False) == pytest.approx(3 / (10.0 + 2.0 + 2.0))

    def test_medusa_needs_one_pass_for_all(self) -> None:
        pair = Pair(flat(10.0), flat(2.0), (drafted(*[2] * 100),), FREE, passes=(1.0, 1.0))
        assert series_rate(pair, 1, 2, reads_all=False) == pytest.approx(3 / 12.0)

    def test_a_head_that_is_never_right_costs_its_passes(self) -> None:
        pair = Pair(flat(10.0), flat(2.0), (drafted(*[0] * 100),), FREE)
        found = forecast(Source(Offer(Kind.EAGLE3, Path("h")), Place.BESIDE, pair), 1, 4)
        assert found.num_speculative_tokens == 0
        assert found.speedup == 1.0
        assert found.by_num_hints[0] == pytest.approx(10 / 12)


PROFILE = ModelProfile(flat(1.0), 10, 0.02, 256)
LENGTHS = random.Random(3)
BLOCKS = drafted(*(LENGTHS.choice((0, 1, 2, 4)) for _ in range(400)))


def source(
    kind: Kind, place: Place, pair: Pair, *, num_layers: int | None = None, num_masks: int | None = None
) -> Source:
    return Source(Offer(kind, Path(f"the {kind.name}"), num_layers), place, pair, PROFILE, num_masks)


def pair_of(ranks: Ranks, draft_ms: float = 0.5) -> Pair:
    return Pair(TARGET, flat(draft_ms), (ranks,))


def comparison(*sources: Source, batches: tuple[int, ...] = (1, 8)) -> Comparison:
    judged = ranked([judge(each, batches, 4) for each in sources])
    best = Comparison(
        Path("big model"), Settings("bfloat16", "int8", 4, 256, 400, 10.0), "a machine",
        ModelProfile(TARGET, 1000, 0.02, 256), Overheads(), judged, (), 1, 400, 1,
    )  # fmt: skip
    found = best.best
    if found is None or found.source.place is not Place.DRAFT_WORKER:
        return best
    return replace(best, advice=tuple(advise(found.source.pair, batch, 4) for batch in batches))


GOOD = source(Kind.MODEL, Place.DRAFT_WORKER, pair_of(text(0.8)))
MASKED = source(Kind.MASKS, Place.DRAFT_WORKER, replace(pair_of(text(0.8)), passes=(1.0, 1.2, 1.6, 2.0)), num_masks=3)
EXIT = source(Kind.EARLY_EXIT, Place.DRAFT_WORKER, pair_of(text(0.5)), num_layers=2)
REMOTE_HEAD = source(Kind.EAGLE3, Place.DRAFT_WORKER, pair_of(BLOCKS))
LOCAL_HEAD = source(Kind.EAGLE3, Place.BESIDE, pair_of(BLOCKS))
WRONG = source(Kind.MODEL, Place.DRAFT_WORKER, pair_of((4,) * 400))
NO_LOOKUP = replace(source(Kind.LOOKUP, Place.TARGET, pair_of(drafted(*[0] * 400))), num_offered=((0,) * 400,))
LOOKUP = replace(NO_LOOKUP, pair=pair_of(drafted(*[4] * 400)), num_offered=((4,) * 400,))


class TestRanking:
    def test_the_fastest_at_the_smallest_batch_comes_first(self) -> None:
        judged = comparison(WRONG, EXIT, GOOD, NO_LOOKUP).judged
        assert [each.source for each in judged][:2] == [GOOD, EXIT]
        speedups = [each.forecasts[0].speedup for each in judged]
        assert speedups == sorted(speedups, reverse=True)

    def test_of_equal_sources_the_one_that_needs_least(self) -> None:
        free = replace(LOOKUP, pair=replace(GOOD.pair, texts=(BLOCKS,)), num_offered=((4,) * 400,))
        twin = replace(GOOD, pair=replace(free.pair, draft=flat(1e-9), overheads=FREE))
        found = [judge(replace(each, pair=replace(each.pair, overheads=FREE)), (1,), 4) for each in (twin, free)]
        speedups = [each.forecasts[0].speedup for each in found]
        assert speedups[0] == pytest.approx(speedups[1], rel=0.02)
        best = best_at(found, 0)
        assert best is not None
        assert best.source.place is Place.TARGET

    def test_nothing_pays(self) -> None:
        found = comparison(WRONG, NO_LOOKUP)
        assert found.best is None
        assert "Do not speculate" in verdict(found)[0]
        assert all("--no-draft" in line for line in flags(found) if "serve" in line)

    def test_another_source_for_the_largest_batch_is_named(self) -> None:
        # 64 sequences share one slow draft worker; lookup finds four tokens at every twelfth position.
        blocks, offered = drafted(*[*[0] * 11, 4] * 33), (*[0] * 11, 4) * 33
        draft = replace(GOOD, pair=replace(pair_of(text(0.97), draft_ms=3.0), target=flat(10.0)))
        lookup = replace(LOOKUP, pair=replace(pair_of(blocks), target=flat(10.0)), num_offered=(offered,))
        found = comparison(draft, lookup, batches=(1, 64))
        first, _, second = verdict(found)
        assert first.startswith("Use the MODEL")
        assert second.startswith("At batch 64 lookup alone is better: 1.")


class TestWords:
    def test_the_verdict_names_source_place_and_gain(self) -> None:
        found = comparison(GOOD, NO_LOOKUP)
        assert found.best is not None
        each = found.best.forecasts[0]
        sentence, target = verdict(found)
        assert "a step costs 1.25× that of one token" in target
        assert sentence.startswith("Use the MODEL (draft model) on a draft worker: about ")
        assert f"{each.speedup:.2f}× at batch 1 with γ = {each.num_speculative_tokens}" in sentence

    @pytest.mark.parametrize(
        ("chosen", "words"),
        [
            (MASKED, "the MASKS with 3 mask tokens on a draft worker"),
            (replace(MASKED, num_masks=0), "the MASKS with no mask tokens on a draft worker"),
            (EXIT, "the target's first 2 layers on a draft worker"),
            (LOCAL_HEAD, "the EAGLE3 (EAGLE-3 head) beside the target's model"),
            (LOOKUP, "lookup alone"),
        ],
        ids=["masks", "no masks", "exit", "head", "lookup"],
    )
    def test_every_source_has_its_words(self, chosen: Source, words: str) -> None:
        assert words in verdict(comparison(chosen, NO_LOOKUP))[0]

    def test_tables_have_every_source(self) -> None:
        found = comparison(GOOD, MASKED, EXIT, REMOTE_HEAD, LOCAL_HEAD, NO_LOOKUP)
        console = Console(width=80)
        with console.capture() as capture:
            for table in (acceptance_table(found), ranking_table(found)):
                console.print(table)
        shown = capture.get()
        for words in ("the MODEL", "the MASKS, 3 masks", "2 layers of the target", "beside the target", "lookup"):
            assert words in shown
        assert shown.count("the EAGLE3") == 4  # in each table at both places

    def test_doubts_are_named(self) -> None:
        found = comparison(GOOD, NO_LOOKUP)
        assert warnings(found) == []
        short = replace(GOOD, pair=pair_of(text(0.8, 100)), profile=replace(PROFILE, spread=0.5))
        told = " ".join(warnings(replace(comparison(short, NO_LOOKUP), num_tokens=200, num_prompts=3)))
        for words in ("differ by ±50%", "1 of 3 prompts", "only 200 tokens", "with 100 of 200 tokens"):
            assert words in told

    def test_machines_get_every_source(self) -> None:
        found = comparison(GOOD, MASKED, NO_LOOKUP)
        read = as_dict(found)
        assert [each["name"] for each in read["sources"]] == [each.source.name for each in found.judged]
        assert found.best is not None
        assert read["best"] == {"name": found.best.source.name, "place": "draft worker"}
        assert read["flags"] == flags(found)
        assert read["sources"][0]["forecasts"][0]["speedup"] == round(found.judged[0].forecasts[0].speedup, 4)
        lengths = [each.mean_length for each in acceptances(GOOD.pair.texts, 4)]
        [good] = [each for each in read["sources"] if each["num_masks"] is None and each["kind"] == "draft model"]
        assert [each["mean_length"] for each in good["acceptance"]] == [round(length, 4) for length in lengths]


class TestCommands:
    def test_a_draft_model(self) -> None:
        serve, target, draft = flags(comparison(GOOD, NO_LOOKUP))
        assert serve.startswith("outrider serve --target 'big model' --draft 'the MODEL' --dtype bfloat16")
        assert "--num-speculative-tokens" in target
        assert "--num-threads 4" in target
        assert draft == "outrider draft-worker --model 'the MODEL' --dtype bfloat16 --num-threads 1"

    def test_masks_are_counted_where_they_are_not_the_usual_one(self) -> None:
        target, draft = flags(comparison(MASKED, NO_LOOKUP))
        assert target.startswith("outrider target-worker")
        assert "--num-mask-tokens 3" in draft
        assert "--num-mask-tokens" not in " ".join(flags(comparison(replace(MASKED, num_masks=1), NO_LOOKUP)))

    def test_early_exit(self) -> None:
        serve, _, draft = flags(comparison(EXIT, NO_LOOKUP))
        assert "--early-exit-layer 2" in serve
        assert "--early-exit-layer 2" in draft

    def test_a_head_on_a_draft_worker(self) -> None:
        serve, target, draft = flags(comparison(REMOTE_HEAD, NO_LOOKUP))
        assert "--draft 'the EAGLE3'" in serve
        assert "--draft-head 'the EAGLE3' --no-local-head" in target
        assert "--model 'the EAGLE3' --target-tokenizer 'big model'" in draft

    def test_a_head_beside_the_target(self) -> None:
        serve, target = flags(comparison(LOCAL_HEAD, NO_LOOKUP))
        assert serve.startswith("outrider serve --target 'big model' --draft-head 'the EAGLE3'")
        assert "--draft-head 'the EAGLE3'" in target
        assert "--no-local-head" not in target

    def test_lookup_needs_no_draft(self) -> None:
        serve, target = flags(comparison(LOOKUP, WRONG))
        assert "--no-draft" in serve
        assert "--num-speculative-tokens" in target


def test_plain_decoding_is_the_measure_of_all() -> None:
    pair = pair_of(BLOCKS)
    found = forecast(LOCAL_HEAD, 1, 2)
    assert found.by_num_hints[1] == pytest.approx(series_rate(pair, 1, 2, reads_all=True) / plain_rate(pair, 1))
