"""The demo pair made longer, and what `long_prompts` and `prefix_cache` make of their rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import long_prompts, prefix_cache
from benchmarks.shared.long_models import lengthen
from benchmarks.shared.worker_pair import Generation
from command_line.checkout import DEMO_TARGET
from demo.corpus import held_out_prompts
from outrider.engine.loading.loading import load_model
from outrider.engine.model import SequenceChunk
from tests import models

IN_CHECKOUT = pytest.mark.skipif(not DEMO_TARGET.is_dir(), reason="the demo pair is not in this checkout")


class TestLongModels:
    def test_a_longer_model_takes_longer_texts(self, tmp_path: Path) -> None:
        folder = lengthen(models.model_dir("llama"), tmp_path / "long", 1200)
        engine = load_model(models.engine_config(folder, max_num_seqs=1))
        assert engine.max_model_len == 1200
        kv = engine.new_sequence()
        kv.extend(1100)
        assert engine.forward([SequenceChunk(kv, [5] * 1100, 1)]).isfinite().all()
        kv.free()

    def test_one_that_is_long_enough_is_as_it_was(self, tmp_path: Path) -> None:
        source = models.model_dir("llama")
        folder = lengthen(source, tmp_path / "same", models.MAX_MODEL_LEN)
        assert (folder / "config.json").read_text() == (source / "config.json").read_text()

    def test_other_positions_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="longrope"):
            lengthen(models.model_dir("longrope"), tmp_path / "long", 1200)


def round_of(before_ms: float, while_ms: float, chunk_ms: float = 50.0) -> long_prompts.Round:
    return long_prompts.Round([before_ms] * 50, [while_ms] * 50, chunk_ms, 400.0, [1000.0, 3000.0], (90.0, 9.0))


class TestLongPrompts:
    def test_gaps_are_counted_where_they_end_and_within_a_stream(self) -> None:
        streams = [
            Generation(arrivals=[(0.0, 1), (1.0, 4), (3.0, 2)]),
            Generation(arrivals=[(0.5, 1), (2.5, 1)]),
        ]
        assert long_prompts.gaps_ms(streams, 0.9, 2.6) == [1000.0, 2000.0]
        assert long_prompts.gaps_ms(streams, 2.6, 5.0) == [2000.0]
        assert long_prompts.rate(streams, 0.9, 2.9) == pytest.approx(5 / 2)

    def test_the_rise_is_counted_in_chunks_within_rounds(self) -> None:
        made = long_prompts.summarize([round_of(10.0, 60.0), round_of(20.0, 120.0, 100.0)])
        assert made["rise_over_chunk"]["p99"]["median"] == 1.0
        assert made["itl_before_ms"]["p50"]["median"] == 15.0
        assert made["ttft_while_ms"]["last"]["median"] == 3000.0

    def test_the_plot_shows_all_three(self, tmp_path: Path) -> None:
        load = {"streams": 4, "prompts": 8, "prompt_tokens": 4000}
        made = {"load": load, **long_prompts.summarize([round_of(10.0, 60.0)])}
        long_prompts.draw(made, tmp_path / "plot.svg")
        drawn = (tmp_path / "plot.svg").read_text()
        assert "before, and one chunk" in drawn
        assert "8 prompts of 4000 tokens" in drawn
        assert "1.00" in long_prompts.table(made)


def answer(ttft_ms: float, num_accepted: int, text: str = "x") -> prefix_cache.Answer:
    statistics = {
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": 100,
        "mean_acceptance_length": 1 + num_accepted / 50,
        "num_steps": 50,
    }
    return prefix_cache.Answer(ttft_ms, ttft_ms + 500.0, text, 1984, statistics)


class TestPrefixCache:
    def test_ratios_are_taken_within_rounds(self, tmp_path: Path) -> None:
        pairs = [
            prefix_cache.Pair(answer(400.0, 60), answer(40.0, 60)),
            prefix_cache.Pair(answer(800.0, 40), answer(40.0, 50, "y")),
        ]
        made = prefix_cache.summarize(pairs)
        assert made["ttft_again_over_first"]["median"] == 0.075
        assert made["draft_acceptance_rate"] == {"first": 0.5, "again": 0.55}
        assert made["draft_acceptance_rate_difference"]["median"] == pytest.approx(0.05)
        assert made["same_texts"] == 1
        result = {"load": {"prompt_tokens": 2000}, **made}
        assert "1 times of 2" in prefix_cache.table(result)
        prefix_cache.draw(result, tmp_path / "plot.svg")
        assert "A prompt of 2000 tokens" in (tmp_path / "plot.svg").read_text()

    @IN_CHECKOUT
    def test_prompts_are_as_long_as_asked_for_and_all_different(self) -> None:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
        prompts = prefix_cache.prompts_of(DEMO_TARGET, 4, 2000, seed=0)
        assert len({prompt[:40] for prompt in prompts}) == 4
        assert all(abs(len(tokenizer.encode(prompt).ids) - 2000) < 20 for prompt in prompts)
        assert held_out_prompts(1)[0] not in prompts


def test_flags_have_their_defaults() -> None:
    assert long_prompts.parse_arguments([]).prompt_tokens == 4000
    assert prefix_cache.parse_arguments([]).prompt_tokens == 2000
    assert json.dumps(vars(prefix_cache.parse_arguments(["--json"])), default=str)
