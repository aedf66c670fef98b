"""Which cores of a machine each of several replicas, or ranks, has.

Invariant: pure; no core is given to two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from quire.platforms import Node

T = TypeVar("T")
Core = tuple[int, ...]
"""The processors of a physical core."""


def divided(nodes: Sequence[Node], num: int) -> list[list[Core]]:
    """Equally many cores for each of so many, give or take one, in the order of the nodes.

    Where they can be spread evenly over the nodes, each has cores of one; where there are more nodes, each may have
    whole ones.
    """
    per_node, rest = divmod(num, len(nodes))
    if rest or any(len(node.cores) < per_node for node in nodes):
        return _parts([core for node in nodes for core in node.cores], num)
    return [part for node in nodes for part in _parts(node.cores, per_node)]


def nodes_of(cores: Sequence[Core], nodes: Sequence[Node]) -> list[int]:
    """The numbers of the nodes on which these cores are."""
    return [node.number for node in nodes if set(cores).intersection(node.cores)]


def shown(processors: Sequence[int]) -> str:
    """As the kernel writes such a list: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(processors):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _parts(items: Sequence[T], count: int) -> list[list[T]]:
    """Cut into so many pieces of nearly equal size, in order."""
    ends = [len(items) * place // count for place in range(count + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]
