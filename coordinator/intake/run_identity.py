"""The identity of a run: one request, answered once. Pure (invariant I9).

A run's output is a function of its request (tenant, prompt, parameters, drawn seed) and of the weights and numerics
that compute it. The *request digest* identifies the former, the *weights digest* the latter. Together they are the
run's *fingerprint*, which the id of every stream event carries. A replica that resumes a stream computes the request
digest anew and continues only on targets with the weights digest. So a forged fingerprint gives no access: it is
compared, never trusted.

Greedy and coupled output (a seed is set) depends on every bit of the logits, so weights and numerics must be equal.
Output sampled without a seed keeps its distribution on other numerics, so only the weights are compared.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence, Set
from hashlib import blake2b
from typing import Final, NamedTuple, Self

from outrider.registry.worker_record import WorkerRecord

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
    """Hashes a sequence of values to hexadecimal: bytes as they are, anything else by its `repr`."""
    state = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        encoded = part if isinstance(part, bytes) else repr(part).encode(errors="surrogatepass")
        state.update(len(encoded).to_bytes(8, "little"))
        state.update(encoded)
    return state.hexdigest()


def prompt_digest(tenant: str | None, model: str, token_ids: Sequence[int], grammar: object) -> str:
    """Identifies a tenant's computation, independent of repetition. `tenant` is that of the caller's key; None where
    there are no keys, whatever name a client gives itself."""
    return digest_of(tenant, model, array("q", token_ids).tobytes(), grammar)


class RunIdentity:
    """Binds a run to its request from the start, and to weights and numerics from its first slot at a target on.

    Invariant: once a token was generated, `accepts` is true only for targets of equal weights and numerics.
    """

    def __init__(
        self,
        request_digest: str = _NONE,
        *,
        compares_numerics: bool = True,
        weights_digest: str | None = None,
    ) -> None:
        """`weights_digest` is given for a stream that began at another replica."""
        self.request_digest = request_digest
        self._compares_numerics = compares_numerics
        self._is_given = weights_digest is not None
        self._weights_digest = weights_digest
        self._bound_by: set[int] = set()  # sequences that have a slot or tokens
        self._num_losses_before = 0
        self._lost_by: dict[int, list[WorkerLife]] = {}  # lost workers that had a sequence of this run
        self._killed: set[WorkerLife] = set()
        self._doubtful: dict[WorkerLife, WorkerRecord] = {}  # killed ones that may only be unreachable
        self.is_blamed = False  # ended because of its losses
        self.on_loss: Callable[[], None] = lambda: None
        """Called on each change of the losses and on `blame`, so that they are recorded before the request ends."""

    def again(self) -> Self:
        """Creates the identity of another run of the same request on the same weights."""
        return type(self)(
            self.request_digest,
            compares_numerics=self._compares_numerics,
            weights_digest=self._weights_digest,
        )

    @property
    def weights_digest(self) -> str | None:
        """The digest of the targets that may compute this run; None: any may."""
        return self._weights_digest

    @property
    def fingerprint(self) -> str:
        """The run's fingerprint as clients see it, known from the first token on."""
        return f"{self.request_digest}-{self._weights_digest or _NONE}"

    @property
    def num_losses(self) -> int:
        """The number of target workers lost while they had a sequence of this run.

        A worker lost with several sequences counts once; one that the same sequence lost again counts again.
        """
        if not self._lost_by:  # asked with every step
            return self._num_losses_before
        lost = self._lost_by.values()
        return self._num_losses_before + max(len(set().union(*lost)), *map(len, lost), 0)

    @property
    def killed(self) -> Set[WorkerLife]:
        """The lost workers that exited or stopped answering, without those that reported an error."""
        return self._killed

    def resume_with(self, num_losses: int) -> None:
        """Sets the losses at other replicas or of earlier requests with this prompt; the largest number counts."""
        self._num_losses_before = max(self._num_losses_before, num_losses)

    @property
    def doubtful(self) -> Sequence[WorkerRecord]:
        """The lost workers that may still be alive."""
        return list(self._doubtful.values())

    def lose(self, sequence: int, target: WorkerRecord, *, is_gone: bool = True) -> None:
        """Records that a sequence lost its target worker. `is_gone`: the worker exited or stopped answering without
        reporting an error."""
        life = WorkerLife.of(target)
        self._lost_by.setdefault(sequence, []).append(life)
        if is_gone:
            self._killed.add(life)
            self._doubtful[life] = target
        self.on_loss()

    def regain(self, target: WorkerRecord) -> None:
        """Removes the losses of a doubtful worker that proved to be alive."""
        life = WorkerLife.of(target)
        del self._doubtful[life]
        self._killed.discard(life)
        for lost in self._lost_by.values():
            lost[:] = [each for each in lost if each != life]
        self.on_loss()

    def blame(self) -> None:
        """Marks a run that lost more workers than chance explains: it ends and cannot be resumed."""
        self.is_blamed = True
        self.on_loss()

    def accepts(self, target: WorkerRecord) -> bool:
        """Whether this target may continue the run."""
        return self._weights_digest is None or self._weights_digest == self._digest(target)

    def bind(self, sequence: int, target: WorkerRecord) -> bool:
        """Binds the run to a target at which a sequence got a slot.

        False if another sequence was bound to different weights meanwhile; the slot must then be released.
        """
        if not self.accepts(target):
            return False
        self._weights_digest = self._digest(target)
        self._bound_by.add(sequence)
        return True

    def release(self, sequence: int) -> None:
        """Unbinds a sequence that lost its slot before its first token. After the last one, any target is accepted."""
        self._bound_by.discard(sequence)
        if not self._bound_by and not self._is_given:
            self._weights_digest = None

    def _digest(self, target: WorkerRecord) -> str:
        numerics = target.numerics if self._compares_numerics else ""
        return digest_of(target.weights_fingerprint, numerics)


def parse_fingerprint(text: str) -> tuple[str, str] | None:
    """Splits a fingerprint into request digest and weights digest; None if it is not valid."""
    found = FINGERPRINT.fullmatch(text)
    return None if found is None else (found[1], found[2])
