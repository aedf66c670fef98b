"""Which limits on the choice of tokens a batch has."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Whether any row of the settings of `ops.sample_tokens` uses a limit.

    The host knows when it stages a step, and the device's settings need not come back to be looked at. True is always
    right; False for all rows saves a GPU the search.
    """

    min_p: bool = True
    top_k: bool = True
    top_p: bool = True


NO_LIMITS = Limits(min_p=False, top_k=False, top_p=False)
ANY_LIMITS = Limits()
