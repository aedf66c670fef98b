"""Which neighbouring layers of a model are a pipeline stage: those with which the slowest stage takes least.

Invariant: a partition follows from what layers cost and keep, and from `--pipeline-partition`; whoever measures what
they cost sees to it that all ranks have the same one.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import inf, log

from torch import nn

from quire.errors import ConfigError
from quire.layers.embedding import VocabEmbedding
from quire.layers.kv_cache import cache_users
from quire.models.base import CausalLM
from quire.models.stack import Stack

OPTION = "--pipeline-parallel-size"
ALIKE = 1.05
"""Durations are rounded to powers of it: machines repeat none more exactly."""
_UNITS = 1000
"""Of the least duration: sums of integers are the same in any order."""


def partition(
    model: CausalLM, stack: Stack, num_stages: int, costs: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Layers of each stage: as `--pipeline-partition` says, or balanced by what each layer costs.

    `stack` is the model's, neither of which has been cut. What only the first or the last stage has counts with its
    layer. None: layers cost what a step reads of them.

    Raises:
        ConfigError: the model cannot be cut so; the message says why.
    """
    keep = [next(cache_users(layer), None) is not None for layer in stack.layers]
    asked, joined = model.config.parallel.stage_sizes, stack.joined()
    sizes = asked or balanced(bytes_read(model, stack) if costs is None else costs, num_stages, keep, joined)
    for stage, (first, end) in enumerate(pairwise([0, *accumulate(sizes)])):
        _check_beginning(first, joined)
        if not any(keep[first:end]):
            raise ConfigError(
                f"{OPTION}: no layer of stage {stage}, {first} to {end - 1}, keeps anything of a request; "
                "--pipeline-partition can give it others"
            )
    return sizes


def _check_beginning(first: int, joined: Collection[int]) -> None:
    if first in joined:
        latest = min(joined) - 1
        raise ConfigError(
            f"{OPTION}: a stage would begin with layer {first}, but those behind {latest} are together, since they "
            f"read keys and values of each other: the last stage begins with layer {latest} at the latest "
            "(--pipeline-partition)"
        )


def balanced(
    costs: Sequence[int], num_stages: int, keep: Sequence[bool] = (), joined: Collection[int] = ()
) -> tuple[int, ...]:
    """How many neighbours each stage gets, at least one, so that the largest sum of costs is as small as can be.

    And, if it can be, at least one of those that `keep` says to keep something of a request; by default all do. If it
    can be, none begins with one that is `joined` to that before it.
    """
    sums, kept = [0, *accumulate(costs)], [0, *accumulate(keep or [True] * len(costs))]

    def cost(first: int, end: int) -> float:
        return sums[end] - sums[first] if kept[first] < kept[end] and first not in joined else inf

    @cache
    def least(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Of the costs from `first` on: the largest sum, and the counts."""
        if stages == 1:
            return cost(first, len(costs)), (len(costs) - first,)
        return min(
            (max(cost(first, end), most), (end - first, *counts))
            for end in range(first + 1, len(costs) - stages + 2)
            for most, counts in [least(end, stages - 1)]
        )

    return least(0, num_stages)[1]


def in_units(seconds: Sequence[float]) -> list[int]:
    """Durations in units of the least, those that are about the same made equal, so that noise decides nothing."""
    least = min(seconds)
    return [round(_UNITS * ALIKE ** round(log(each / least, ALIKE))) for each in seconds]


def bytes_read(model: CausalLM, stack: Stack) -> list[int]:
    """What a step reads of each layer's parameters; what only the first or the last stage has counts with its layer.

    Reading them takes most of a step's time. Of a table in which tokens are looked up a step reads next to nothing; of
    experts it may read a few, and they count as if it read all.
    """
    costs = [_num_bytes([layer]) for layer in stack.layers]
    entering = stack.end_modules(stack.entering)
    tables = [part for module in entering for part in module.modules() if isinstance(part, VocabEmbedding)]
    costs[0] += _num_bytes(entering) - _num_bytes(tables)
    costs[-1] += _num_bytes(stack.end_modules(stack.leaving)) + _num_bytes(model.behind_layers())
    return costs


def _num_bytes(modules: Iterable[nn.Module]) -> int:
    return sum(param.nbytes for module in modules for param in module.parameters())
