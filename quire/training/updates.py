# SPDX-License-Identifier: Apache-2.0
"""Weight updates of a synchronous and of an asynchronous engine.

Invariant: between `begin` and `finish` or `abort` no step is planned. `finish` uses the new weights in all workers, or
leaves the old ones in all; either way the bracket ends, and the engine goes on if `begin` has paused it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import ConflictError, QuireError, ValidationError
from quire.training.bracket import Bracket, Brackets, pause_mode, read_version
from quire.training.tensors import check_baseline, compare, merged

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)

EMPTY = "the weight update has no tensors: send some before it is finished"


class WeightUpdates:
    """Weight updates of an `LLMEngine`, whose methods block; also `LLM.weights`.

    An `info` is `{"path": DIRECTORY}`, or `names`, `dtype_names` and `shapes` with `segment`, the name of shared memory
    that holds them one behind the other, or without, for what a connected trainer sends.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._brackets = Brackets(engine.config, None)

    @property
    def version(self) -> str:
        """Version of the weights in use."""
        return self._engine.weight_version

    def connect(self, address: str) -> None:
        """Connect to a trainer at "host:port" (`quire.training.trainer.WeightServer`)."""
        self._brackets.connect({"backend": "tcp", "address": address})

    def disconnect(self) -> None:
        """Close the connection to the trainer."""
        self._brackets.disconnect()

    def begin(self, mode: str = "keep") -> str:
        """Open an update and return its id.

        Requests in flight are aborted (`mode` "abort"), waited for ("wait"), kept and computed again with the new
        weights ("keep"), or kept with all that the old weights have computed ("mixed").

        Raises:
            ConflictError: one is open.
            ValidationError: there is no such mode, or the weights cannot be replaced.
        """
        pause = pause_mode(mode)
        self._brackets.check_can_begin()
        resumes = not self._engine.is_sleeping
        if resumes:
            self._engine.sleep(0, pause)
        try:
            return self._brackets.begin(mode, resumes=resumes)
        except QuireError:
            if resumes:
                self._engine.wake_up()
            raise

    def update(self, info: Any, update_id: str | None = None) -> None:
        """Add tensors.

        Raises:
            ConflictError: no update is open.
            ValidationError: the tensors are not there; nothing was added.
        """
        self._brackets.add(info, update_id)

    def finish(self, version: str | None = None, update_id: str | None = None) -> str:
        """Use the new weights; returns their version.

        Raises:
            ConflictError: no update is open.
            ValidationError: the tensors are not those of the model; the old weights stay.
        """
        version, bracket = self._brackets.next_version(version), self._brackets.close(update_id)
        started, outcome = time.monotonic(), "failed"
        directory = str(bracket.staged.directory)
        try:
            if bracket.staged.is_empty:
                raise ValidationError(EMPTY, param="update_info")
            self._engine.call_core("call_workers", "check_finite", [directory])
            self._engine.replace_weights(directory, version, keeps_cache=bracket.is_mixed)
            outcome = "finished"
            self._brackets.used(bracket.staged)
        finally:
            self._end(bracket, outcome, time.monotonic() - started)
        return version

    def abort(self, update_id: str | None = None) -> None:
        """Drop the open update; the old weights stay."""
        self._end(self._brackets.close(update_id), "aborted", 0.0)

    def load(self, path: str, version: str | None = None, mode: str = "keep") -> str:
        """Use the weights of a directory, in one call; returns their version. Raises as the steps do."""
        self.begin(mode)
        try:
            self.update({"path": path})
        except BaseException:
            self.abort()
            raise
        return self.finish(version)

    def rename(self, version: str) -> None:
        """Set the version of the weights in use."""
        self._engine.rename_weights(read_version(version))

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor in its final form, by layer; those of replicas are the same."""
        return merged(self._engine.call_cores("call_workers", "weight_checksums", []))

    def compare(self, baseline: Mapping[str, str]) -> list[str]:
        """Return the names whose checksum differs from a baseline of `checksums`, missing ones included."""
        return compare(self.checksums(), check_baseline(baseline))

    def close(self) -> None:
        """Remove what updates have stored."""
        self._brackets.shutdown()

    def _end(self, bracket: Bracket, outcome: str, seconds: float) -> None:
        if outcome != "finished":
            bracket.staged.close()
        self._engine.note_weight_update(outcome, seconds)
        if bracket.resumes:
            self._engine.wake_up()


class AsyncWeightUpdates:
    """Weight updates of an `AsyncLLM`; the methods are those of `WeightUpdates`.

    An update that gets no message for `weight_update_timeout` seconds is aborted. Calls run one at a time.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        options = engine.config.training
        self._brackets = Brackets(engine.config, options.weight_transfer_addresses)
        self._timeout_s = options.weight_update_timeout
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._works: set[asyncio.Task[Any]] = set()

    @property
    def is_open(self) -> bool:
        """True while an update is open."""
        return self._brackets.is_open

    async def connect(self, init_info: Any) -> None:
        """Connect to a trainer.

        Raises:
            ValidationError: the address is malformed, or the operator does not allow it.
            UnavailableError: nothing accepts the connection.
        """
        async with self._lock:
            await asyncio.to_thread(self._brackets.connect, init_info)

    async def disconnect(self) -> None:
        async with self._lock:
            self._brackets.disconnect()

    async def begin(self, mode: str = "keep") -> str:
        """Open an update; see `WeightUpdates.begin`."""
        pause_mode(mode)
        return str(await self._shielded(self._begin(mode)))

    async def _begin(self, mode: str) -> str:
        async with self._lock:
            self._brackets.check_can_begin()
            resumes = not self._engine.is_sleeping
            if resumes:
                await self._engine.pause_generation(pause_mode(mode), clear_cache=False)
            try:
                update_id = await asyncio.to_thread(self._brackets.begin, mode, resumes=resumes)
            except QuireError:
                if resumes:
                    await self._engine.resume_generation()
                raise
            self._set_timer()
            return update_id

    async def update(self, info: Any, update_id: str | None = None) -> None:
        """Add tensors; see `WeightUpdates.update`."""
        await self._shielded(self._update(info, update_id))

    async def _update(self, info: Any, update_id: str | None) -> None:
        async with self._lock:
            self._brackets.get(update_id)
            self._stop_timer()
            try:
                await asyncio.to_thread(self._brackets.add, info, update_id)
            finally:
                self._set_timer()

    async def finish(self, version: str | None = None, update_id: str | None = None) -> str:
        """Use the new weights; see `WeightUpdates.finish`."""
        return str(await self._shielded(self._finish(version, update_id)))

    async def _finish(self, version: str | None, update_id: str | None) -> str:
        async with self._lock:
            version, bracket = self._brackets.next_version(version), self._brackets.close(update_id)
            self._stop_timer()
            started, outcome = time.monotonic(), "failed"
            directory = str(bracket.staged.directory)
            try:
                if bracket.staged.is_empty:
                    raise ValidationError(EMPTY, param="update_info")
                await self._engine.call_core("call_workers", "check_finite", [directory])
                await self._engine.replace_weights(directory, version, keeps_cache=bracket.is_mixed)
                outcome = "finished"
                self._brackets.used(bracket.staged)
            finally:
                await self._end(bracket, outcome, time.monotonic() - started)
            logger.info(
                "weights %r are in use, %.2f s after the update's end", version, time.monotonic() - started
            )
            return version

    async def abort(self, update_id: str | None = None) -> None:
        """Drop the open update; the old weights stay."""
        await self._shielded(self._abort(update_id))

    async def _abort(self, update_id: str | None) -> None:
        async with self._lock:
            bracket = self._brackets.close(update_id)
            self._stop_timer()
            await self._end(bracket, "aborted", 0.0)

    async def load(self, path: str, version: str | None = None, mode: str = "keep") -> str:
        """Use the weights of a directory, in one call; see `WeightUpdates.load`."""
        update_id = await self.begin(mode)
        try:
            await self.update({"path": path}, update_id)
        except BaseException:
            await self.abort(update_id)
            raise
        return await self.finish(version, update_id)

    async def add_named(self, info: Any) -> None:
        """Add tensors to the open update, or to a new one; `sync` finishes it."""
        if not self.is_open:
            await self.begin()
        await self.update(info)

    async def sync(self) -> None:
        """Finish the open update, if there is one, which clears the prefix cache; else clear it.

        Raises:
            ConflictError: requests are running, and there is no update.
        """
        if self.is_open:
            await self.finish()
        elif not await self._engine.reset_prefix_cache():
            raise ConflictError("the prefix cache was not reset: requests are running")

    async def rename(self, version: str) -> None:
        """Set the version of the weights in use."""
        await self._engine.rename_weights(read_version(version))

    async def checksums(self) -> dict[str, str]:
        """Return checksums; see `WeightUpdates.checksums`."""
        return merged(await self._engine.call_cores("call_workers", "weight_checksums", []))

    def close(self) -> None:
        """Remove what updates have stored."""
        self._stop_timer()
        self._brackets.shutdown()

    async def _end(self, bracket: Bracket, outcome: str, seconds: float) -> None:
        if outcome != "finished":
            await asyncio.to_thread(bracket.staged.close)
        self._engine.note_weight_update(outcome, seconds)
        if bracket.resumes and not self._engine.errored:
            await self._engine.resume_generation()

    async def _shielded(self, work: Any) -> Any:
        """Run to the end even if the caller, such as a client that disconnects, is cancelled."""
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        return await asyncio.shield(task)

    def _set_timer(self) -> None:
        self._stop_timer()
        if self._brackets.is_open:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        update_id = self._brackets.get().update_id
        logger.warning("a weight update had no message for %g s and is aborted", self._timeout_s)
        task = asyncio.create_task(self._abort_silently(update_id))
        self._works.add(task)
        task.add_done_callback(self._works.discard)

    async def _abort_silently(self, update_id: str) -> None:
        try:
            await self._abort(update_id)
        except QuireError as error:  # it was finished meanwhile, or the engine has ended
            logger.info("the weight update was not aborted: %s", error)
