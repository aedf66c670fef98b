# SPDX-License-Identifier: Apache-2.0
"""Lockstep of replicas that share experts (vLLM's DP waves).

A step of one replica needs the experts of all, so each takes part in every step: with its own requests, or with none
for the others' tokens only. Steps are numbered. The first replica to start step N notifies the others; one that is
notified of a step that it has not started is behind and starts it. So all reach the same number and idle there until
one has tokens to compute.

Invariant: a replica starts its steps in order, each once, and only steps cross replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import zmq

from quire.engine.messages import StepStarted
from quire.executor.base import Executor
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput


class Lockstep:
    """Step numbers of this replica and of the others.

    Args:
        notify: notifies the other replicas of a step that none of them has started, as far as known.
    """

    def __init__(self, notify: Callable[[StepStarted], None]) -> None:
        self._notify = notify
        self.started = 0  # Last step started here.
        self._last_notified = 0

    @property
    def is_behind(self) -> bool:
        """True if another replica has started a step that this one has not."""
        return self.started < self._last_notified

    def begin(self) -> None:
        """Start the next step."""
        self.started += 1
        if self.started > self._last_notified:
            self._last_notified = self.started
            self._notify(StepStarted(self.started))

    def receive(self, message: StepStarted) -> None:
        """Record a step started by another replica."""
        self._last_notified = max(self._last_notified, message.number)


class LockstepExecutor:
    """Executor proxy for the step loop that announces each step."""

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
        """Start a lockstep step, unless the plan only frees rows."""
        if plan.scheduled:
            self._lockstep.begin()


def in_step(executor: Executor, lockstep: Lockstep) -> Executor:
    """Wrap an executor so that its steps are taken in lockstep with other replicas."""
    return cast("Executor", LockstepExecutor(executor, lockstep))


class ReplicaPeers:
    """Sockets to the other replicas, in their meeting directory."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, others: Sequence[int]
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets = [context.socket(zmq.PUSH) for _ in others]
        for socket, other in zip(self._sockets, others, strict=True):
            socket.set_hwm(0)
            socket.linger = 0
            socket.connect(replica_address(directory, other))

    def send(self, message: StepStarted) -> None:
        """Send without blocking; messages to a lost replica are dropped."""
        frame = self._encoder.encode(message)
        for socket in self._sockets:
            socket.send(frame, zmq.NOBLOCK)


def replica_address(directory: Path, number: int) -> str:
    """Return the address at which a replica receives step notices."""
    return f"ipc://{directory / f'replica.{number}'}"
