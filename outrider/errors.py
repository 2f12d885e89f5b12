"""Exceptions that all processes share.

The tree:

OutriderError                     500  INTERNAL
├── InvalidRequest                400  INVALID_ARGUMENT     the caller can fix it; names the parameter
│   ├── ContextExceeded                                     the prompt leaves no room in the model's context
│   └── BodyTooLong               413                       the body exceeds the limit of this API
├── Unauthenticated               401  UNAUTHENTICATED      the caller is not known
│   └── InvalidToken                                        its token of an identity provider is not valid
├── Forbidden                     403  PERMISSION_DENIED    the caller may not do this
├── NotFound                      404  NOT_FOUND            no such session or route
│   └── ModelNotFound                                       no such model
├── Conflict                      409  ALREADY_EXISTS       the id belongs to another run
├── Overloaded                    429  RESOURCE_EXHAUSTED   full; retry after `retry_after_s`
├── Unavailable                   503  UNAVAILABLE          a part is missing right now
│   ├── RegistryUnavailable                                 Redis cannot be reached
│   ├── StorageUnavailable                                  the storage of batches' files cannot be used
│   ├── WorkerFailed                                        a worker answered, but could not do its work
│   ├── WorkerLost                                          a worker was lost during its work
│   │   ├── WorkerSilent                                    it stopped answering
│   │   ├── LostByOwnPause                                  its connection broke while this process was stopped
│   │   └── WorkerUnreached                                 it never had the work, or gives it back
│   ├── Poisonous                                           several workers in turn were lost to this request
│   ├── AnotherLife                    FAILED_PRECONDITION  a later incarnation of the worker answers
│   └── WorkerLeaves                   FAILED_PRECONDITION  the worker is shutting down
├── SlowReader                    408  ABORTED              the caller does not read; it may resume
├── BodyTooSlow                   408  DEADLINE_EXCEEDED    the caller does not send the rest of its request
├── ClientLeft                    499  CANCELLED            the caller left before it had sent its request
├── DeadlineExceeded              504  DEADLINE_EXCEEDED    the request's deadline passed
└── ConfigurationError            500  FAILED_PRECONDITION  the operator can fix it, at start
    ├── TokenizerMismatch                                   two workers have different token ids
    └── HeadMismatch                                        a draft head's target does not send what it reads

Each class carries its HTTP status, the name of its `grpc.StatusCode` and the `type` of an OpenAI error body, so that
the servers translate without a table of their own. The module imports nothing of ours, so that anything may import it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, TypeVar

MESSAGE_BYTES_MAX: Final = 1000  # a gRPC header takes up to four times as many, and is limited to 8192

ErrorT = TypeVar("ErrorT", bound=BaseException)


def detached(error: ErrorT) -> ErrorT:
    """The error without its traceback and the errors behind it, for one that is kept: the frames of a traceback keep
    everything alive that they refer to, such as a compiler or a whole request."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class OutriderError(Exception):
    """Base of all errors that we raise on purpose; `message` is written for the person who reads it."""

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    error_type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None
    is_final: ClassVar[bool] = False
    """Whether an immediate retry of the same request would fail in the same way. Clients are then told not to retry."""
    told_as: str | None = None
    """The text for callers of the public API where messages name parts of the installation, such as workers."""

    def __init__(self, message: str) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.message = message

    @property
    def told(self) -> str:
        """The text for callers of the public API; `message` is for logs and for other processes."""
        return self.message if self.told_as is None else self.told_as

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray pickles errors. Exception's default would call the class with the message alone, which few of them accept.
        return _revive, (type(self), self.args, self.__dict__)


def _shortened(message: str) -> str:
    """Removes the middle of a text that is too long: messages and parameters quote input, which may be megabytes."""
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
    """The request is invalid as it stands. `parameter` is the field to change, None for the whole."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"

    def __init__(self, parameter: str | None, message: str) -> None:
        super().__init__(message)
        self.parameter = None if parameter is None else _shortened(parameter)


class ContextExceeded(InvalidRequest):
    """The prompt fills the model's context. Clients recognise OpenAI's code and the beginning of its message."""

    code = "context_length_exceeded"

    def __init__(self, parameter: str, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            parameter,
            f"This model's maximum context length is {max_model_len} tokens, of which at least one must be left for "
            f"the answer; the prompt has {num_prompt_tokens} tokens. Shorten it, or set truncate_prompt_tokens",
        )


class BodyTooLong(InvalidRequest):
    """The body is longer than the API reads."""

    http_status = 413


class Unauthenticated(OutriderError):
    """The caller sent no credentials, or none that are valid."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    error_type = "authentication_error"
    code = "invalid_api_key"


class InvalidToken(Unauthenticated):
    """The caller sent a token of an identity provider that is not valid here."""

    code = "invalid_token"


class Forbidden(OutriderError):
    """The caller is known but not permitted to do this."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    error_type = "permission_error"
    code = "forbidden"


class NotFound(OutriderError):
    """The request names something that does not exist here. `parameter` is the field that names it."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    error_type = "invalid_request_error"
    code = "not_found"

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = None if parameter is None else _shortened(parameter)


class ModelNotFound(NotFound):
    """The request names a model that is not served."""

    code = "model_not_found"

    def __init__(self, message: str) -> None:
        super().__init__(message, "model")


class Conflict(OutriderError):
    """The id in the request belongs to another run. `parameter` is the field that carries it."""

    http_status = 409
    grpc_code = "ALREADY_EXISTS"
    error_type = "conflict_error"
    code = "conflict"
    is_final = True

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = None if parameter is None else _shortened(parameter)


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
    """Redis does not answer. The message names its address without the password, and a remedy."""

    told_as = "the registry does not answer; try again later"


class StorageUnavailable(Unavailable):
    """The storage of batches' files does not take a call."""

    told_as = "the storage of files does not answer; try again later"


class WorkerFailed(Unavailable):
    """A worker reported a failure or sent an invalid answer; a retry there would probably fail, too."""

    told_as = "a target worker failed while it had this request"


class WorkerLost(Unavailable):
    """A worker was lost, or stopped answering, during its work."""

    told_as = "a target worker was lost while it had this request"


class WorkerSilent(WorkerLost):
    """A worker that has the request has been silent for too long."""

    told_as = "a target worker fell silent while it had this request"


class LostByOwnPause(WorkerLost):
    """The connection to a worker broke while this process itself was stopped; the worker is presumably well."""

    told_as = "the connection to a target worker broke while it had this request"


class WorkerUnreached(WorkerLost):
    """The worker could not be connected, so it never had the request; or it gives the request back."""

    told_as = "no target worker could be reached that takes this request"


class WorkerUnanswered(WorkerUnreached):
    """The worker was connected but has not acknowledged the request for too long; it stalled before receiving it."""

    told_as = "a target worker does not answer"


class WorkerLostAtOnce(WorkerLost):
    """A worker was lost before it acknowledged the request, which it may have had."""


class Poisonous(Unavailable):
    """As many workers were lost while they had this request as one request may cost."""

    code = "poisonous_request"
    is_final = True


class AnotherLife(Unavailable):
    """The intended worker process is gone, and a later one answers at its address."""

    told_as = "a worker has left"
    grpc_code = "FAILED_PRECONDITION"


class WorkerLeaves(Unavailable):
    """The worker is shutting down: it starts nothing new, and ends what does not finish within its grace period."""

    told_as = "a worker leaves"
    grpc_code = "FAILED_PRECONDITION"


class DeadlineExceeded(OutriderError):
    """The request's deadline passed before its output was complete."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"
    code = "deadline_exceeded"
    is_final = True


class BodyTooSlow(OutriderError):
    """The client did not send its whole request in time."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"
    code = "request_timeout"


class ClientLeft(OutriderError):
    """The client left before its whole request had arrived; nobody reads the answer."""

    http_status = 499
    grpc_code = "CANCELLED"
    error_type = "invalid_request_error"
    code = "client_left"


class SlowReader(OutriderError):
    """The caller left output unread for too long. It can resume the stream from what it has read."""

    http_status = 408
    grpc_code = "ABORTED"
    error_type = "timeout_error"
    code = "slow_reader"

    def __init__(self, stall_max_s: float) -> None:
        super().__init__(
            f"output was not read for more than {stall_max_s:g} s, so the request was ended; what was sent is "
            "complete up to here. Within a minute the stream can be resumed: over HTTP where its events have ids, by "
            "the last of them (Last-Event-ID), over gRPC by request_id, run and resume_from"
        )


class ConfigurationError(OutriderError):
    """The process cannot start, or take part, with its configuration."""

    grpc_code = "FAILED_PRECONDITION"
    error_type = "configuration_error"
    code = "configuration"


class TokenizerMismatch(ConfigurationError):
    """Two workers have different tokenizers, so the same ids mean different tokens."""

    def __init__(self, ours: str, theirs: str, who: str) -> None:
        super().__init__(
            f"tokenizer fingerprints differ: ours is {ours}, that of {who} is {theirs}; "
            "draft and target must tokenize identically unless --allow-heterogeneous-vocab is set"
        )
        self.ours = ours
        self.theirs = theirs


class HeadMismatch(ConfigurationError):
    """A draft worker runs a draft head, and a target keeps no features for it."""

    def __init__(self, ours: str, theirs: str) -> None:
        """Fingerprints of the draft worker's head, and of the target's; empty: it has none."""
        kept = f"it keeps those of the head {theirs[:16]}" if theirs else "it keeps none"
        super().__init__(
            f"this draft worker runs the draft head {ours[:16]}, and the target sends no features for it ({kept}); "
            "start the target, on Outrider's own engine, with --draft-head and the folder of this head"
        )
