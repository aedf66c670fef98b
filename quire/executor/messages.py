"""What an executor and the ranks in processes of their own say to each other.

Invariant: frames of msgspec, and nothing pickled. A rank answers every call; to steps only the first one has a result
to give, and the others speak if they fail.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire import errors
from quire.errors import ClientError, EngineError, QuireError, StartupError
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Execute this plan."""

    plan: SchedulerOutput


class Call(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Call one of `quire.executor.rank_process.CALLS` with plain data."""

    number: int
    method: str
    args: list[Any]


class Stepped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What came of the oldest step without a result."""

    output: ModelRunnerOutput


class Returned(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a call returned, as plain data."""

    number: int
    result: Any


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a call raised, or, with the number None, a step, after which this rank executes none."""

    number: int | None
    kind: str
    message: str

    @staticmethod
    def of(error: BaseException, number: int | None = None) -> Failed:
        return Failed(number, type(error).__name__, str(error))

    def error(self, rank: int) -> QuireError:
        """The same error where it is somebody's affair; one of ours bears the name of the rank."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, StartupError | ClientError):
            return kind(self.message)
        return EngineError(f"rank {rank} failed: {self.kind}: {self.message}")


ToRank = Step | Call
FromRank = Stepped | Returned | Failed
