# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel partitioning of weights.

Invariant: a rank's shard follows from the layer's statement (`Partition` and spans, set when it is created) and
the rank's (`Shard`) alone; the loader and quantization methods slice by them and nothing else.
"""

from dataclasses import dataclass, field
from typing import Literal

from quire.distributed.group import ALONE, Group
from quire.errors import ConfigError

Partition = Literal["whole", "output", "input"]
"""Partitioned dimension of a weight. "output" (column-parallel): ranks compute different outputs, which are
concatenated.
"input" (row-parallel): ranks read different inputs and all-reduce their results, with the bias added once. "whole":
replicated.
"""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank, size and groups of one tensor-parallel rank.

    Collectives use `group`; without it each layer computes its partial sums and rows, and the caller combines them.
    `experts` is the group over which whole experts are distributed: the same ranks, or those of several replicas.
    """

    rank: int = 0
    of: int = 1
    group: Group = field(default=ALONE, compare=False)
    experts: Group = field(default=ALONE, compare=False)

    @staticmethod
    def of_group(group: Group, experts: Group | None = None) -> "Shard":
        """Return the shard of this process in a group."""
        return Shard(group.rank, group.size, group, group if experts is None else experts)


@dataclass(frozen=True, slots=True)
class StackMember:
    """Index among `count` weights that are distributed whole over ranks, neighbors together, such as a layer's
    experts.
    """

    index: int
    count: int

    def is_of(self, shard: Shard) -> bool:
        """Return whether a rank holds it."""
        return self.index in members_of(shard.experts.rank, shard.experts.size, self.count)


def members_of(rank: int, size: int, count: int) -> range:
    """Return the contiguous members that a rank holds; ranks differ by at most one."""
    return range(rank * count // size, (rank + 1) * count // size)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """Outputs that are sharded together: `units` of `unit` each, such as heads, which are never split.

    `replicated` units may be fewer than the ranks, several of which then hold the same one. With `uneven` the last rank
    may have fewer than the others.
    """

    units: int
    unit: int = 1
    replicated: bool = False
    uneven: bool = False

    @property
    def size(self) -> int:
        """Number of outputs."""
        return self.units * self.unit

    def piece(self, shard: Shard, owner: str) -> slice:
        """Return the outputs that a rank holds.

        Raises:
            ConfigError: the units cannot be partitioned so; the message names the owner.
        """
        count, rest = divmod(self.units, shard.of)
        if rest and self.uneven and (count + 1) * (shard.of - 1) < self.units:
            count += 1
            first = shard.rank * count
        elif not rest:
            first = shard.rank * count
        elif self.replicated and shard.of % self.units == 0:
            count, first = 1, shard.rank * self.units // shard.of
        else:
            units = f"{self.units} units of {self.unit} outputs" if self.unit > 1 else f"{self.units} outputs"
            raise ConfigError(f"{owner}: {units} cannot be divided evenly among {shard.of} ranks")
        return slice(first * self.unit, min(first + count, self.units) * self.unit)
