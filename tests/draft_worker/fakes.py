"""A draft model that is a function of the path so far, run over a KV cache that remembers whole paths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from draft_worker.messages import Expansion, KVMove, Step, StepItem
from outrider.engine.sampling.randomness import mix
from tests.target_worker import fakes as target_fakes

VOCAB_SIZE = target_fakes.VOCAB_SIZE
Path = tuple[int, ...]
_REMEMBERED_LEN_MAX = 256


@lru_cache(maxsize=1 << 14)
def _prefixes(path: Path) -> list[Path]:
    """All of its beginnings but the empty one, the path itself at last. Those of two paths that begin alike are the
    same objects, which compare at once."""
    if len(path) > _REMEMBERED_LEN_MAX:
        return [path[: i + 1] for i in range(len(path))]
    return [*_prefixes(path[:-1]), path] if path else []


@lru_cache(maxsize=1 << 14)
def _continuations(path: Path, seed: int) -> tuple[int, int, int]:
    """The right token, a wrong one, and a number that decides which of them the draft finds more likely."""
    value = 7
    for token_id in path:
        value = mix(value ^ token_id)
    right = target_fakes.next_token(path, seed)
    return right, (right + 1 + value % (VOCAB_SIZE - 1)) % VOCAB_SIZE, value % 256


class FakeDraftModel:
    """Every KV entry holds the tokens that led to it, itself included; a step must see exactly its own path, and write
    what is its own alone.

    `alignment` of 256 continuations are the target's own; of the rest the right token is often an alternative.
    """

    def __init__(self, num_slots: int, alignment: int = 200, num_children: int = 3) -> None:
        self.cache: list[Path | None] = [None] * num_slots
        self.alignment = alignment
        self.num_children = num_children
        self.mask_error_share = 3  # one of so many guesses of masks is wrong where the rows are right; 0: none
        self.num_steps = 0

    def expand(self, path: Sequence[int], seed: int = 0) -> Expansion:
        right, wrong, decisive = _continuations(tuple(path), seed)
        first, second = (right, wrong) if decisive < self.alignment else (wrong, right)
        rest = [t for t in range(VOCAB_SIZE) if t not in (first, second)]
        token_ids = [first, second, *rest][: self.num_children]
        return Expansion(token_ids, [0.7, 0.2, 0.1][: self.num_children], None)

    def move(self, move: KVMove) -> None:
        held = [self.cache[slot] for slot in move.source_slots]
        for slot, path in zip(move.destination_slots, held, strict=True):
            self.cache[slot] = path

    def run(self, step: Step) -> list[list[Expansion]]:
        self.num_steps += 1
        allocator = step.items[0].kv.allocator
        for move in step.moves:
            self.move(move)
            into = {int(slot) // allocator.block_size for slot in move.destination_slots}
            assert into.isdisjoint(allocator._digests), "a published block is written"
        written: set[int] = set()
        read: set[int] = set()
        expansions = []
        for item in step.items:
            first = item.kv.length - len(item.token_ids)
            slots = item.kv.slots(0, item.kv.length).tolist()
            new = set(slots[first:])
            assert written.isdisjoint(slots), "a slot is read that another writes"
            assert read.isdisjoint(new), "a slot is written that another reads"
            assert all(allocator.may_write(slot // allocator.block_size) for slot in new)
            written |= new
            read |= set(slots[:first])
            paths: list[Path] = []
            for row, token_id in enumerate(item.token_ids):
                if item.paths is None:
                    seen, position = slots[: first + row], first + row
                else:
                    *ancestors, own = item.paths[row]
                    assert own == first + row, "a node sees itself last"
                    assert all(item.tree_start <= entry < own for entry in ancestors)
                    seen = slots[: item.tree_start] + [slots[entry] for entry in ancestors]
                    position = len(seen)
                held = [self.cache[slot] for slot in seen]
                parent = (held[-1] if held else ()) or ()
                assert len(held) == position
                assert held == _prefixes(parent), "an entry holds another path's KV"
                path = (*parent, token_id)
                self.cache[slots[first + row]] = _prefixes(path)[-1]
                paths.append(path)
            logits_of = paths[len(paths) - len(item.node_ids) :] if item.node_ids else []
            assert [(*item.context.token_ids, *said) for said in item.context.continuations] == logits_of
            seed = target_fakes.seed_of(item.sampling, item.seed)
            expanded = [self.expand(path, seed) for path in logits_of]
            if item.num_masks:
                expanded += self.guess(item, paths[-1], expanded[-1])
            if item.chain is not None:
                expanded += self.follow(item, logits_of[0], expanded[0])
            expansions.append(expanded)
        return expansions

    def guess(self, item: StepItem, path: Path, expansion: Expansion) -> list[Expansion]:
        """Returns what the masks of an item guess: now and then wrong where rows are right. Their KV is gone."""
        assert item.chain is None
        item.kv.extend(item.num_masks)
        slots = item.kv.slots(0, item.kv.length).tolist()[-item.num_masks :]
        for slot in slots:
            assert item.kv.allocator.may_write(slot // item.kv.allocator.block_size)
            self.cache[slot] = None
        item.kv.truncate(item.kv.length - item.num_masks)
        found: list[Expansion] = []
        for index in range(item.num_masks):
            path = _prefixes((*path, expansion.token_ids[0]))[-1]
            expansion = self.expand(path, target_fakes.seed_of(item.sampling, item.seed))
            share = self.mask_error_share
            if share and mix(self.num_steps + 7 * index) % share == 0 and len(expansion.token_ids) > 1:
                first, second, *rest = expansion.token_ids
                expansion = Expansion([second, first, *rest], expansion.chances)
            found.append(expansion)
        return found

    def follow(self, item: StepItem, path: Path, expansion: Expansion) -> list[Expansion]:
        """Feeds an item's chain for as long as it may, or for fewer passes: something comes between."""
        chain = item.chain
        assert chain is not None
        found: list[Expansion] = []
        reach, entries = chain.reach, list(chain.path)
        for _ in range(min(chain.max_nodes, mix(self.num_steps) % (chain.max_nodes + 3))):
            token_id = expansion.token_ids[0]
            reach *= expansion.chances[0]
            if reach < chain.min_reach or token_id in chain.stop_token_ids:
                break
            item.kv.extend(1)
            slots = item.kv.slots(0, item.kv.length).tolist()
            assert item.kv.allocator.may_write(slots[-1] // item.kv.allocator.block_size)
            held = [self.cache[slot] for slot in slots[: chain.tree_start] + [slots[e] for e in entries]]
            assert held == _prefixes(path), "a chain sees another path's KV"
            entries.append(item.kv.length - 1)
            path = _prefixes((*path, token_id))[-1]
            self.cache[slots[-1]] = path
            expansion = self.expand(path, target_fakes.seed_of(item.sampling, item.seed))
            found.append(expansion)
        return found
