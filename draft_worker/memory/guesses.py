"""The hint tree that remembered tokens suggest: what followed the same tokens elsewhere, weighted by how often. Pure.

Each place with the longest match has one vote, the tokens that followed it (SuffixDecoding, arXiv 2411.04975, scores by
the same frequencies). The most frequent token is the primary child, of equally frequent ones the latest. The others
are alternatives: a target that generates one finds its continuation there. The probability of a token depends on the
length of the match before it, as learned from committed tokens, and on its share of the votes.

A guess is a function of tokens before it and of other sequences, so its draft distribution is a single token, which is
how verification reads a hint without a distribution.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from draft_worker.memory.token_memory import MATCH_LENS, MAX_MATCH, Match, TokenMemory
from outrider.concurrency.decayed_mean import DecayedMean
from outrider.hints.acceptance import DECAY
from outrider.hints.confidence import confidence_level
from outrider.hints.hint_tree import ROOT_ID, Hint

PRIOR_RATES: Final = (0.45, 0.55, 0.65, 0.7, 0.78, 0.85, 0.9)
"""Assumed acceptance rates of a token after a match of each length, where nothing was measured yet."""
PRIOR_WEIGHT: Final = 4.0  # in tokens
RATE_MAX: Final = 0.99


_LEVELS: Final = [max(sum(each <= length for each in MATCH_LENS) - 1, 0) for length in range(MAX_MATCH + 1)]
"""By length of a match, the index in MATCH_LENS of the length that it counts as."""


class MatchAcceptance:
    """How often the token after a match is the one that followed before, by the length of the match."""

    def __init__(self) -> None:
        self._rates = [DecayedMean(DECAY, rate * PRIOR_WEIGHT, PRIOR_WEIGHT) for rate in PRIOR_RATES]

    def rate(self, level: int) -> float:
        """The rate after a match of `MATCH_LENS[level]` tokens, 0 to 1."""
        return min(self._rates[level].mean, RATE_MAX)

    def rates_from(self, match_len: int, num_tokens: int) -> list[tuple[int, float]]:
        """For each of `num_tokens` after a match: the index in MATCH_LENS of the match before it, which an accepted
        token makes longer by one, and the rate there."""
        rates = [(level, self.rate(level)) for level in range(len(MATCH_LENS))]
        return [rates[level] for level in _LEVELS[match_len : match_len + num_tokens]] + [rates[-1]] * num_tokens

    def observe(self, level: int, *, is_right: bool) -> None:
        self._rates[level].observe(float(is_right))


@dataclass(slots=True)
class Guess:
    """A node of the tree."""

    hint: Hint
    level: int | None  # index in MATCH_LENS of the match before it; None where the places suggest several tokens
    children: list[Guess]  # the primary child first


@dataclass(slots=True)
class _Branch:
    """Continuations that agree so far, and where their common part has led."""

    votes: dict[tuple[int, ...], int]  # by continuation, those of later places first
    depth: int  # tokens of them that are in the tree
    reach: float  # probability that the committed tokens come here
    parent: Guess | None  # None: the root
    is_primary: bool = True  # `parent` is a primary child


def _agreed_end(continuations: Collection[tuple[int, ...]], start: int) -> int:
    """How far continuations agree that agree up to `start`."""
    least, greatest = min(continuations), max(continuations)  # between them, in order, are all the others
    for end, (one, other) in enumerate(zip(least[start:], greatest[start:], strict=False), start):
        if one != other:
            return end
    return min(len(least), len(greatest))


class GuessTree:
    """The tree for one session, rooted at `base_len` committed tokens. Empty where nothing was found."""

    def __init__(self, base_len: int) -> None:
        self.base_len = base_len
        self.hints: list[Hint] = []  # parents first, primary children before alternatives
        self._children: list[Guess] = []  # of the cursor

    @classmethod
    def grow(
        cls,
        memory: TokenMemory,
        match: Match,
        acceptance: MatchAcceptance,
        base_len: int,
        *,
        max_lookahead: int,
        max_nodes: int,
        min_reach: float,
    ) -> GuessTree:
        """The tree of what followed the places of a match, at most `max_lookahead` deep: the primary path first, then
        the likeliest alternatives with their continuations."""
        tree = cls(base_len)
        if not match.places:
            return tree
        votes: dict[tuple[int, ...], int] = {}
        for place in match.places:
            continuation = memory.following(place, max_lookahead)
            votes[continuation] = votes.get(continuation, 0) + 1
        rates = acceptance.rates_from(match.length, max_lookahead)
        branches = [_Branch(votes, 0, 1.0, None)]
        while branches:  # few, mostly one
            branch = max(branches, key=lambda each: (each.is_primary, each.reach))
            branches.remove(branch)
            branches += tree._expand(branch, rates, max_nodes, min_reach)
        return tree

    def _expand(
        self, branch: _Branch, rates: Sequence[tuple[int, float]], max_nodes: int, min_reach: float
    ) -> list[_Branch]:
        """Adds a branch's tokens up to where its continuations differ; returns the branches that begin there.

        rates: per depth the level of the match before it, and its acceptance rate.
        """
        depth = _agreed_end(branch.votes, branch.depth)
        parent, reach = branch.parent, branch.reach
        agreed = next(iter(branch.votes))
        for position in range(branch.depth, depth):
            level, rate = rates[position]
            reach *= rate
            if reach < min_reach or len(self.hints) >= max_nodes:
                return []
            parent = self._add(parent, agreed[position], rate, level)
        if len(branch.votes) == 1:
            return []
        by_token: dict[int, dict[tuple[int, ...], int]] = {}
        for continuation, count in branch.votes.items():
            if len(continuation) > depth:
                by_token.setdefault(continuation[depth], {})[continuation] = count
        shares = {token_id: sum(own.values()) for token_id, own in by_token.items()}
        level, rate = rates[min(depth, len(rates) - 1)]
        chance = rate / max(sum(shares.values()), 1)
        branches: list[_Branch] = []
        for token_id in sorted(by_token, key=lambda each: -shares[each]):
            own_chance = chance * shares[token_id]
            if reach * own_chance < min_reach or len(self.hints) >= max_nodes:
                break
            learns = level if len(by_token) == 1 else None
            guess = self._add(parent, token_id, own_chance, learns)
            own_reach = reach * own_chance
            branches.append(_Branch(by_token[token_id], depth + 1, own_reach, guess, is_primary=not branches))
        return branches

    def _add(self, parent: Guess | None, token_id: int, chance: float, level: int | None) -> Guess:
        parent_id = ROOT_ID if parent is None else parent.hint.node_id
        hint = Hint(len(self.hints) + 1, parent_id, token_id, None, confidence_level(chance))
        guess = Guess(hint, level, [])
        (self._children if parent is None else parent.children).append(guess)
        self.hints.append(hint)
        return guess

    def commit(self, token_ids: Sequence[int], acceptance: MatchAcceptance) -> None:
        """Moves the cursor along committed tokens, and learns from the primary children that it meets."""
        for token_id in token_ids:
            if not self._children:
                break
            primary = self._children[0]
            if primary.level is not None:
                acceptance.observe(primary.level, is_right=primary.hint.token_id == token_id)
            following = next((each for each in self._children if each.hint.token_id == token_id), None)
            self._children = following.children if following is not None else []

    @property
    def num_ahead(self) -> int:
        """Hints on the primary path below the cursor; 0 once the committed tokens have left the tree."""
        count, children = 0, self._children
        while children:
            count, children = count + 1, children[0].children
        return count
