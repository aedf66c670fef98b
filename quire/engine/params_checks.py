# SPDX-License-Identifier: Apache-2.0
"""Interface of checks of sampling parameters that may take long, found in `quire.features.CONSTRAINTS`."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.features import CONSTRAINTS
from quire.plugins import import_place
from quire.sampling_params import SamplingParams


class ParamsChecks:
    """Checks of constraints on generated texts; this class refuses every constraint. Thread-safe.

    Args:
        ends: tokens that end a text.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, ends: list[int]) -> None:
        """Accept the arguments of subclasses."""

    def validated(self, params: SamplingParams, tenant: str = "") -> SamplingParams:
        """Return the parameters with a constraint that is ready to compile; may take as long as compiling.

        Raises:
            ValidationError: the constraint cannot be enforced, or exceeds a limit.
            UnavailableError: the checkers are busy, or were killed.
        """
        if params.structured_outputs is not None:
            raise ValidationError(
                "this installation cannot constrain texts (quire.structured_output)",
                param="structured_outputs",
            )
        return params

    async def validated_async(self, params: SamplingParams, tenant: str = "") -> SamplingParams:
        """Await `validated`; raises as it does."""
        return self.validated(params, tenant)

    def check_prompt(self, token_ids: list[int]) -> None:
        """Refuse a prompt after which the first generated tokens would be decoded differently.

        Raises:
            ValidationError: the text would lose spaces at its start.
        """
        return None

    def close(self) -> None:
        """Release processes; may be called twice."""
        return None


def make_params_checks(config: EngineConfig, tokenizer: Tokenizer | None, ends: list[int]) -> ParamsChecks:
    """Return the checks in the table, or those that refuse."""
    kinds: list[type[ParamsChecks]] = [import_place(place) for place in CONSTRAINTS.values()]
    return next(iter(kinds), ParamsChecks)(config, tokenizer, ends)
