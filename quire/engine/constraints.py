"""Checks of `structured_outputs` in the front end, before a request is queued.

Invariant: a request that is queued with a constraint has one that is settled, was compiled once within the limits, and
fits the model's tokenizer. Only what the library says of a constraint is remembered, and not that a check met a limit
of time or memory or was killed.
"""

from __future__ import annotations

import hashlib
import threading

import msgspec

from quire.config import EngineConfig
from quire.engine.tokenizer import Tokenizer
from quire.errors import UnavailableError, ValidationError
from quire.sampling_params import SamplingParams
from quire.structured_output.checker import Checker, CheckLimitError
from quire.structured_output.params import PARAM, StructuredOutputsParams
from quire.structured_output.settle import settle
from quire.structured_output.turns import Turn

MAX_REMEMBERED = 256  # encoded constraints within the limits of `settle`


class Constraints:
    """Checks constraints, and remembers those that are good or bad.

    Threads may share one; `close` ends its processes.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, ends: list[int]) -> None:
        self._settings = config.structured_outputs.settings
        self._tokenizer = tokenizer
        self._ends = ends
        self._checker = Checker(self._settings)
        self._lock = threading.Lock()
        self._known: dict[bytes, bytes | ValidationError] = {}

    def known(self, params: SamplingParams) -> SamplingParams | None:
        """Return what `settled` would return if no check is needed, else None.

        Raises:
            ValidationError: the constraint is known to be bad, or impossible with this model.
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
        return params.settled(structured_outputs=msgspec.msgpack.decode(found, type=StructuredOutputsParams))

    def settled(self, params: SamplingParams, tenant: str = "") -> SamplingParams:
        """The same parameters with a constraint that is ready to be compiled; may take as long as compiling may.

        Raises:
            ValidationError: the constraint cannot be enforced, or takes more to compile than it may.
            UnavailableError: others keep the checkers busy, or they were killed.
        """
        known = self.known(params)
        if known is not None:
            return known
        with self.take_turn(tenant) as turn:
            try:
                turn.granted.result(self.max_wait_s)
            except TimeoutError:
                raise busy() from None
            return self.checked(params, turn)

    @property
    def max_wait_s(self) -> float:
        """Seconds that a request waits for its turn."""
        return self._checker.max_wait_s

    def take_turn(self, tenant: str) -> Turn:
        """Join the queue of those whose constraints are to be checked; raises UnavailableError if it is full."""
        return self._checker.turns.take(tenant)

    def checked(self, params: SamplingParams, turn: Turn) -> SamplingParams:
        """As `settled`, in a turn that is granted, which ends."""
        turn.start()
        try:
            return self.known(params) or self._find_out(params, turn)
        finally:
            turn.end()

    def check_prompt(self, token_ids: list[int]) -> None:
        """Refuse a prompt behind which the first tokens would not be what they are elsewhere.

        Raises:
            ValidationError: the text would lose spaces at its start.
        """
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.has_text(token_ids) or tokenizer.begins_bytewise:
            return
        raise ValidationError(
            f"{PARAM} needs a prompt with some text in it, because this model's tokenizer drops spaces at the start",
            param="prompt",
        )

    def close(self) -> None:
        """End what runs; calling it twice is fine."""
        self._checker.close()

    def _check_tokenizer(self) -> None:
        if self._tokenizer is None:
            raise ValidationError(f"{PARAM} needs a tokenizer", param=PARAM)
        if not self._tokenizer.is_bytewise:
            raise ValidationError(
                f"{PARAM} is not possible with this model: what a token spells depends on its neighbours",
                param=PARAM,
            )
        if not self._ends:
            raise ValidationError(
                f"{PARAM} needs a model with an end-of-sequence token, and this one has none", param=PARAM
            )

    def _find_out(self, params: SamplingParams, turn: Turn) -> SamplingParams:
        """Check a constraint, and remember what the library says of it."""
        wanted, tokenizer = params.structured_outputs, self._tokenizer
        assert wanted is not None
        assert tokenizer is not None
        try:
            found = self._checker.checked(
                settle(wanted, self._settings), turn, sorted(tokenizer.special_tokens)
            )
        except CheckLimitError:  # a matter of this time and this machine
            raise
        except ValidationError as error:
            self._remember(wanted, error)
            raise
        self._remember(wanted, found.key)
        return params.settled(structured_outputs=found)

    def _remember(self, wanted: StructuredOutputsParams, found: bytes | ValidationError) -> None:
        with self._lock:
            self._known[_name(wanted)] = found
            while len(self._known) > MAX_REMEMBERED:
                del self._known[next(iter(self._known))]


def _name(wanted: StructuredOutputsParams) -> bytes:
    """A short name of a constraint as a client wrote it, which may have megabytes."""
    return hashlib.sha256(wanted.key).digest()


def busy() -> UnavailableError:
    """The error of a request that waited for its turn in vain."""
    return UnavailableError("constraints of other requests are being checked; try again", retry_after=5)
