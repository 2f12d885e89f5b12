"""The processor time that grammars may take of a batch, which waits for each of them.

Invariant: the limits act within a query, between any two calls into the grammar library, and one call is short whatever
the grammar is: the parser's limits, the lexer's fuel and `MAX_FORCED_BYTES` bound it. So whatever a sender asks for,
its sequences delay a step by about `FREE_S` for all of them together and `COVERED_S` for each.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

from outrider.concurrency.loop_share import LoopShare

TOKEN_MAX_S: Final = 0.025
"""Seconds per committed token that a sequence's grammar may take of the batch: the rest of it waits."""
FREE_S: Final = 1.0
"""Seconds beyond that, of one sequence and of all sequences of one owner."""
OWNER_SHARE: Final = 0.02  # of the time, in which an owner's debt is forgotten
COVERED_S: Final = 0.1
"""Debt of a sequence up to which its owner is not charged: an ordinary step takes so much, and its tokens repay it."""
HINTS_S: Final = 0.075
"""Debt that hints may make, so that the next token, which goes on without them, is not charged for them."""
CALL_MAX_S: Final = 0.25
"""Time of one call into the library that counts. The longest ones found take 0.1 s; beyond that the machine stood
still: when a virtual machine is paused, the pause counts as time of the thread that ran."""
MAX_OWNERS: Final = 1024  # remembered
MAX_FORCED_BYTES: Final = 8192
"""The most text in a row without a choice: it is tokenized in one call, which keeps the interpreter's lock."""


class GrammarViolation(Exception):
    """The sequence cannot continue: the grammar forbids a committed token, or a limit of the parser was reached.

    A failed query about hints leaves the state unchanged; without the hints it may succeed.
    """


class GrammarTooCostly(GrammarViolation):
    """The grammar needs more than a sequence may take of the batch, so that the query was not finished."""


def forced_text_refusal(num_bytes: int) -> str | None:
    """Returns why so much text without a choice is not permitted; None if it is."""
    if num_bytes <= MAX_FORCED_BYTES:
        return None
    return f"the grammar has {num_bytes} bytes of text in a row without a choice; permitted: {MAX_FORCED_BYTES}"


class Effort:
    """Counts the time that the grammar of one sequence takes. Its debt is what its tokens have not paid for yet."""

    __slots__ = ("_at_s", "_owner", "debt_s", "is_for_hints", "refusal", "spent_s")

    def __init__(self, owner: LoopShare | None = None) -> None:
        """`owner` is the debt of all sequences of one owner, as far as it exceeds `COVERED_S` of each. None: there is
        no other."""
        self._owner = LoopShare(OWNER_SHARE, FREE_S) if owner is None else owner
        self._at_s = 0.0  # this thread's processor time when it was last looked at
        self.is_for_hints = False  # what is done now: without it the sequence goes on
        self.debt_s = 0.0
        self.spent_s = 0.0  # in all
        self.refusal: str | None = None  # why the sequence must end

    def sibling(self) -> Effort:
        """Returns the effort of another sequence of the same owner."""
        return Effort(self._owner)

    @property
    def affords_hints(self) -> bool:
        """Whether there is time to look further than the next token."""
        return self.refusal is None and self.debt_s <= COVERED_S / 2

    def begin(self, num_tokens: int = 0, *, is_for_hints: bool = False) -> None:
        """Begins a query on this thread. `num_tokens`: committed tokens, which pay for it."""
        self.debt_s = max(0.0, self.debt_s) - TOKEN_MAX_S * num_tokens
        self._at_s, self.is_for_hints = time.thread_time(), is_for_hints

    def count(self) -> None:
        """Counts the time since the last look, after a call into the library. Raises GrammarTooCostly."""
        now_s = time.thread_time()
        passed_s, self._at_s = now_s - self._at_s, now_s
        self.add(passed_s)

    def add(self, call_s: float) -> None:
        """Counts the time of one call. Raises GrammarTooCostly."""
        call_s = min(call_s, CALL_MAX_S)
        self.spent_s += call_s
        self.debt_s += call_s
        if self.debt_s > (HINTS_S if self.is_for_hints else COVERED_S):
            self._check(max(0.0, min(call_s, self.debt_s - COVERED_S)))

    def refuse(self, reason: str) -> GrammarTooCostly:
        """Returns the error to raise where the sequence must end; `refusal` remembers the reason."""
        self.refusal = self.refusal or reason
        return GrammarTooCostly(reason)

    def _check(self, charged_s: float) -> None:
        now_s = time.monotonic()
        if self._owner.wait_s(now_s) == 0.0:  # a debt beyond what is refused for would only be remembered longer
            self._owner.spend(charged_s, now_s)
        permitted = f"permitted: {TOKEN_MAX_S * 1e3:g} ms a token and {FREE_S:g} s"
        if self.debt_s > FREE_S:
            raise self.refuse(
                f"the grammar took {self.debt_s:.1f} s more than its tokens pay for; {permitted}; a less ambiguous one "
                "takes less"
            )
        if self._owner.wait_s(now_s) > 0.0 and self.debt_s > COVERED_S:
            raise self.refuse(
                f"the grammar took {self.debt_s:.1f} s more than its tokens pay for, and with your other requests' "
                f"too much; {permitted} for all together; fewer at once, or less ambiguous ones, take less"
            )
        if self.is_for_hints:
            raise GrammarTooCostly("hints are not worth what the grammar takes for them")


class Owners:
    """The debts of owners. Not thread-safe."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, LoopShare] = OrderedDict()  # least recently used first

    def effort(self, name: str) -> Effort:
        """Returns the effort of a new sequence of an owner."""
        debt = self._by_name.setdefault(name, LoopShare(OWNER_SHARE, FREE_S))
        self._by_name.move_to_end(name)
        if len(self._by_name) > MAX_OWNERS:
            self._by_name.popitem(last=False)
        return Effort(debt)
