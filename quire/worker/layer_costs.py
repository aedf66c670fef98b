"""What the layers of a model cost, measured before any is loaded, so that pipeline stages can take equally long.

What counts is what a step really takes: of experts those that are asked, windows, states, formats, a rank's share.

Invariant: one layer of each kind is measured, one after the other, so memory is that of one layer, or of the head.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.kv_cache.spec import KVCacheConfig, fit_states
from quire.layers.kv_cache import kv_cache_specs
from quire.layers.shard import Shard
from quire.models.base import CausalLM
from quire.models.layer_kinds import kinds_of
from quire.models.stages import stack_of
from quire.worker.lone_layers import seconds_alone
from quire.worker.rehearsal import rehearsed_groups


class LayerCosts(NamedTuple):
    """Seconds of a step."""

    kinds: list[tuple[list[int], float]]
    """Numbers of layers that are alike, and what each of them takes."""
    behind: float
    """What stands behind the layers: norm and head."""

    def of_layers(self) -> list[float]:
        """What each takes, the last one with what is behind it. To look tokens up takes next to nothing."""
        seconds = {number: each for numbers, each in self.kinds for number in numbers}
        *others, last = (seconds[number] for number in sorted(seconds))
        return [*others, last + self.behind]

    def __str__(self) -> str:
        layers = ", ".join(f"{len(numbers)} of {each * 1e3:.3g} ms" for numbers, each in self.kinds)
        return f"{layers}, and {self.behind * 1e3:.3g} ms behind them"


def layer_costs(whole: CausalLM, shard: Shard) -> LayerCosts:
    """Those of a model without weights; all ranks that have shares of its layers call this at once."""
    layers, specs = stack_of(whole).layers, fit_states(kv_cache_specs(whole))
    cache, num = KVCacheConfig(1, rehearsed_groups(specs), specs), len(layers)

    def time(own: range) -> float:
        return seconds_alone(whole.config, shard, cache, own, num)

    kinds = []
    for numbers in kinds_of(layers):
        one = min(
            numbers, key=lambda number: number in (0, num - 1)
        )  # with neither end, if there is such a one
        kinds.append((numbers, time(range(one, one + 1))))
    return LayerCosts(kinds, time(range(num, num)))


def why_not_measured(whole: CausalLM) -> str | None:
    """Why a model's layers are not timed one by one: a phrase for people; None if they are."""
    device = whole.config.device.device
    if device != "cpu":
        return f"layers are timed on a CPU, and --device is {device}"
    if stack_of(whole).joined():
        return "some layers read keys and values of others, so they are not timed alone"
    return None
