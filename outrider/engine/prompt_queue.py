"""Order of the prompts that a worker computes beside each other: fair by tenant, and short ones soon. Pure.

Among prompts of one priority, the owner whose prompts have taken least goes first: the virtual token counters of Sheng
et al., 2401.00588. An owner that comes back starts at the lowest counter of those that were there, so nobody saves up.
Of one owner's prompts the one with the fewest tokens left may pass the first, but only as long as those that pass have
taken no more than the first ones have meanwhile. So a short prompt does not wait for all that came before, equal ones
finish one after the other, and each has at least half of its owner's share while it is the first.

A prompt that has its turn gets all that a step has left: dividing a step evenly would give as many tokens in more
chunks, each of which reads the prompt before it. Work is counted in tokens by their cost (`ChunkCost`), in which those
late in a long prompt weigh more.

Invariant: memory is bounded by the prompts that wait and OWNERS_MAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from outrider.engine.chunk_cost import Chunk, ChunkCost

OWNERS_MAX: Final = 4096
"""Owners whose counters are kept, beside those that have prompts now."""


class PromptSession(Protocol):
    """A sequence with tokens to compute."""

    @property
    def owner(self) -> str:
        """The tenant, or a digest of it."""

    @property
    def priority(self) -> int:
        """Lower goes first."""

    @property
    def may_be_passed(self) -> bool:
        """Whether shorter prompts of its owner may go before it while it is the first."""

    @property
    def num_pending(self) -> int:
        """Tokens that are left to compute."""


SessionT = TypeVar("SessionT", bound=PromptSession)


@dataclass(slots=True)
class _Account:
    """Work of one owner's prompts, in tokens that read nothing."""

    taken: float  # since the start, or more
    lead: float = 0.0  # of its first prompts over those that passed them


@dataclass(slots=True)
class PromptQueue:
    """Accounts of the owners of prompts, and what prompts cost."""

    cost: ChunkCost = field(default_factory=ChunkCost)
    _accounts: dict[str, _Account] = field(default_factory=dict)
    _present: frozenset[str] = frozenset()  # owners that had prompts in the last step
    _floor: float = 0.0  # counter at which a new owner starts

    def turns(self, sessions: Iterable[SessionT]) -> Iterator[SessionT]:
        """The sessions of a step one by one, each once. Within an owner and priority the order given is that of
        arrival. Whose turn comes next depends on what was charged for those before."""
        lines: dict[int, dict[str, list[SessionT]]] = {}
        for session in sessions:
            lines.setdefault(session.priority, {}).setdefault(session.owner, []).append(session)
        self._admit(frozenset(owner for by_owner in lines.values() for owner in by_owner))
        for priority in sorted(lines):
            by_owner = lines[priority]
            while by_owner:
                yield from self._turn(by_owner)

    def _turn(self, by_owner: dict[str, list[SessionT]]) -> Iterator[SessionT]:
        shortest_of = {owner: min(line, key=lambda each: each.num_pending) for owner, line in by_owner.items()}
        # Among equals, the one that holds the others up least.
        owner = min(by_owner, key=lambda each: (self._accounts[each].taken, shortest_of[each].num_pending))
        account, line, shortest = self._accounts[owner], by_owner[owner], shortest_of[owner]
        first = line[0]
        chosen = shortest if first.may_be_passed and account.lead >= 0.0 else first
        line.remove(chosen)
        if not line:
            del by_owner[owner]
        taken = account.taken
        yield chosen
        if first is not shortest and first.may_be_passed:  # else what it takes would be a lead of those behind it
            account.lead += (account.taken - taken) * (1.0 if chosen is first else -1.0)

    def charge(self, owner: str, chunk: Chunk) -> None:
        """Charges an owner for a chunk of the prompt whose turn it is."""
        self._accounts[owner].taken += self.cost.weight(chunk)

    def _admit(self, owners: frozenset[str]) -> None:
        staying = [self._accounts[owner].taken for owner in owners & self._present]
        self._floor, self._present = max(self._floor, min(staying, default=self._floor)), owners
        if len(self._accounts) > OWNERS_MAX:
            self._accounts = {owner: self._accounts[owner] for owner in owners & self._accounts.keys()}
        for owner in owners:
            account = self._accounts.setdefault(owner, _Account(self._floor))
            account.taken = max(account.taken, self._floor)
