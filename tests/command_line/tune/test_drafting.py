"""Blocks drafted along sequences are those that a run of the whole sequence drafts anew."""

from __future__ import annotations

import pytest
import torch

from command_line.tune.agreement import num_agreeing
from command_line.tune.findings import Settings
from command_line.tune.profile import step_times
from command_line.tune.sources.drafting import head_blocks, mask_blocks, medusa_blocks
from command_line.tune.sources.mask_path import MaskPath, num_leading
from command_line.tune.sources.measuring import medusa_times, read_features
from command_line.tune.texts import GeneratedText, ranks
from outrider.engine.heads.loading import load_medusa
from outrider.engine.model import Engine
from outrider.engine.sequence_chunk import SequenceChunk
from tests import models
from tests.command_line.tune.small_target import (
    eagle3_dir,
    eagle3_engine,
    medusa_dir,
    target_dir,
    target_engine,
)

PROMPT = (5, 17, 80, 3, 90)
NUM_HINTS = 4
MASK = 9


def head_draft(committed: list[int], count: int) -> list[int]:
    """The head over the whole sequence for each token, on the target's features as far as these are known."""
    head = eagle3_engine()
    [features] = read_features(target_engine(), eagle3_dir(), [GeneratedText(tuple(committed), ())])
    drafted: list[int] = []
    for _ in range(count):
        kv = head.new_sequence()
        kv.extend(len(committed) + len(drafted))
        head.set_features(kv.slots(0, len(committed) - 1), features[:-1])
        drafted.append(int(head.forward([SequenceChunk(kv, [*committed, *drafted], 1)]).argmax()))
        kv.free()
    return drafted


def headlike_text(prompt: tuple[int, ...], num_blocks: int) -> GeneratedText:
    """A text in which the head is right for three tokens, then wrong for one, and so on."""
    output: list[int] = []
    for _ in range(num_blocks):
        block = head_draft([*prompt, *output], 4)
        output += [*block[:3], (block[3] + 1) % models.VOCAB_SIZE]
    return GeneratedText(prompt, tuple(output))


TEXTS = [(PROMPT, 3), ((61,), 2), (tuple(range(100, 140)), 2)]


class TestHead:
    def test_blocks_are_those_of_the_whole_sequence_run_anew(self) -> None:
        texts = [headlike_text(*each) for each in TEXTS]
        features = read_features(target_engine(), eagle3_dir(), texts)
        found = head_blocks(eagle3_engine(), texts, features, NUM_HINTS, budget_s=600.0)
        for text, own in zip(texts, found, strict=True):
            assert len(own) == len(text.token_ids)
            assert own.accepted[0] == (1, 2, 3, 3)  # as the text was made
            for position in range(len(own)):
                committed = [*text.prompt_token_ids, *text.token_ids[:position]]
                rest = text.token_ids[position : position + NUM_HINTS]
                expected = num_leading(head_draft(committed, len(rest)), rest)
                assert own.accepted[position] == tuple(min(expected, count) for count in range(1, len(rest) + 1))
                assert (own.ranks[position] == 0) == (expected > 0)

    def test_long_prompts_are_run_in_parts(self) -> None:
        text = headlike_text(tuple((7 * i) % 250 for i in range(300)), 1)
        features = read_features(target_engine(), eagle3_dir(), [text])
        [found] = head_blocks(eagle3_engine(), [text], features, NUM_HINTS, budget_s=600.0)
        assert found.accepted[0] == (1, 2, 3, 3)

    def test_a_spent_budget_leaves_the_first_position_of_each_text(self) -> None:
        texts = [GeneratedText(PROMPT, (1, 2, 3)), GeneratedText((4, 5), (6, 7))]
        features = read_features(target_engine(), eagle3_dir(), texts)
        found = head_blocks(eagle3_engine(), texts, features, NUM_HINTS, budget_s=0.0)
        assert [len(each) for each in found] == [1, 1]

    def test_blocks_are_given_back(self) -> None:
        head = eagle3_engine()
        num_free, num_target = head.allocator.num_free, target_engine().allocator.num_free
        texts = [GeneratedText(PROMPT, (1, 2, 3))] * 20
        found = head_blocks(head, texts, read_features(target_engine(), eagle3_dir(), texts), 2, budget_s=600.0)
        assert len(found) == 20
        step_times(head, (1, 4), Settings("float32", "none", 1, 32, 20, 0.1), is_target=False)
        assert head.allocator.num_free == num_free
        assert target_engine().allocator.num_free == num_target

    def test_features_are_what_the_target_computes_token_by_token(self) -> None:
        engine, whole = target_engine(), [5, 17, 80, 3, 90, 11]
        [found] = read_features(engine, eagle3_dir(), [GeneratedText(tuple(whole[:3]), tuple(whole[3:]))])
        kv = engine.new_sequence()
        for token_id in whole:
            kv.extend(1)
            engine.forward([SequenceChunk(kv, [token_id], 1)])
        assert engine.features is not None
        assert torch.equal(found, engine.features[torch.from_numpy(kv.slots(0, len(whole)))])
        kv.free()


class TestMedusa:
    def test_heads_guess_from_the_token_before_the_last(self) -> None:
        heads = load_medusa(medusa_dir(), target_dir(), torch.float32)
        whole = [*PROMPT, *range(30)]
        [features] = read_features(target_engine(), medusa_dir(), [GeneratedText(PROMPT, tuple(range(30)))])
        guesses = heads(features[len(PROMPT) - 2 :][:1])[:, 0].argmax(dim=-1).tolist()
        right = GeneratedText(PROMPT, (*guesses[:2], (guesses[2] + 1) % models.VOCAB_SIZE, *whole[:80]))
        features_of = read_features(target_engine(), medusa_dir(), [right])
        [found] = medusa_blocks(heads, [right], features_of, num_hints_max=8)
        assert len(found) == len(right.token_ids)  # over more rows than run at once
        assert found.accepted[0] == (1, 2, 2)  # three heads, three tokens
        assert found.ranks[0] == 0
        assert len(found.accepted[-1]) == 1

    def test_a_prompt_of_one_token_has_no_state_yet(self) -> None:
        heads = load_medusa(medusa_dir(), target_dir(), torch.float32)
        text = GeneratedText((5,), (1, 2, 3))
        [found] = medusa_blocks(heads, [text], read_features(target_engine(), medusa_dir(), [text]), 4)
        assert len(found) == 2

    def test_times_by_rows(self) -> None:
        heads = load_medusa(medusa_dir(), target_dir(), torch.float32)
        found = medusa_times(heads, Settings("float32", "none", 1, 32, 20, 0.0))
        assert found.times.num_tokens == (1, 4, 8, 16, 32, 64)
        assert found.num_parameters == sum(each.numel() for each in heads.parameters())


@pytest.fixture
def masked() -> Engine:
    engine = models.load(models.engine_config(target_dir(1, MASK)))
    assert engine.enable_masks()
    return engine


def rows(engine: Engine, token_ids: list[int], count: int) -> list[int]:
    """The choices of the last rows of a sequence, run at once."""
    kv = engine.new_sequence()
    kv.extend(len(token_ids))
    found: list[int] = engine.forward([SequenceChunk(kv, token_ids, count)]).argmax(dim=-1).tolist()
    kv.free()
    return found


class TestMasks:
    @pytest.mark.parametrize("num_masks", [0, 1, 3])
    def test_blocks_are_those_of_whole_sequences(self, masked: Engine, num_masks: int) -> None:
        # Its own output, so that every token that it has read is guessed rightly and masks are at times.
        texts = [GeneratedText(prompt, tuple(own_output(masked, prompt, 10))) for prompt in (PROMPT, (33, 2))]
        found, passes = mask_blocks(masked, texts, num_masks, NUM_HINTS, budget_s=600.0)
        all_passes = []
        for text, own in zip(texts, found, strict=True):
            assert len(own) == len(text.token_ids)
            for position in range(len(own)):
                committed = [*text.prompt_token_ids, *text.token_ids[:position]]
                block = MaskPath(text.token_ids[position : position + NUM_HINTS])
                while not block.is_complete:
                    token_ids = [*committed, *(block.token_ids if block.num_passes else []), *[MASK] * num_masks]
                    block.take(rows(masked, token_ids, (len(block.unread) or 1) + num_masks), num_masks)
                assert own.accepted[position] == tuple(block.accepted)
                all_passes.append(block.passes)
        assert passes[0] == 1.0
        assert passes[1] == sum(each[1] for each in all_passes if len(each) > 1) / (2 * 9)
        if not num_masks:
            assert passes == (1.0, 2.0, 3.0, 4.0)

    def test_without_masks_it_agrees_as_teacher_forcing_has_it(self, masked: Engine) -> None:
        text = GeneratedText(PROMPT, (*own_output(masked, PROMPT, 3), 7, 7, *own_output(masked, (1,), 3)))
        [found], _ = mask_blocks(masked, [text], 0, NUM_HINTS, budget_s=600.0)
        forced = ranks(masked, text)
        assert found.ranks == forced
        for position in range(len(forced)):
            for count in range(1, 5):
                assert num_agreeing(found, position, count) == num_agreeing(forced, position, count)

    def test_a_token_that_the_draft_has_no_row_for_ends_the_text(self, masked: Engine) -> None:
        [found], _ = mask_blocks(masked, [GeneratedText(PROMPT, (1, 2, 10**6, 3))], 1, 2, budget_s=600.0)
        assert len(found) == 2


def own_output(engine: Engine, prompt: tuple[int, ...], count: int) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        output += rows(engine, [*prompt, *output], 1)
    return output
