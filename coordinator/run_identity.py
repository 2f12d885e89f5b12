"""The identity of a run: one request, answered once. Pure (invariant I9).

A run's output is a function of its request (tenant, prompt, parameters, the seed that was drawn for it) and of the
weights and numerics that compute it. The first half is the *request digest*, the second the *weights digest*; together
they are the run's *fingerprint*, which every event of a stream carries in its id. A replica that is asked to go on with
a stream computes the first half anew and lets only those targets go on that have the second. So a fingerprint that a
client makes up opens nothing: it is compared, and never believed.

Greedy and coupled output (a seed is set) depends on every bit of the logits, so weights and numerics must be equal. A
sampled output without a seed keeps its distribution on other numerics: there the weights alone are compared.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence, Set
from hashlib import blake2b
from typing import Final, NamedTuple, Self

from outrider.worker_record import WorkerRecord

_DIGEST_BYTES: Final = 6
_NONE: Final = "0" * 2 * _DIGEST_BYTES
FINGERPRINT: Final = re.compile(rf"([0-9a-f]{{{2 * _DIGEST_BYTES}}})-([0-9a-f]{{{2 * _DIGEST_BYTES}}})")


class WorkerLife(NamedTuple):
    """One run of a worker's process."""

    worker_id: str
    incarnation: str

    @classmethod
    def of(cls, worker: WorkerRecord) -> Self:
        return cls(worker.worker_id, worker.incarnation)


def digest_of(*parts: object) -> str:
    """Hexadecimal digest of a sequence of values: bytes as they are, anything else by its `repr`."""
    state = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        encoded = part if isinstance(part, bytes) else repr(part).encode(errors="surrogatepass")
        state.update(len(encoded).to_bytes(8, "little"))
        state.update(encoded)
    return state.hexdigest()


def prompt_digest(token_ids: Sequence[int], grammar: object) -> str:
    """Names what a request has a target compute, whoever asks and however often."""
    return digest_of(array("q", token_ids).tobytes(), grammar)


class RunIdentity:
    """What a run is bound to: its request from the start, weights and numerics from its first place at a target on.

    Invariant: once a token was generated, `accepts` is true of equal targets only.
    """

    def __init__(
        self,
        request_digest: str = _NONE,
        *,
        compares_numerics: bool = True,
        weights_digest: str | None = None,
    ) -> None:
        """`weights_digest` is known where a stream goes on that began elsewhere."""
        self.request_digest = request_digest
        self._compares_numerics = compares_numerics
        self._is_given = weights_digest is not None
        self._weights_digest = weights_digest
        self._bound_by: set[int] = set()  # sequences that are placed, or have tokens
        self._num_losses_before = 0
        self._lost_by: dict[
            int, list[WorkerLife]
        ] = {}  # workers that had a sequence of this run, by sequence
        self._killed: set[WorkerLife] = set()
        self._doubtful: dict[
            WorkerLife, WorkerRecord
        ] = {}  # of those killed: may have been cut off or paused
        self.is_blamed = False  # it is ended for its losses
        self.on_loss: Callable[[], None] = lambda: None
        """Called with each change of the losses and with the blame: who keeps them has to know before the request has
        an end."""

    def again(self) -> Self:
        """The identity of another run of the same request, on the same weights."""
        return type(self)(
            self.request_digest,
            compares_numerics=self._compares_numerics,
            weights_digest=self._weights_digest,
        )

    @property
    def weights_digest(self) -> str | None:
        """Of the targets that may compute this run; None while any may."""
        return self._weights_digest

    @property
    def fingerprint(self) -> str:
        """Of the run, as clients see it. Known from the first token on."""
        return f"{self.request_digest}-{self._weights_digest or _NONE}"

    @property
    def num_losses(self) -> int:
        """Target workers lost while they had a sequence of this run. One that was lost to several of its sequences at
        once counts once; one that was lost to the same sequence again counts again."""
        lost = self._lost_by.values()
        return self._num_losses_before + max(len(set().union(*lost)), *map(len, lost), 0)

    @property
    def killed(self) -> Set[WorkerLife]:
        """Of the workers that were lost, those that went away or fell silent: not those that said what had failed."""
        return self._killed

    def resume_with(self, num_losses: int) -> None:
        """So many were lost before, elsewhere or to an earlier request with this prompt; of what is known of that the
        largest number counts."""
        self._num_losses_before = max(self._num_losses_before, num_losses)

    @property
    def doubtful(self) -> Sequence[WorkerRecord]:
        """Of the workers that were lost, those that may be there after all."""
        return list(self._doubtful.values())

    def lose(self, sequence: int, target: WorkerRecord, *, is_gone: bool = True) -> None:
        """A sequence of the run was at this target worker when that was lost. `is_gone`: it went away or fell silent,
        and did not say what had failed."""
        life = WorkerLife.of(target)
        self._lost_by.setdefault(sequence, []).append(life)
        if is_gone:
            self._killed.add(life)
            self._doubtful[life] = target
        self.on_loss()

    def regain(self, target: WorkerRecord) -> None:
        """One of the doubtful ones is there after all."""
        life = WorkerLife.of(target)
        del self._doubtful[life]
        self._killed.discard(life)
        for lost in self._lost_by.values():
            lost[:] = [each for each in lost if each != life]
        self.on_loss()

    def blame(self) -> None:
        """The run has lost more workers than chance explains: it ends, and nobody goes on with it."""
        self.is_blamed = True
        self.on_loss()

    def accepts(self, target: WorkerRecord) -> bool:
        """Whether this target's tokens can follow those that there are."""
        return self._weights_digest is None or self._weights_digest == self._digest(target)

    def bind(self, sequence: int, target: WorkerRecord) -> bool:
        """A sequence of the run got a place at this target. False where another sequence has been placed at a
        different one meanwhile, so that the place must be given back."""
        if not self.accepts(target):
            return False
        self._weights_digest = self._digest(target)
        self._bound_by.add(sequence)
        return True

    def release(self, sequence: int) -> None:
        """The sequence lost its place before it had a token. With the last one, any target will do again."""
        self._bound_by.discard(sequence)
        if not self._bound_by and not self._is_given:
            self._weights_digest = None

    def _digest(self, target: WorkerRecord) -> str:
        numerics = target.numerics if self._compares_numerics else ""
        return digest_of(target.weights_fingerprint, numerics)


def parse_fingerprint(text: str) -> tuple[str, str] | None:
    """Request digest and weights digest; None for what is no fingerprint."""
    found = FINGERPRINT.fullmatch(text)
    return None if found is None else (found[1], found[2])
