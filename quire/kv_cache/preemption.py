"""How a preempted request keeps what it has computed: copied to the host, or not at all.

Invariant: a pure function of configured and measured rates; it changes how long a request is away, never its
tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.kv_cache.spec import SwapCosts


def is_swap_faster(costs: SwapCosts, num_bytes: int, num_tokens: int) -> bool:
    """Whether copying `num_bytes` out and in again takes less time than computing `num_tokens` again.

    That the prefix cache may still have some of them is left out: what it has when the request returns is not
    copied either.
    """
    return 2 * num_bytes / costs.copied_bytes_per_s < num_tokens / costs.computed_tokens_per_s


def _always(costs: SwapCosts, num_bytes: int, num_tokens: int) -> bool:
    return True


def _never(costs: SwapCosts, num_bytes: int, num_tokens: int) -> bool:
    return False


PREEMPTION_MODES: dict[str, Callable[[SwapCosts, int, int], bool]] = {
    "auto": is_swap_faster,
    "swap": _always,
    "recompute": _never,
}
"""`--preemption-mode` -> whether to swap, if the host has room."""
