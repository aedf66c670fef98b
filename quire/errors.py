# SPDX-License-Identifier: Apache-2.0
"""Errors that quire raises on purpose.

    QuireError                      500  internal error
    ├── ClientError                 400  the request is at fault; nothing else is affected
    │   ├── ValidationError         400  a field has a bad value (also a ValueError)
    │   │   └── ContextLengthError  400  the prompt is longer than the model's context
    │   ├── AuthenticationError     401
    │   ├── ForbiddenError          403  the Host header is not allowed
    │   ├── NotFoundError           404  no such model
    │   ├── ConflictError           409  impossible in the engine's present state
    │   ├── PayloadTooLargeError    413
    │   ├── UnsupportedMediaTypeError 415
    │   ├── HeadersTooLargeError    431
    │   └── HttpVersionError        505
    ├── UnavailableError            503  loading, draining or full: try again later
    │   ├── NoRoomError             503  a server-wide limit is reached
    │   │   ├── QueueFullError      503  the queue is full
    │   │   └── MemoryShortError    503  memory is nearly exhausted
    │   └── RateLimitError          429  this client has reached its limit
    ├── DeadlineError               504  the request timed out before its first token
    ├── EngineError                 500  the engine failed, not the request
    │   ├── EngineDeadError         503  the engine core is gone
    │   └── RankLostError           500  one of several ranks is gone
    └── StartupError                     the process cannot start; one sentence for the operator
        ├── ConfigError                  a flag or a config field (also a ValueError)
        ├── ModelLoadError               a checkpoint file is missing, corrupt or does not fit
        └── UnsupportedModelError        an architecture or option that quire does not implement

Invariant: a message may be shown to the client that caused the error, so it never holds a path,
an address or a traceback unless the class is a `StartupError`, whose reader is the operator.
"""

from __future__ import annotations

from typing import ClassVar

# Separator before a foreign library's own message: for programs and the log, removed for clients.
FOREIGN_WORDS = "; it says: "


class QuireError(Exception):
    """Base of all errors; `status` is the HTTP status, `type` and `code` (if any) are OpenAI's."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"
    code: ClassVar[str | None] = None


class ClientError(QuireError):
    """Invalid request; `param` names the field at fault, if there is one."""

    status = 400
    type = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ValidationError(ClientError, ValueError):
    """Request field with an invalid or unsupported value."""


class ContextLengthError(ValidationError):
    """Prompt that leaves no room for an answer; clients recognize the code and retry with a shorter one."""

    code = "context_length_exceeded"


class AuthenticationError(ClientError):
    status = 401
    type = "AuthenticationError"


class ForbiddenError(ClientError):
    """Request from a forbidden host or origin."""

    status = 403
    type = "PermissionDeniedError"


class NotFoundError(ClientError):
    status = 404
    type = "NotFoundError"


class ConflictError(ClientError):
    """Operation that is impossible in the present state; nothing was done."""

    status = 409
    type = "ConflictError"


class PayloadTooLargeError(ClientError):
    status = 413
    type = "PayloadTooLargeError"


class UnsupportedMediaTypeError(ClientError):
    status = 415
    type = "UnsupportedMediaTypeError"


class HeadersTooLargeError(ClientError):
    status = 431
    type = "RequestHeaderFieldsTooLargeError"


class HttpVersionError(ClientError):
    """Request with another version of HTTP."""

    status = 505
    type = "HTTPVersionNotSupportedError"


class UnavailableError(QuireError):
    """Temporary unavailability; `retry_after` is in seconds."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoRoomError(UnavailableError):
    """Server-wide limit reached; `limit` is the name of the option."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class QueueFullError(NoRoomError):
    """Full queue."""


class MemoryShortError(NoRoomError):
    """Memory so short that more work might exhaust it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "min_free_memory")


class RateLimitError(UnavailableError):
    """Client-specific limit reached; other clients are served."""

    status = 429
    type = "RateLimitError"


class DeadlineError(QuireError):
    """Timeout before anything was generated."""

    status = 504
    type = "DeadlineExceededError"


class EngineError(QuireError):
    """Failure of the engine, not of the request."""


class RankLostError(EngineError):
    """Loss of a rank that others wait for (ended, failed or stopped); it is one of `ranks`."""

    def __init__(self, ranks: list[int], said: str) -> None:
        names = ", ".join(map(str, ranks))
        who = f"rank {names}" if len(ranks) == 1 else f"one of ranks {names}"
        super().__init__(f"{who} is lost{FOREIGN_WORDS}{said}")
        self.ranks = ranks


class EngineDeadError(EngineError):
    """End of the engine with its core; every request in flight is lost."""

    status = 503
    type = "ServiceUnavailableError"


class StartupError(QuireError):
    """Failure to start; the message tells the operator why and what to change."""


class ConfigError(StartupError, ValueError):
    """Bad value of a configuration field."""


class ModelLoadError(StartupError):
    """Checkpoint file that is missing, corrupt or does not match its config."""


class UnsupportedModelError(StartupError):
    """Checkpoint with an architecture or an option that quire does not implement."""


def yaml_place(error: Exception) -> str:
    """Return where and why a YAML file cannot be read: `: line 1, column 7: expected ...`."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return f": {error}"
    return f": line {mark.line + 1}, column {mark.column + 1}: {problem}"
