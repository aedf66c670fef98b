"""Every error quire raises on purpose.

    QuireError                      500  something of ours went wrong
    ├── ClientError                 400  the request is at fault; nothing else is affected
    │   ├── ValidationError         400  a field has a bad value (also a ValueError)
    │   │   └── ContextLengthError  400  the prompt is longer than the model's context
    │   ├── AuthenticationError     401
    │   ├── ForbiddenError          403  the request came by a name that is not the server's
    │   ├── NotFoundError           404  no such model
    │   ├── ConflictError           409  not while the engine is in this state
    │   ├── PayloadTooLargeError    413
    │   ├── UnsupportedMediaTypeError 415
    │   ├── HeadersTooLargeError    431
    │   └── HttpVersionError        505
    ├── UnavailableError            503  loading, draining or full: try again later
    │   ├── NoRoomError             503  a limit of the whole server is met
    │   │   ├── QueueFullError      503  too much waits already
    │   │   └── MemoryShortError    503  memory is nearly all used
    │   └── RateLimitError          429  this client has used up what it may use
    ├── DeadlineError               504  the request's time was over before it had a token
    ├── EngineError                 500  the engine failed, not the request
    │   ├── EngineDeadError         503  the engine core is gone
    │   └── RankLostError           500  of several ranks one is gone
    └── StartupError                     the process cannot start; one sentence for the operator
        ├── ConfigError                  a flag or a config field (also a ValueError)
        ├── ModelLoadError               a checkpoint file is missing, corrupt or does not fit
        └── UnsupportedModelError        an architecture or option that quire does not know

Invariant: a message may be shown to the person who caused the error, so it never holds a path,
an address or a traceback unless the class is a `StartupError`, whose reader is the operator.
"""

from __future__ import annotations

from typing import ClassVar

FOREIGN_WORDS = "; it says: "
"""Behind it stands what foreign code said of its own failure: for programs and the log, and for no client."""


class QuireError(Exception):
    """Base of all errors; `status` is the HTTP status, `type` and `code` (if there is one) are OpenAI's."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"
    code: ClassVar[str | None] = None


class ClientError(QuireError):
    """The request is wrong; `param` names the field at fault where there is one."""

    status = 400
    type = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ValidationError(ClientError, ValueError):
    """A field of the request has a value that cannot be honoured."""


class ContextLengthError(ValidationError):
    """The prompt leaves no room for an answer; clients know this case by its code and go on with a shorter one."""

    code = "context_length_exceeded"


class AuthenticationError(ClientError):
    status = 401
    type = "AuthenticationError"


class ForbiddenError(ClientError):
    """The request comes from where none may come."""

    status = 403
    type = "PermissionDeniedError"


class NotFoundError(ClientError):
    status = 404
    type = "NotFoundError"


class ConflictError(ClientError):
    """What is asked for cannot be done now, and nothing was done."""

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
    """The request is of another version of HTTP."""

    status = 505
    type = "HTTPVersionNotSupportedError"


class UnavailableError(QuireError):
    """The server cannot take the request now; `retry_after` is in seconds."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoRoomError(UnavailableError):
    """The server has no room for more now; `limit` is the name of the option that says so."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class QueueFullError(NoRoomError):
    """Too much waits already."""


class MemoryShortError(NoRoomError):
    """So little memory is left that more work might end all of it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "min_free_memory")


class RateLimitError(UnavailableError):
    """This client has used up what it may use for now; others are served."""

    status = 429
    type = "RateLimitError"


class DeadlineError(QuireError):
    """The request's time was over before anything was generated."""

    status = 504
    type = "DeadlineExceededError"


class EngineError(QuireError):
    """The engine failed, not the request."""


class RankLostError(EngineError):
    """A rank that others wait for has ended, failed or stopped; `ranks` are those of which it is one."""

    def __init__(self, ranks: list[int], said: str) -> None:
        names = ", ".join(map(str, ranks))
        who = f"rank {names}" if len(ranks) == 1 else f"one of ranks {names}"
        super().__init__(f"{who} is lost{FOREIGN_WORDS}{said}")
        self.ranks = ranks


class EngineDeadError(EngineError):
    """The engine has ended with its core; every request in flight is lost."""

    status = 503
    type = "ServiceUnavailableError"


class StartupError(QuireError):
    """The process cannot start; the message tells the operator why and what to change."""


class ConfigError(StartupError, ValueError):
    """A configuration field has a bad value."""


class ModelLoadError(StartupError):
    """A checkpoint file is missing, corrupt or does not match its config."""


class UnsupportedModelError(StartupError):
    """The checkpoint asks for an architecture or an option that quire does not implement."""
