"""Placements of the draft: predictions that can be done by hand, and the same money spent on more target."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from command_line.tune.findings import Settings
from command_line.tune.model import Pair, best_ahead, plain_rate, synchronous_rate
from command_line.tune.placement import measuring
from command_line.tune.placement.devices import CORE, GB_PER_S, PRICES, gpu_type, on_another_gpu, parse_prices
from command_line.tune.placement.measuring import on_one_more_core, why_no_more_cores
from command_line.tune.placement.prediction import (
    GpuProfiles,
    Placement,
    PlacementForecast,
    Placements,
    Sharing,
    forecast,
    on_cores,
    on_gpus,
    predict,
)
from command_line.tune.placement.report import placement_table, placement_words, placements_dict
from command_line.tune.times import StepTimes
from tests import models
from tests.command_line.tune.test_model import FREE, MIXED, flat

SURE = Pair(flat(10.0), flat(1.0), ((0,) * 60,), FREE)
WRONG = replace(SURE, texts=((4,) * 60,))
MORE = flat(6.0)  # the target's step with the draft's core


def by_name(found: Placements) -> dict[str, PlacementForecast]:
    return {each.placement.name: each for each in found.forecasts}


def shown(found: Placements) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(placement_table(found))
    return capture.get()


class TestByHand:
    def test_in_turns_is_synchronous_and_apart_is_ahead(self) -> None:
        for sharing, rate in (
            (Sharing.IN_TURNS, synchronous_rate(SURE, 1, 4)),
            (Sharing.APART, best_ahead(SURE, 1, 4)[0]),
            (Sharing.ALONE, plain_rate(SURE, 1)),
        ):
            found = forecast(Placement("p", sharing, SURE, 1.0), (1,), 4)
            assert found.tokens_per_s == pytest.approx((1e3 * rate,))

    def test_a_draft_in_turns_costs_its_steps(self) -> None:
        # Four hints of 1 ms and a step of 10 ms: five tokens in 14 ms.
        found = forecast(Placement("p", Sharing.IN_TURNS, SURE, 1.0), (1,), 4)
        assert found.tokens_per_s == pytest.approx((5e3 / 14.0,))
        assert found.num_hints == (4,)

    @pytest.mark.parametrize("sharing", [Sharing.IN_TURNS, Sharing.APART])
    def test_a_useless_draft_is_never_below_the_target_alone(self, sharing: Sharing) -> None:
        found = forecast(Placement("p", sharing, WRONG, 1.0), (1, 8), 4)
        assert found.num_hints == (0, 0)
        assert found.tokens_per_s == pytest.approx((100.0, 800.0))

    def test_replicas_share_a_batch_and_do_not_help_one_sequence(self) -> None:
        steep = replace(SURE, target=StepTimes((1, 8), (10.0, 80.0)))
        alone = Placement("p", Sharing.ALONE, steep, 1.0)
        twice = replace(alone, num_targets=2.0)
        assert forecast(twice, (1,), 4).tokens_per_s == forecast(alone, (1,), 4).tokens_per_s
        # Eight sequences on two replicas: four in a step of 40 ms, on each.
        assert forecast(twice, (8,), 4).tokens_per_s == pytest.approx((8e3 / 40.0,))
        shards = replace(twice, has_free_shards=True)
        assert forecast(shards, (1, 8), 4).tokens_per_s == pytest.approx((200.0, 200.0))


class TestCores:
    def test_the_target_with_the_drafts_core_is_the_alternative(self) -> None:
        found = predict(on_cores(SURE, MORE, 1), (1, 8), 4)
        assert list(by_name(found)) == [
            "target alone on 1 core",
            "target on 1 core, draft on another",
            "target on 2 cores, draft in turns with it",
            "target alone on 2 cores",
        ]
        draft = found.best_draft(0)
        assert draft is not None
        assert draft.placement.name == "target on 2 cores, draft in turns with it"  # 5 tokens in 10 ms
        other = found.without_draft(draft, 0)
        assert other is not None
        assert other.tokens_per_s == pytest.approx((1e3 / 6.0, 8e3 / 6.0))

    def test_a_machine_without_another_core_says_so(self) -> None:
        found = predict(on_cores(SURE, None, 2, "no core"), (1,), 4)
        assert len(found.forecasts) == 2
        assert placement_words(found)[-1] == "Not compared: no core."
        draft = found.best_draft(0)
        assert draft is not None
        assert found.without_draft(draft, 0) is None

    def test_the_sentence_weighs_the_draft_against_its_cost(self) -> None:
        worth, *_ = placement_words(predict(on_cores(SURE, MORE, 1), (1,), 4))
        assert worth.endswith("the draft is worth its cost.")
        wrong, *_ = placement_words(predict(on_cores(WRONG, MORE, 1), (1,), 4))
        assert "no placement of the draft pays" in wrong
        # Two tokens in 14 ms beside the target, or in 7 with all cores, where the target alone takes 6 for them.
        half = replace(SURE, texts=((0, 4) * 30,), draft=flat(4.0))
        less, *_ = placement_words(predict(on_cores(half, flat(3.0), 1), (1,), 1))
        assert "no placement of the draft pays" in less


class TestGpus:
    PROFILES = GpuProfiles(MIXED, "h100", flat(30.0))

    def test_every_placement_that_costs_more_has_its_alternative(self) -> None:
        found = predict(on_gpus(self.PROFILES, "l4", dict(PRICES)), (1, 8), 4)
        for each in found.forecasts:
            if each.placement.sharing == Sharing.ALONE:
                continue
            for is_bound in (False, each.placement.price > PRICES["h100"]):
                assert found.without_draft(each, 0, is_bound=is_bound) is not None, each.placement.name
        names = by_name(found)
        assert names["draft on one l4"].placement.price == PRICES["h100"] + PRICES["l4"]
        assert names["draft on a core of the CPU"].placement.price == PRICES["h100"] + PRICES[CORE]
        assert names["2 × the target alone, as replicas"].placement.is_equal_cost
        assert "3350 to 300 GB/s" in " ".join(placement_words(found))

    def test_prices_decide_what_the_money_buys(self) -> None:
        dear = predict(on_gpus(self.PROFILES, "l4", parse_prices("h100=2, l4=1")), (8,), 4)
        cheap = predict(on_gpus(self.PROFILES, "l4", parse_prices("h100=20")), (8,), 4)

        def alternative(found: Placements) -> float:
            like = by_name(found)["draft on one l4"]
            other = found.without_draft(like, 0)
            assert other is not None
            return other.tokens_per_s[0]

        assert alternative(dear) > alternative(cheap)

    def test_an_unknown_gpu_and_an_unmeasured_cpu_are_said(self) -> None:
        found = predict(on_gpus(GpuProfiles(MIXED, None), "l4", dict(PRICES)), (1,), 4)
        assert "type of this GPU is not known" in found.why_no_more
        assert "not measured on the CPU" in found.why_no_more
        assert not [name for name in by_name(found) if "l4" in name]

    def test_the_drafts_own_type_is_not_predicted_twice(self) -> None:
        found = predict(on_gpus(replace(self.PROFILES, gpu="l4"), "l4", dict(PRICES)), (1,), 4)
        assert "draft on one l4" not in by_name(found)


class TestDevices:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
            ("NVIDIA A100-SXM4-80GB", "a100"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA L4", "l4"),
            ("Radeon", None),
        ],
    )
    def test_types_are_known_by_the_drivers_names(self, name: str, kind: str | None) -> None:
        assert gpu_type(name) == kind

    def test_every_gpu_has_a_price_and_a_bandwidth(self) -> None:
        assert set(PRICES) - {CORE} == set(GB_PER_S)

    @pytest.mark.parametrize("wrong", ["h100", "h100=", "h100=0", "h100=nan", "h100=inf", "abacus=3"])
    def test_a_wrong_price_is_refused(self, wrong: str) -> None:
        with pytest.raises(ValueError, match=wrong.partition("=")[0]):
            parse_prices(f"l4=2,{wrong}")

    def test_steps_scale_with_the_bandwidth_and_never_below_what_was_measured(self) -> None:
        times = StepTimes((1, 8), (1.0, 2.0), 0.5)
        slower = on_another_gpu(times, "a10g", "l4")
        assert slower == StepTimes((1, 8), (2.0, 4.0), 1.0)
        assert on_another_gpu(times, "l4", "h100") == times


class TestReport:
    FOUND = predict(on_cores(MIXED, StepTimes.measured([(1, 6.0), (16, 10.0)]), 1), (1, 8), 4)

    def test_the_table_marks_the_alternative_and_shows_hints(self) -> None:
        text = shown(self.FOUND)
        assert "= target alone on 2 cores" in text
        best = self.FOUND.best_draft(0)
        assert best is not None
        assert f"{best.tokens_per_s[0]:.0f} ({best.num_hints[0]})" in text

    def test_json_has_every_row_and_the_words(self) -> None:
        read = json.loads(json.dumps(placements_dict(self.FOUND)))
        assert [each["is_equal_cost"] for each in read["placements"]] == [False, False, False, True]
        assert read["batches"] == [1, 8]
        assert read["words"] == placement_words(self.FOUND)
        assert len(read["words"]) == 2

    @pytest.mark.parametrize(
        ("draft", "other", "words"),
        [
            (150.0, 200.0, "more of the target is worth more than a draft"),
            (200.0, 150.0, "the draft is worth its cost"),
            (200.0, 198.0, "about the same"),
        ],
    )
    def test_the_verdict_is_on_equal_cost(self, draft: float, other: float, words: str) -> None:
        def made(name: str, sharing: Sharing, price: float, rate: float, gamma: int) -> PlacementForecast:
            return PlacementForecast(Placement(name, sharing, MIXED, price), (rate,), (gamma,))

        cheap, dear = made("cheap", Sharing.ALONE, 1.0, 100.0, 0), made("dear", Sharing.ALONE, 4.0, 900.0, 0)
        found = Placements((1,), (cheap, made("own", Sharing.APART, 2.0, draft, 3),
                                  made("more", Sharing.ALONE, 2.0, other, 0), dear))  # fmt: skip
        (line,) = placement_words(found)
        assert line.startswith(f"At batch 1 the fastest is: own, {draft:.0f} tokens/s; for the same cost, more gives")
        assert line.endswith(f"{other:.0f}: {words}.")


class TestMeasuring:
    def test_one_more_core_leaves_the_threads_as_they_were(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.setattr(measuring, "usable_cores", lambda: [0, 1])
        own = Settings("float32", "none", 1, context_len=16, num_tokens=4, budget_s=0.05)
        before = torch.get_num_threads()
        found = on_one_more_core(models.engine("llama"), own)
        assert found is not None
        assert found.times.num_tokens[0] == 1
        assert torch.get_num_threads() == before

    def test_without_a_core_or_on_a_gpu_nothing_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "usable_cores", lambda: [0])
        own = Settings("float32", "none", 1, context_len=16, num_tokens=4, budget_s=0.05)
        assert "may use 1 core:" in why_no_more_cores(own)
        assert on_one_more_core(models.engine("llama"), own) is None
        monkeypatch.setattr(measuring, "usable_cores", lambda: [0, 1])
        assert on_one_more_core(models.engine("llama"), replace(own, device="cuda")) is None
