"""Tests of chunk costs: learned from steps, they shorten late chunks so that these take no longer than early ones."""

from __future__ import annotations

import random

import pytest

from outrider.engine.chunk_cost import MIN_CHUNK_LEN, OUTLIER, Chunk, ChunkCost

TOKEN_MS, READ_MS = 0.2, 0.15  # of a token, and of a thousand that it reads


def true_ms(*chunks: Chunk) -> float:
    return sum(TOKEN_MS * each.num_tokens + READ_MS * each.num_read for each in chunks)


def learned(noise: float = 0.0) -> ChunkCost:
    """A cost model that has observed the chunks of one long prompt."""
    chance, cost = random.Random(1), ChunkCost()
    for start in range(0, 4096, 512):
        chunk = Chunk(start, 512)
        cost.observe([chunk], true_ms(chunk) * (1.0 + chance.uniform(-noise, noise)))
    return cost


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_one_prompt_teaches_what_a_token_costs_and_what_reading_costs(noise: float) -> None:
    cost = learned(noise)
    for start, num_tokens in ((0, 512), (1000, 100), (3584, 512)):
        chunk = Chunk(start, num_tokens)
        assert cost.ms(chunk) == pytest.approx(true_ms(chunk), rel=0.05 + noise)


@pytest.mark.parametrize("start", [0, 512, 2000, 3900, 30_000])
@pytest.mark.parametrize("budget", [64, 512])
def test_a_late_chunk_is_as_long_as_fits_into_the_time_of_an_early_one(start: int, budget: int) -> None:
    cost = learned()
    most_ms = cost.ms(Chunk(0, budget))
    num_tokens = cost.num_tokens_within(most_ms, start)
    assert cost.ms(Chunk(start, num_tokens)) <= most_ms * (1 + 1e-6)
    assert cost.ms(Chunk(start, num_tokens + 1)) > most_ms
    assert num_tokens == budget if start == 0 else num_tokens < budget


def test_nothing_is_bounded_before_anything_is_known() -> None:
    cost = ChunkCost()
    assert cost.ms(Chunk(0, 512)) == 0.0
    assert cost.num_tokens_within(0.0, 5000) > 1 << 20


def test_chunks_at_one_place_say_nothing_about_other_places() -> None:
    """Least squares alone could blame either cause, or one of them with the wrong sign."""
    cost = ChunkCost()
    for _ in range(5):
        cost.observe([Chunk(0, 512)], 100.0)
    assert cost.ms(Chunk(0, 512)) == pytest.approx(100.0, rel=0.02)
    assert cost.token_ms > 0.0
    assert cost.read_ms >= 0.0


def test_steps_of_no_time_teach_nothing_and_break_nothing() -> None:
    cost = ChunkCost()
    cost.observe([Chunk(0, 512)], 0.0)
    assert cost.num_tokens_within(0.0, 0) > 1 << 20
    cost.observe([Chunk(0, 512)], 100.0)
    assert cost.token_ms > 0.0


def test_reading_never_makes_a_token_cheaper() -> None:
    cost = ChunkCost()
    for start, ms in ((0, 100.0), (1000, 60.0), (3000, 20.0)):
        cost.observe([Chunk(start, 512)], ms)
    assert cost.read_ms == 0.0
    assert cost.token_ms > 0.0


def test_a_step_that_was_held_up_counts_as_a_slow_one() -> None:
    cost = learned()
    before = cost.ms(Chunk(0, 512))
    cost.observe([Chunk(0, 512)], 100 * before)
    assert cost.ms(Chunk(0, 512)) < OUTLIER * before


def test_several_prompts_in_one_step_count_together() -> None:
    apart, together = ChunkCost(), ChunkCost()
    for start in (0, 500, 1000, 2000):
        chunks = [Chunk(start, 200), Chunk(0, 100)]
        together.observe(chunks, true_ms(*chunks))
        apart.observe(chunks[:1], true_ms(*chunks[:1]))
    for cost in (apart, together):
        assert cost.ms(Chunk(1500, 300)) == pytest.approx(true_ms(Chunk(1500, 300)), rel=0.05)


def test_a_chunk_is_cut_to_no_crumbs() -> None:
    cost = learned()
    whole = Chunk(1000, 300)
    assert cost.shorten(whole, 10 * true_ms(whole), is_first=False) == whole
    half = cost.shorten(whole, true_ms(whole) / 2, is_first=False)
    assert 140 <= half.num_tokens <= 160
    for ms in (0.0, -5.0, true_ms(Chunk(1000, MIN_CHUNK_LEN - 2))):
        assert cost.shorten(whole, ms, is_first=False).num_tokens == 0
        assert cost.shorten(whole, ms, is_first=True).num_tokens == MIN_CHUNK_LEN
    assert cost.shorten(Chunk(1000, 3), 0.0, is_first=True).num_tokens == 3
