"""Tokens of many sequences, by scope: finds where the last tokens of one stood before, and what followed. Pure.

SuffixDecoding (arXiv 2411.04975) keeps the outputs of earlier requests in a suffix tree and proposes what most often
followed the longest match. A node of such a tree takes hundreds of bytes, and a token touches as many nodes as a match
may be long. This memory keeps what LZ77 compressors keep (RFC 1951, section 4): a hash map from each gram of
`MIN_MATCH` tokens to its latest place, and chains of the places before. A token costs one entry, and a lookup walks a
bounded part of one chain.

Sequences grow while others are searched, so that sessions which run at the same time find each other's tokens. A
sequence is kept in pieces of at most `PIECE_TOKENS`. Nothing of a scope is found in another one.

Room belongs to tenants, whatever salts they use: beyond `max_tokens` the tenant with the most forgets, of its largest
scope the piece that has not grown for longest; beyond `max_scopes` the tenant with the most scopes forgets the one that
was silent longest. So a tenant that keeps to its part, of as many equal ones as there are tenants, loses nothing.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MIN_MATCH: Final = 3
MATCH_LENS: Final = (3, 4, 6, 8, 12, 16, 24)
"""Lengths of matches that are distinguished, in tokens; a longer match counts as one of the last."""
MAX_MATCH: Final = MATCH_LENS[-1]
MAX_CANDIDATES: Final = 16
"""Longest part of a chain that is searched."""
_PIECE_BITS: Final = 10
PIECE_TOKENS: Final = 1 << _PIECE_BITS
"""Most tokens of a piece, with those copied from before it: what is forgotten at once."""
PIECE_COST: Final = 32
"""Tokens that a piece counts beside its own: the copied ones, and objects of fixed size."""
TOKEN_ID_MAX: Final = (1 << 31) - 1
NOWHERE: Final = -1

Scope = tuple[str, str]
"""The tenant's digest and the cache salt of a session. Sessions of one scope alone find each other's tokens."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of one sequence. The first `first` tokens are copies of those before it, so that matches reach back."""

    scope: Scope
    number: int
    first: int
    token_ids: array[int]
    earlier: array[int]  # per token, the previous place of the gram before it
    following: int = NOWHERE  # number of the piece that continues the sequence

    @property
    def cost(self) -> int:
        return len(self.token_ids) - self.first + PIECE_COST


@dataclass(slots=True)
class _Remembered:
    """Tokens remembered for one scope."""

    latest: dict[int, int] = field(default_factory=dict)  # gram -> latest place after it
    pieces: OrderedDict[int, _Piece] = field(default_factory=OrderedDict)  # by number, in order of last growth
    num_tokens: int = 0


@dataclass(slots=True)
class _Tenant:
    """Everything remembered for one tenant."""

    scopes: OrderedDict[str, _Remembered] = field(default_factory=OrderedDict)  # by salt, in order of last growth
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class RememberedSequence:
    """One session's sequence, of which what was appended is remembered."""

    scope: Scope
    tail: list[int]  # its last tokens, at most MAX_MATCH: what the next ones are searched by
    committed_len: int  # with the tokens before, which are not remembered
    piece: int = NOWHERE  # number of the one that grows

    @classmethod
    def after(cls, scope: Scope, token_ids: Sequence[int]) -> RememberedSequence:
        """A sequence of which only what comes after these tokens will be remembered."""
        return cls(scope, list(token_ids[-MAX_MATCH:]), len(token_ids))

    def skip(self, token_ids: Sequence[int]) -> None:
        """Goes past the next tokens without remembering them."""
        self.tail = [*self.tail, *token_ids[-MAX_MATCH:]][-MAX_MATCH:]
        self.committed_len += len(token_ids)
        self.piece = NOWHERE


class Match(NamedTuple):
    """Places before which the same tokens stand."""

    length: int  # one of MATCH_LENS; 0: nothing was found
    places: list[int]  # latest first


NO_MATCH: Final = Match(0, [])


class TokenMemory:
    """All remembered tokens of one worker."""

    def __init__(self, *, max_tokens: int, max_scopes: int) -> None:
        if max_tokens < 2 * (PIECE_TOKENS + PIECE_COST) or max_scopes < 1:
            raise ValueError("max_tokens must have room for two pieces, and max_scopes must be positive")
        self.max_tokens, self.max_scopes = max_tokens, max_scopes
        self.num_tokens = 0  # with PIECE_COST for each piece
        self.num_forgotten_tokens = 0
        self.num_scopes = 0
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # by digest, in order of last growth
        self._pieces: dict[int, _Piece] = {}
        self._num_pieces = 0  # ever made

    def append(self, sequence: RememberedSequence, token_ids: Sequence[int]) -> None:
        """Remembers the next tokens of a sequence."""
        start = 0
        while start < len(token_ids):
            piece = self._pieces.get(sequence.piece)
            if piece is None or len(piece.token_ids) == PIECE_TOKENS:
                piece = self._continue(sequence, piece)
            new = token_ids[start : start + PIECE_TOKENS - len(piece.token_ids)]
            start += len(new)
            sequence.tail = [*sequence.tail, *new[-MAX_MATCH:]][-MAX_MATCH:]
            sequence.committed_len += len(new)
            self._index(piece, new)

    def _continue(self, sequence: RememberedSequence, full: _Piece | None) -> _Piece:
        """Starts the next piece of a sequence."""
        number, self._num_pieces = self._num_pieces, self._num_pieces + 1
        copied = array("i", sequence.tail)
        piece = _Piece(sequence.scope, number, len(copied), copied, array("q", [NOWHERE] * len(copied)))
        if full is not None:
            full.following = number
        sequence.piece = number
        owner, salt = sequence.scope
        tenant = self._tenants.setdefault(owner, _Tenant())
        self.num_scopes += salt not in tenant.scopes
        remembered = tenant.scopes.setdefault(salt, _Remembered())
        remembered.pieces[number] = self._pieces[number] = piece
        self._count(tenant, remembered, PIECE_COST)
        return piece

    def _index(self, piece: _Piece, new: Sequence[int]) -> None:
        tokens, earlier = piece.token_ids, piece.earlier
        owner, salt = piece.scope
        tenant = self._tenants[owner]
        remembered = tenant.scopes[salt]
        latest, base = remembered.latest, piece.number << _PIECE_BITS
        start = len(tokens)
        tokens.extend(new)
        for offset in range(start, len(tokens)):
            if offset < MIN_MATCH:
                earlier.append(NOWHERE)
                continue
            gram = (tokens[offset - 3] << 42) ^ (tokens[offset - 2] << 21) ^ tokens[offset - 1]
            earlier.append(latest.get(gram, NOWHERE))
            latest[gram] = base + offset
        self._tenants.move_to_end(owner)
        tenant.scopes.move_to_end(salt)
        remembered.pieces.move_to_end(piece.number)
        self._count(tenant, remembered, len(new))
        self._make_room()

    def _count(self, tenant: _Tenant, remembered: _Remembered, num_tokens: int) -> None:
        remembered.num_tokens += num_tokens
        tenant.num_tokens += num_tokens
        self.num_tokens += num_tokens

    def _make_room(self) -> None:
        # Of equal tenants the one that was silent longest comes first.
        while self.num_scopes > self.max_scopes:
            tenant = max(self._tenants.values(), key=lambda each: len(each.scopes))
            for piece in list(next(iter(tenant.scopes.values())).pieces.values()):
                self._forget(piece)
        while self.num_tokens > self.max_tokens:
            tenant = max(self._tenants.values(), key=lambda each: each.num_tokens)
            largest = max(tenant.scopes.values(), key=lambda each: each.num_tokens)
            self._forget(next(iter(largest.pieces.values())))

    def _forget(self, piece: _Piece) -> None:
        owner, salt = piece.scope
        tenant = self._tenants[owner]
        remembered = tenant.scopes[salt]
        tokens, latest, base = piece.token_ids, remembered.latest, piece.number << _PIECE_BITS
        for offset in range(len(tokens) - 1, max(piece.first, MIN_MATCH) - 1, -1):
            gram = (tokens[offset - 3] << 42) ^ (tokens[offset - 2] << 21) ^ tokens[offset - 1]
            if latest.get(gram) == base + offset:
                before = piece.earlier[offset]
                if before >> _PIECE_BITS in self._pieces:
                    latest[gram] = before
                else:
                    del latest[gram]
        del remembered.pieces[piece.number], self._pieces[piece.number]
        self._count(tenant, remembered, -piece.cost)
        self.num_forgotten_tokens += len(tokens) - piece.first
        if not remembered.pieces:
            del tenant.scopes[salt]
            self.num_scopes -= 1
        if not tenant.scopes:
            del self._tenants[owner]

    def find(self, scope: Scope, window: Sequence[int]) -> Match:
        """Finds the latest places of `scope` after the end of `window`: of those that a bounded search meets, the ones
        with the longest match, of at most MAX_MATCH tokens."""
        tenant = self._tenants.get(scope[0])
        remembered = None if tenant is None else tenant.scopes.get(scope[1])
        if remembered is None or len(window) < MIN_MATCH:
            return NO_MATCH
        own = array("i", window[-MAX_MATCH:])
        gram = (own[-3] << 42) ^ (own[-2] << 21) ^ own[-1]
        place, level, found = remembered.latest.get(gram, NOWHERE), 0, list[int]()
        num_levels = sum(length <= len(own) for length in MATCH_LENS)
        for _ in range(MAX_CANDIDATES):
            piece = self._pieces.get(place >> _PIECE_BITS)
            if piece is None:  # the chain has ended, or goes on in what was forgotten
                break
            tokens, offset = piece.token_ids, place & (PIECE_TOKENS - 1)
            length = MATCH_LENS[level]
            # Not all grams of one key are equal, so the shortest match is compared, too.
            if offset >= length and tokens[offset - length : offset] == own[-length:]:
                while level + 1 < num_levels:
                    length = MATCH_LENS[level + 1]
                    if offset < length or tokens[offset - length : offset] != own[-length:]:
                        break
                    level += 1
                    found.clear()
                found.append(place)
            place = piece.earlier[offset]
        return Match(MATCH_LENS[level], found) if found else NO_MATCH

    def following(self, place: int, max_len: int) -> tuple[int, ...]:
        """Returns the tokens from a place on, at most `max_len` of them, as far as they are remembered."""
        piece, offset = self._pieces.get(place >> _PIECE_BITS), place & (PIECE_TOKENS - 1)
        found: tuple[int, ...] = ()
        while piece is not None and len(found) < max_len:
            found += tuple(piece.token_ids[offset : offset + max_len - len(found)])
            piece = self._pieces.get(piece.following)
            offset = piece.first if piece is not None else 0
        return found
