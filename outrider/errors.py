"""What can go wrong, as types that every process shares.

The tree:

    OutriderError                     500  INTERNAL
    ├── InvalidRequest                400  INVALID_ARGUMENT     the caller can fix it; names the parameter
    ├── Unauthenticated               401  UNAUTHENTICATED      who asks is not known
    ├── Forbidden                     403  PERMISSION_DENIED    who asks may not do this
    ├── NotFound                      404  NOT_FOUND            no such model, session or route
    ├── Conflict                      409  ALREADY_EXISTS       its id belongs to another run
    ├── Overloaded                    429  RESOURCE_EXHAUSTED   full; come back after `retry_after_s`
    ├── Unavailable                   503  UNAVAILABLE          a part is missing right now
    │   ├── RegistryUnavailable                                 Redis cannot be reached
    │   ├── WorkerFailed                                        a worker is there, and could not do its work
    │   ├── WorkerLost                                          a worker went away in the middle of its work
    │   │   ├── WorkerSilent                                    or says nothing any more
    │   │   ├── LostByOwnPause                                  or its connection broke while we were stopped
    │   │   └── WorkerUnreached                                 or before any: it has not had it, or gives it back
    │   ├── Poisonous                                           workers were lost one after the other to this request
    │   ├── AnotherLife                    FAILED_PRECONDITION  a later life of the worker that was meant answers
    │   └── WorkerLeaves                   FAILED_PRECONDITION  the worker was told to end
    ├── SlowReader                    408  ABORTED              the caller does not read; it may go on where it was
    ├── BodyTooSlow                   408  DEADLINE_EXCEEDED    the caller does not send the rest of its request
    ├── ClientLeft                    499  CANCELLED            the caller has gone before it had sent its request
    ├── DeadlineExceeded              504  DEADLINE_EXCEEDED    the caller's time ran out
    └── ConfigurationError            500  FAILED_PRECONDITION  the operator can fix it, at start
        └── TokenizerMismatch                                   two workers do not mean the same tokens

Each class knows its HTTP status, the name of its `grpc.StatusCode` and the `type` of an OpenAI error body, so
that the edges translate without a table of their own. The module imports nothing, so that anything may import
it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

MESSAGE_BYTES_MAX: Final = (
    1000  # as a header of gRPC it takes four times as many, and 8192 is all that may go there
)


class OutriderError(Exception):
    """Base of everything that we raise on purpose; `message` is written for the person who reads it."""

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    error_type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None
    is_final: ClassVar[bool] = False
    """Whether the same request, sent again by a program at once, would end in the same way. Clients that try again by
    themselves are told not to."""

    def __init__(self, message: str) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes (Ray pickles them); Exception's own way would call the class with the
        # message alone, which does for few of them.
        return _revive, (type(self), self.args, self.__dict__)


def _shortened(message: str) -> str:
    """Without the middle where it is too long: messages quote what was sent, which may be megabytes."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return message
    half = MESSAGE_BYTES_MAX // 2 - 4
    return f"{encoded[:half].decode(errors='ignore')} … {encoded[-half:].decode(errors='ignore')}"


def _revive(kind: type[OutriderError], arguments: tuple[Any, ...], fields: dict[str, Any]) -> OutriderError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class InvalidRequest(OutriderError):
    """The request cannot be honoured as it stands. `parameter` is the field to change, None for the whole."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"

    def __init__(self, parameter: str | None, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class Unauthenticated(OutriderError):
    """Who asks has not said who it is, or not so that it can be believed."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    error_type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(OutriderError):
    """Who asks is known, and may not do this."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    error_type = "permission_error"
    code = "forbidden"


class NotFound(OutriderError):
    """What the request names does not exist here. `parameter` is the field that named it."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    error_type = "invalid_request_error"
    code = "not_found"

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class Conflict(OutriderError):
    """What the request wants to go on with is of another run. `parameter` is the field that named it."""

    http_status = 409
    grpc_code = "ALREADY_EXISTS"
    error_type = "conflict_error"
    code = "conflict"
    is_final = True

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class Overloaded(OutriderError):
    """Refused before any work because everything is full. `retry_after_s` is above 0, in seconds."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OutriderError):
    """A part that the request needs is missing right now. `retry_after_s` is above 0, in seconds."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    error_type = "service_unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, retry_after_s: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RegistryUnavailable(Unavailable):
    """Redis does not answer. The message names its address without the password, and the way out."""


class WorkerFailed(Unavailable):
    """A worker says that it failed, or says what makes no sense: asked once more it would probably do so again."""


class WorkerLost(Unavailable):
    """A worker went away, or fell silent, in the middle of its work."""


class WorkerSilent(WorkerLost):
    """A worker has the request, and has said nothing for too long."""


class LostByOwnPause(WorkerLost):
    """The connection to a worker broke while this process itself was stopped: the worker is as good as before."""


class WorkerUnreached(WorkerLost):
    """There was no connection to the worker, so that it has not had what was to be sent; or it gives that back."""


class WorkerUnanswered(WorkerUnreached):
    """There was a connection, and the worker has not said for long that it has the request: it stood still before."""


class WorkerLostAtOnce(WorkerLost):
    """A worker went away before it said that it has the request. It may have had it."""


class Poisonous(Unavailable):
    """As many workers were lost while they had this request as one request may cost."""

    code = "poisonous_request"
    is_final = True


class AnotherLife(Unavailable):
    """The worker that was meant is gone, and a later one answers at its address."""

    grpc_code = "FAILED_PRECONDITION"


class WorkerLeaves(Unavailable):
    """The worker was told to end: it begins nothing, and ends what it has not finished within its grace."""

    grpc_code = "FAILED_PRECONDITION"


class DeadlineExceeded(OutriderError):
    """The request's own deadline passed before its text was complete."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"
    code = "deadline_exceeded"
    is_final = True


class BodyTooSlow(OutriderError):
    """The client has not sent all of its request in time."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"
    code = "request_timeout"


class ClientLeft(OutriderError):
    """The client went away before all of its request had come; nobody reads the answer."""

    http_status = 499
    grpc_code = "CANCELLED"
    error_type = "invalid_request_error"
    code = "client_left"


class SlowReader(OutriderError):
    """The caller left what was generated unread for too long. It can resume the stream from what it has read."""

    http_status = 408
    grpc_code = "ABORTED"
    error_type = "timeout_error"
    code = "slow_reader"

    def __init__(self, stall_max_s: float) -> None:
        super().__init__(
            f"output waited for its reader for more than {stall_max_s:g} s, so the request was ended; what came is "
            "complete up to here. Within a minute the stream can be resumed: over HTTP where its events have ids, by "
            "the last of them (Last-Event-ID), over gRPC by request_id, run and resume_from"
        )


class ConfigurationError(OutriderError):
    """The process cannot start, or take part, as it was configured."""

    grpc_code = "FAILED_PRECONDITION"
    error_type = "configuration_error"
    code = "configuration"


class TokenizerMismatch(ConfigurationError):
    """Two sides would mean different tokens by the same ids."""

    def __init__(self, ours: str, theirs: str, who: str) -> None:
        super().__init__(
            f"tokenizer fingerprints differ: ours is {ours}, that of {who} is {theirs}; "
            "draft and target must cut texts alike, or the draft be allowed to differ (--allow-heterogeneous-vocab)"
        )
        self.ours = ours
        self.theirs = theirs
