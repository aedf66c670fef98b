"""What the front end does about `structured_outputs` before a request is queued.

Invariant: a request that is queued with a constraint has one that is settled, was compiled once within the limits, and
fits the model's tokenizer.
"""

from __future__ import annotations

import threading

from quire.config import EngineConfig
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.sampling_params import SamplingParams
from quire.structured_output.checker import Checker
from quire.structured_output.params import PARAM, StructuredOutputsParams
from quire.structured_output.settle import settle

MAX_REMEMBERED = 256


class Constraints:
    """Checks constraints, each kind of them once.

    Threads may share one; `close` ends its processes.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, ends: list[int]) -> None:
        self._settings = config.structured_outputs.settings
        self._tokenizer = tokenizer
        self._ends = ends
        self._checker = Checker(self._settings)
        self._lock = threading.Lock()
        self._known: dict[bytes, StructuredOutputsParams | ValidationError] = {}

    def is_known(self, params: SamplingParams) -> bool:
        """Whether `settled` has its answer at hand."""
        wanted = params.structured_outputs
        return wanted is None or wanted.key in self._known

    def settled(self, params: SamplingParams) -> SamplingParams:
        """The same parameters with a constraint that is ready to be compiled; may take as long as compiling may.

        Raises:
            ValidationError: the constraint cannot be enforced, or takes more to compile than it may.
            UnavailableError: others keep the checkers busy.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return params
        self._check_tokenizer()
        found = self._known.get(wanted.key)
        if found is None:
            found = self._find_out(wanted)
            self._remember(wanted.key, found)
        if isinstance(found, ValidationError):
            raise ValidationError(found.message, param=found.param)
        return params.settled(structured_outputs=found)

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

    def _find_out(self, wanted: StructuredOutputsParams) -> StructuredOutputsParams | ValidationError:
        assert self._tokenizer is not None
        try:
            return self._checker.checked(
                settle(wanted, self._settings), sorted(self._tokenizer.special_tokens)
            )
        except ValidationError as error:
            return error

    def _remember(self, key: bytes, found: StructuredOutputsParams | ValidationError) -> None:
        with self._lock:
            self._known[key] = found
            while len(self._known) > MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
