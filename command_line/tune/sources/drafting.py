"""Really drafts blocks from every position of the target's sequences, with draft heads and with mask tokens.

A head goes on from its own output where the target's features end, and a mask is read in place of a token, so what
becomes of a block's second and later hints shows only when the block is drafted. Sequences are drafted side by side,
position by position; when the budget is spent, all end where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from command_line.tune.agreement import DraftedRanks
from command_line.tune.profile import num_affordable
from command_line.tune.sources.mask_path import MaskPath, accepted_by_length, mean_passes, num_leading
from command_line.tune.texts import PREFILL_TOKENS, GeneratedText, num_readable, ranks_of

if TYPE_CHECKING:
    import torch

    from outrider.engine.heads.head_engine import HeadEngine
    from outrider.engine.heads.medusa import MedusaHeads
    from outrider.engine.kv.kv_cache import KVSequence
    from outrider.engine.model import Engine
    from outrider.engine.sequence_chunk import SequenceChunk

_MEDUSA_ROWS: Final = 64  # at once, since logits of all heads take much memory


@dataclass(slots=True)
class _Track:
    """One sequence while blocks are drafted along it."""

    prompt_len: int
    whole: list[int]  # prompt and output
    kv: KVSequence
    features: torch.Tensor | None = None  # the target's, of each token  # [len(whole), feature_size]
    ranks: list[int] = field(default_factory=list)
    accepted: list[tuple[int, ...]] = field(default_factory=list)
    passes: list[list[int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens before the position that comes next."""
        return self.prompt_len + len(self.ranks)

    @property
    def goes_on(self) -> bool:
        return self.end < len(self.whole)

    def rest(self, num_hints_max: int) -> list[int]:
        """Tokens that a block at the next position is judged by."""
        return self.whole[self.end : self.end + num_hints_max]

    def drafted(self) -> DraftedRanks:
        return DraftedRanks(tuple(self.ranks), tuple(self.accepted))


def head_blocks(
    head: HeadEngine,
    texts: Sequence[GeneratedText],
    features: Sequence[torch.Tensor],
    num_hints_max: int,
    budget_s: float,
) -> tuple[DraftedRanks, ...]:
    """Blocks of a head with attention.  # features: of each text, [its tokens, feature_size]"""
    found: list[DraftedRanks] = []
    for group, deadline in _groups(head, texts, num_hints_max, budget_s):
        with _tracks(head, [texts[i] for i in group], [features[i] for i in group]) as tracks:
            _draft_along(tracks, deadline, lambda going: _draft_with_head(head, going, num_hints_max))
            found += [track.drafted() for track in tracks if track.ranks]
    return tuple(found)


def medusa_blocks(
    heads: MedusaHeads, texts: Sequence[GeneratedText], features: Sequence[torch.Tensor], num_hints_max: int
) -> tuple[DraftedRanks, ...]:
    """Blocks of Medusa heads: all of a text's at once, since no head reads what another one guessed."""
    return tuple(
        _medusa_text(heads, text, own, min(num_hints_max, heads.num_heads))
        for text, own in zip(texts, features, strict=True)
    )


def mask_blocks(
    engine: Engine, texts: Sequence[GeneratedText], num_masks: int, num_hints_max: int, budget_s: float
) -> tuple[tuple[DraftedRanks, ...], tuple[float, ...]]:
    """Blocks of a draft that reads `num_masks` mask tokens, and its mean passes until 1, 2, ... tokens are guessed."""
    found: list[DraftedRanks] = []
    passes: list[list[int]] = []
    for group, deadline in _groups(engine, texts, num_hints_max + num_masks, budget_s):
        with _tracks(engine, [texts[i] for i in group], None) as tracks:
            _draft_along(tracks, deadline, lambda going: _draft_with_masks(engine, going, num_masks, num_hints_max))
            found += [track.drafted() for track in tracks if track.ranks]
            passes += [block for track in tracks for block in track.passes]
    return tuple(found), mean_passes(passes)


def _groups(
    engine: Engine | HeadEngine, texts: Sequence[GeneratedText], num_more: int, budget_s: float
) -> Iterator[tuple[range, float]]:
    """Indices of texts that are drafted side by side, and their deadline: an equal share of the remaining budget."""
    deadline = time.perf_counter() + budget_s
    longest = max(len(text.prompt_token_ids) + len(text.token_ids) for text in texts)
    size = num_affordable(engine, longest + num_more)
    starts = range(0, len(texts), size)
    for number, start in enumerate(starts):
        now = time.perf_counter()
        share_s = max(deadline - now, 0.0) / (len(starts) - number)
        yield range(start, min(start + size, len(texts))), now + share_s


@contextmanager
def _tracks(
    engine: Engine | HeadEngine, texts: Sequence[GeneratedText], features: Sequence[torch.Tensor] | None
) -> Iterator[list[_Track]]:
    """Tracks with a KV sequence each; a text ends before a token that the draft's vocabulary lacks."""
    tracks = []
    for index, text in enumerate(texts):
        whole = [*text.prompt_token_ids, *text.token_ids]
        own = None if features is None else features[index]
        whole = whole[: num_readable(engine, whole)]
        tracks.append(_Track(len(text.prompt_token_ids), whole, engine.new_sequence(), own))
    try:
        yield tracks
    finally:
        for track in tracks:
            track.kv.free()


def _draft_along(tracks: Sequence[_Track], deadline: float, draft: Callable[[list[_Track]], None]) -> None:
    """Drafts at one position after the other; at the first one whatever the budget."""
    while going := [track for track in tracks if track.goes_on]:
        draft(going)
        if time.perf_counter() > deadline:
            break


def _draft_with_head(head: HeadEngine, tracks: Sequence[_Track], num_hints_max: int) -> None:
    """Drafts at the next position of each track, until a guess is wrong: what follows would be rejected."""
    from outrider.engine.sequence_chunk import SequenceChunk

    logits = head.forward([_committed(head, track) for track in tracks])
    rests = [track.rest(num_hints_max) for track in tracks]
    first_ranks = ranks_of(logits, [rest[0] for rest in rests])
    guesses = [[token_id] for token_id in logits.argmax(dim=-1).tolist()]
    while growing := [
        (track, own)
        for track, own, rest in zip(tracks, guesses, rests, strict=True)
        if len(own) < len(rest) and own[-1] == rest[len(own) - 1]
    ]:
        for track, _ in growing:
            track.kv.extend(1)
        logits = head.forward([SequenceChunk(track.kv, own[-1:], 1) for track, own in growing])
        for (_, own), token_id in zip(growing, logits.argmax(dim=-1).tolist(), strict=True):
            own.append(token_id)
    for track, own, rest, rank in zip(tracks, guesses, rests, first_ranks, strict=True):
        track.kv.truncate(track.end)
        track.ranks.append(rank)
        track.accepted.append(accepted_by_length(num_leading(own, rest), len(rest)))


def _committed(head: HeadEngine, track: _Track) -> SequenceChunk:
    """The committed tokens that the head has not run, each on the target's feature of the token before it."""
    from outrider.engine.sequence_chunk import SequenceChunk

    assert track.features is not None
    while True:
        start = track.kv.length
        end = min(track.end, start + PREFILL_TOKENS)
        track.kv.extend(end - start)
        first, last = max(start - 1, 0), end - 1  # the feature of the last token is not known yet
        head.set_features(track.kv.slots(first, last), track.features[first:last])
        chunk = SequenceChunk(track.kv, track.whole[start:end], 1)
        if end == track.end:
            return chunk
        head.forward([chunk])


def _medusa_text(heads: MedusaHeads, text: GeneratedText, features: torch.Tensor, num_hints_max: int) -> DraftedRanks:
    whole = [*text.prompt_token_ids, *text.token_ids]
    ranks: list[int] = []
    accepted: list[tuple[int, ...]] = []
    # The state read is that of the token before the last committed one; a text of one token has none yet.
    for first in range(max(len(text.prompt_token_ids) - 2, 0), len(whole) - 2, _MEDUSA_ROWS):
        end = min(first + _MEDUSA_ROWS, len(whole) - 2)
        logits = heads(features[first:end])  # [num_heads, num_positions, vocab_size]
        ranks += ranks_of(logits[0], whole[first + 2 : end + 2])
        for position, guesses in enumerate(logits.argmax(dim=-1).T.tolist(), first + 2):
            rest = whole[position : position + num_hints_max]
            accepted.append(accepted_by_length(num_leading(guesses, rest), len(rest)))
    return DraftedRanks(tuple(ranks), tuple(accepted))


def _draft_with_masks(engine: Engine, tracks: Sequence[_Track], num_masks: int, num_hints_max: int) -> None:
    """Drafts at the next position of each track."""
    blocks = [MaskPath(track.rest(num_hints_max)) for track in tracks]
    first_ranks: list[int] = []
    growing = list(zip(tracks, blocks, strict=True))
    while growing:
        chunks = [_masked(engine, track, block, num_masks) for track, block in growing]
        logits = engine.forward(chunks)
        guesses = logits.argmax(dim=-1).tolist()
        ends = list(accumulate(chunk.num_logits for chunk in chunks))
        starts = [0, *ends[:-1]]
        first_ranks = first_ranks or ranks_of(logits[starts], [block.actual[0] for block in blocks])
        for (track, block), start, end in zip(growing, starts, ends, strict=True):
            block.take(guesses[start:end], num_masks)
            track.kv.truncate(track.end + block.num_read)
        growing = [(track, block) for track, block in growing if not block.is_complete]
    for track, block, rank in zip(tracks, blocks, first_ranks, strict=True):
        track.kv.truncate(track.end)
        track.ranks.append(rank)
        track.accepted.append(tuple(block.accepted))
        track.passes.append(block.passes)


def _masked(engine: Engine, track: _Track, block: MaskPath, num_masks: int) -> SequenceChunk:
    """A pass of one block: what it has not read, and masks behind."""
    from outrider.engine.sequence_chunk import SequenceChunk

    masks = [engine.mask_token_id] * num_masks
    if block.num_passes:
        token_ids, num_rows = block.unread, len(block.unread)
    else:
        while track.end - track.kv.length > PREFILL_TOKENS:
            part = track.whole[track.kv.length : track.kv.length + PREFILL_TOKENS]
            track.kv.extend(len(part))
            engine.forward([SequenceChunk(track.kv, part, 1)])
        token_ids, num_rows = track.whole[track.kv.length : track.end], 1
    track.kv.extend(len(token_ids) + num_masks)
    return SequenceChunk(track.kv, [*token_ids, *masks], num_rows + num_masks)
