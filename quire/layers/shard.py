"""How a matrix is cut for several ranks.

Invariant: what a rank holds follows from two statements, the layer's (`Cut` and spans, made where the layer is made)
and the rank's (`Shard`), and from nothing else; loader and methods of quantisation slice by them alone.
"""

from dataclasses import dataclass, field
from typing import Literal

from quire.distributed.group import ALONE, Group
from quire.errors import ConfigError

Cut = Literal["whole", "output", "input"]
"""Along which features a matrix may be cut. "output": ranks make different outputs, which stand one after the other.
"input": ranks read different inputs, and what they make is added up, the bias once. "whole": every rank has all."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one rank of several.

    What crosses ranks goes by way of `group`, which is theirs; without it each layer makes its own part of sums and
    rows, and whoever calls it puts the parts together. `experts` are those who share out what is shared out whole: the
    same ones, or those of several replicas.
    """

    rank: int = 0
    of: int = 1
    group: Group = field(default=ALONE, compare=False)
    experts: Group = field(default=ALONE, compare=False)

    @staticmethod
    def of_group(group: Group, experts: Group | None = None) -> "Shard":
        """That of a rank of a group."""
        return Shard(group.rank, group.size, group, group if experts is None else experts)


@dataclass(frozen=True, slots=True)
class Member:
    """One of `count` matrices, such as those of a layer's experts, that are shared out whole, neighbours together."""

    index: int
    count: int

    def is_of(self, shard: Shard) -> bool:
        """Whether a rank has it."""
        return self.index in members_of(shard.experts.rank, shard.experts.size, self.count)


def members_of(rank: int, size: int, count: int) -> range:
    """Those of `count` that a rank of so many has: as many as any other, or one more or less."""
    return range(rank * count // size, (rank + 1) * count // size)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Span:
    """Outputs that are cut by themselves: `units` of `unit` each, such as heads of their size, which no cut splits.

    `replicated` ones may be fewer than the ranks, of which several hold the same unit then. Of `uneven` ones the last
    rank may have fewer than the others, who have equally many.
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
        """Which of the outputs a rank has.

        Raises:
            ConfigError: the units cannot be shared out so; the message names the owner.
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
            raise ConfigError(f"{owner}: {units} cannot be shared out evenly among {shard.of} ranks")
        return slice(first * self.unit, min(first + count, self.units) * self.unit)
