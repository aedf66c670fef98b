"""`Lockstep`: how replicas that share experts take their steps together.

A step of one needs the experts of all, so each takes part in every step: with its own requests, or, where it has none
to compute, for the others' tokens alone. Steps are numbered. Whoever begins one that nobody has begun says so, and
whoever hears of one that it has not begun is behind, and begins it. So all come to the same number, and rest there
until somebody has tokens to compute.

Invariant: a replica begins its steps in order, each once, and nothing but a step crosses replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import zmq

from quire.engine.messages import StepBegun
from quire.executor.base import Executor
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput


class Lockstep:
    """Which step a replica is at, and which the others are at.

    Args:
        tell: tells the other replicas of a step that none of them has begun, as far as this one has heard.
    """

    def __init__(self, tell: Callable[[StepBegun], None]) -> None:
        self._tell = tell
        self.begun = 0
        """The last step that has begun here."""
        self._heard = 0

    @property
    def is_behind(self) -> bool:
        """Whether another has begun a step that this one has not."""
        return self.begun < self._heard

    def begin(self) -> None:
        """The next step begins here."""
        self.begun += 1
        if self.begun > self._heard:
            self._heard = self.begun
            self._tell(StepBegun(self.begun))

    def hear(self, message: StepBegun) -> None:
        """Another has begun a step."""
        self._heard = max(self._heard, message.number)


class SteppingExecutor:
    """What a loop needs of an executor whose steps are taken together."""

    def __init__(self, executor: Executor, lockstep: Lockstep) -> None:
        self._executor = executor
        self._lockstep = lockstep

    def submit(self, plan: SchedulerOutput) -> None:
        self._begin(plan)
        self._executor.submit(plan)

    def collect(self) -> ModelRunnerOutput:
        return self._executor.collect()

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._begin(plan)
        return self._executor.execute_model(plan)

    def _begin(self, plan: SchedulerOutput) -> None:
        """What only lets go of rows concerns nobody else."""
        if plan.scheduled:
            self._lockstep.begin()


def in_step(executor: Executor, lockstep: Lockstep) -> Executor:
    """The same executor for a loop, whose steps the other replicas take part in."""
    return cast("Executor", SteppingExecutor(executor, lockstep))


class Peers:
    """The other replicas, as one of them reaches them: by sockets in the directory where they meet."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, others: Sequence[int]
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets = [context.socket(zmq.PUSH) for _ in others]
        for socket, other in zip(self._sockets, others, strict=True):
            socket.set_hwm(0)
            socket.linger = 0
            socket.connect(place_of_replica(directory, other))

    def tell(self, message: StepBegun) -> None:
        """Without waiting for anybody: what is told to one that is gone is lost with it."""
        frame = self._encoder.encode(message)
        for socket in self._sockets:
            socket.send(frame, zmq.NOBLOCK)


def place_of_replica(directory: Path, number: int) -> str:
    """Where a replica hears of the others' steps."""
    return f"ipc://{directory / f'replica.{number}'}"
