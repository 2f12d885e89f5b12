"""Bounds on the requests that a process takes in at once, over both APIs, and on what one tenant takes of such a bound.

A request is counted from its head to the end of its answer. While its body arrives, which its client alone decides, it
is counted among those that arrive and not among those that are served: bodies that do not come keep nobody from being
served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

from outrider.errors import Overloaded

REFUSALS_AT_ONCE: Final = 128
"""Requests beyond those served that a replica takes in to refuse them."""
PER_FREE: Final = 4
"""How much a tenant may have for each unit that is free. One tenant alone may have four fifths of the whole."""
BODY_BYTES_MAX: Final = 512 << 20
"""Most bytes of bodies that are not complete, together."""


Arriving = Callable[[], AbstractContextManager[Callable[[int], None]]]
"""Counts a request among those that arrive, while its body is read inside the block; yields a function to call with the
number of bytes before they are kept. Raises Overloaded, also after the block if as many have come meanwhile."""


class TenantShares:
    """Room of one kind of which each tenant may have at most `per_free` times what is free; not thread-safe.

    Whoever comes finds some, however many tenants have taken what they may: `n` of them leave the part
    `1 / (1 + n * per_free)` to others. A tenant that is alone is not held to the part of many.
    """

    def __init__(self, size: int, what: str, *, per_free: int = PER_FREE, retry_after_s: float = 1.0) -> None:
        """`what` names what has room, for refusals: "files on their way"."""
        self._size, self._what, self._per_free, self._retry_after_s = size, what, per_free, retry_after_s
        self._by_tenant: dict[str | None, int] = {}
        self._num = 0

    @property
    def num(self) -> int:
        """How much is taken at present."""
        return self._num

    @contextmanager
    def taken(self, tenant: str | None, amount: int = 0) -> Iterator[Callable[[int], None]]:
        """Takes room inside the block; yields a function that takes more, or gives back where that is negative. Both
        raise Overloaded if there is none."""
        own = 0

        def take(more: int) -> None:
            nonlocal own
            held, free = self._by_tenant.get(tenant, 0), self._size - self._num
            if more > 0 and (more > free or held >= self._per_free * free):
                whose = "this coordinator has" if tenant is None else f"tenant {tenant} has"
                raise Overloaded(
                    f"{whose} as many {self._what} as it may have at once; try again when some are complete",
                    self._retry_after_s,
                )
            own += more
            self._add(tenant, more)

        try:
            if amount:
                take(amount)
            yield take
        finally:
            self._add(tenant, -own)

    def _add(self, tenant: str | None, amount: int) -> None:
        self._num += amount
        held = self._by_tenant.pop(tenant, 0) + amount
        if held:
            self._by_tenant[tenant] = held


def ongoing_max(requests_max: int) -> int:
    """The most requests that whoever hosts a replica passes to it: more than those of `RequestLimit`. The replica
    answers requests for health besides, and refuses others itself, as it knows who goes first and when to come back."""
    limit = RequestLimit(requests_max + REFUSALS_AT_ONCE)
    return limit.num_max + limit.num_arriving_max + REFUSALS_AT_ONCE


class RequestLimit:
    """Counts requests of any kind; not thread-safe.

    The service refuses earlier, and knows who goes first. This bounds what is read and refused at the same time, and
    what one tenant may have of it, in whatever way it keeps its requests: one that is alone has all that a replica
    serves and refuses, and others find some more.
    """

    def __init__(self, num_of_tenant: int) -> None:
        """`num_of_tenant`: the requests of a tenant that is alone."""
        self.num_max = num_of_tenant + num_of_tenant // PER_FREE
        """The most requests at once, those that arrive left out."""
        self.num_arriving_max = self.num_max  # their bodies may all come at once
        self._served = TenantShares(self.num_max, "requests")
        self._arriving = TenantShares(self.num_arriving_max, "requests whose bodies are on their way")
        self._body_bytes = TenantShares(BODY_BYTES_MAX, "bytes of bodies on their way")

    @property
    def num(self) -> int:
        """The number of requests at present."""
        return self._served.num + self._arriving.num

    @contextmanager
    def entered(self, tenant: str | None = None) -> Iterator[Arriving]:
        """Counts a request inside the block; yields how to count its body. Raises Overloaded if there are too many."""
        with self._served.taken(tenant, 1) as take:
            yield partial(self._while_arriving, tenant, take)

    @contextmanager
    def _while_arriving(self, tenant: str | None, take: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
        with self._arriving.taken(tenant, 1), self._body_bytes.taken(tenant) as take_bytes:
            take(-1)
            yield take_bytes
        take(1)
