# SPDX-License-Identifier: Apache-2.0
"""Weights without a checkpoint: random ones, and ones that only have the right shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from quire.layers.slot import Slot

_HOST = torch.device("cpu")
_NUM_DRAWN = (1 << 20) - 3


class RandomWeights:
    """Random weights: normal with deviation 0.02, norms 1, biases 0, seeded by seed and tensor name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fill(self, slots: Iterable[tuple[str, Slot]]) -> None:
        for name, parts in groupby(slots, key=itemgetter(0)):
            self._fill_parts(name, [slot for _, slot in parts])

    def _fill_parts(self, name: str, slots: list[Slot]) -> None:
        """Fill the slots of one tensor, drawing its numbers once."""
        numbers = None
        for slot in slots:
            target, source = slot.target, slot.source
            if not target.numel():
                continue
            if slot.init != "normal":
                target.fill_(1.0 if slot.init == "ones" else 0.0)
                continue
            assert slot.convert is None, "random weights are not converted"
            if source.is_whole and target.is_contiguous():
                self._draw(name, target)
                continue
            if numbers is None:
                numbers = self._draw(name, target.new_empty(source.shape))
            target.copy_(numbers[source.box])

    def _draw(self, name: str, numbers: Tensor) -> Tensor:
        return numbers.normal_(0.0, 0.02, generator=_generator(f"{self._seed}:{name}", numbers.device))

    def end_layer(self) -> None:
        pass


class AnyWeights:
    """Random weights that repeat a few numbers, since drawing them takes longer than all else."""

    def __init__(self) -> None:
        self._numbers = torch.empty(_NUM_DRAWN).normal_(0.0, 0.02, generator=_generator("any", _HOST))

    def fill(self, slots: Iterable[tuple[str, Slot]]) -> None:
        for _, slot in slots:
            target = slot.target
            if slot.init != "normal":
                target.fill_(1.0 if slot.init == "ones" else 0.0)
            elif not target.numel():
                continue
            elif target.is_contiguous():
                self._repeat(target.view(-1))
            else:
                target.copy_(self._repeat(target.new_empty(target.numel())).view(target.shape))

    def _repeat(self, numbers: Tensor) -> Tensor:
        """Fill a vector with repeated numbers."""
        drawn = self._numbers[: numbers.numel()].to(numbers)
        whole = numbers.numel() // len(drawn) * len(drawn)
        numbers[:whole].view(-1, len(drawn)).copy_(drawn)
        numbers[whole:].copy_(drawn[: numbers.numel() - whole])
        return numbers

    def end_layer(self) -> None:
        """Do nothing: no resources are held."""


def _generator(key: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
