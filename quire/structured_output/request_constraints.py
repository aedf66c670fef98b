# SPDX-License-Identifier: Apache-2.0
"""Checks of structured outputs in the front end: the backend at the start, and each request's constraint off the loop.

Invariant: a queued constraint is normalized, was compiled once within the limits, and suits the model's tokenizer.
Only the library's verdict is remembered, not that a check hit a time or memory limit or was killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from quire.config import EngineConfig
from quire.engine.params_checks import ParamsChecks
from quire.engine.start_feature import StartFeature
from quire.engine.tokenizer import Tokenizer
from quire.errors import UnavailableError, ValidationError
from quire.sampling_params import SamplingParams
from quire.structured_output.backends import check_backend
from quire.structured_output.checker import Checker, CheckLimitError
from quire.structured_output.normalize import normalize
from quire.structured_output.turns import Turn
from quire.structured_outputs_params import PARAM, StructuredOutputsParams

MAX_REMEMBERED = 256  # encoded constraints within the limits of `normalize`


_CHECKS = ThreadPoolExecutor(64, thread_name_prefix="quire-constraints")
"""Threads that wait for checkers, as many as there may be; waiting for a turn needs none."""


class Constraints(ParamsChecks):
    """Constraint checks with a cache of verdicts. Thread-safe; `close` ends its processes."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, ends: list[int]) -> None:
        self._settings = config.structured_outputs.settings
        self._tokenizer = tokenizer
        self._ends = ends
        self._checker = Checker(self._settings)
        self._lock = threading.Lock()
        self._known: dict[bytes, bytes | ValidationError] = {}

    def known(self, params: SamplingParams) -> SamplingParams | None:
        """Return what `validated` would return if no check is needed, else None.

        Raises:
            ValidationError: the constraint is known to be invalid, or impossible with this model.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return params
        self._check_tokenizer()
        found = self._known.get(_name(wanted))
        if isinstance(found, ValidationError):
            raise ValidationError(found.message, param=found.param)
        if found is None:
            return None
        return params.replace_unchecked(
            structured_outputs=msgspec.msgpack.decode(found, type=StructuredOutputsParams)
        )

    def validated(self, params: SamplingParams, tenant: str = "") -> SamplingParams:
        """Return the parameters with a constraint that is ready to compile; may take as long as compiling.

        Raises:
            ValidationError: the constraint cannot be enforced, or exceeds a compile limit.
            UnavailableError: the checkers are busy, or were killed.
        """
        known = self.known(params)
        if known is not None:
            return known
        with self.take_turn(tenant) as turn:
            try:
                turn.granted.result(self.max_wait_s)
            except TimeoutError:
                raise busy() from None
            return self.validated_in_turn(params, turn)

    async def validated_async(self, params: SamplingParams, tenant: str = "") -> SamplingParams:
        known = self.known(params)
        if known is not None:
            return known
        with self.take_turn(tenant) as turn:
            try:
                await asyncio.wait_for(asyncio.wrap_future(turn.granted), self.max_wait_s)
            except TimeoutError:
                raise busy() from None
            # The thread ends the turn; it continues if the client disconnects.
            return await asyncio.get_running_loop().run_in_executor(
                _CHECKS, self.validated_in_turn, params, turn
            )

    @property
    def max_wait_s(self) -> float:
        """Most seconds that a request waits for its turn."""
        return self._checker.max_wait_s

    def take_turn(self, tenant: str) -> Turn:
        """Join the queue for a check; raises UnavailableError if it is full."""
        return self._checker.turns.take(tenant)

    def validated_in_turn(self, params: SamplingParams, turn: Turn) -> SamplingParams:
        """Check in a granted turn, which ends; see `validated`."""
        turn.start()
        try:
            return self.known(params) or self._check(params, turn)
        finally:
            turn.end()

    def check_prompt(self, token_ids: list[int]) -> None:
        """Refuse a prompt after which the first generated tokens would be decoded differently.

        Raises:
            ValidationError: the text would lose spaces at its start.
        """
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.has_text(token_ids) or tokenizer.begins_bytewise:
            return
        raise ValidationError(
            f"{PARAM} needs a prompt that contains text, because this model's tokenizer drops leading spaces",
            param="prompt",
        )

    def close(self) -> None:
        """End the processes; idempotent."""
        self._checker.close()

    def _check_tokenizer(self) -> None:
        if self._tokenizer is None:
            raise ValidationError(f"{PARAM} needs a tokenizer", param=PARAM)
        if not self._tokenizer.is_bytewise:
            raise ValidationError(
                f"{PARAM} is not possible with this model: the text of a token depends on its neighbors",
                param=PARAM,
            )
        if not self._ends:
            raise ValidationError(f"{PARAM} needs a model with an end-of-sequence token", param=PARAM)

    def _check(self, params: SamplingParams, turn: Turn) -> SamplingParams:
        """Check a constraint and remember the library's verdict."""
        wanted, tokenizer = params.structured_outputs, self._tokenizer
        assert wanted is not None
        assert tokenizer is not None
        try:
            found = self._checker.checked(
                normalize(wanted, self._settings), turn, sorted(tokenizer.special_tokens)
            )
        except CheckLimitError:  # may differ next time
            raise
        except ValidationError as error:
            self._remember(wanted, error)
            raise
        self._remember(wanted, found.key)
        return params.replace_unchecked(structured_outputs=found)

    def _remember(self, wanted: StructuredOutputsParams, found: bytes | ValidationError) -> None:
        with self._lock:
            self._known[_name(wanted)] = found
            while len(self._known) > MAX_REMEMBERED:
                del self._known[next(iter(self._known))]


def _name(wanted: StructuredOutputsParams) -> bytes:
    """Return a hash of a constraint as sent by the client, which may be large."""
    return hashlib.sha256(wanted.key).digest()


def busy() -> UnavailableError:
    """Return the error of a request whose turn did not come in time."""
    return UnavailableError("constraints of other requests are being checked; try again", retry_after=5)


class GrammarStart(StartFeature):
    """Refuses an unavailable backend."""

    def check(self, config: EngineConfig) -> None:
        check_backend(config.structured_outputs.settings.backend)
