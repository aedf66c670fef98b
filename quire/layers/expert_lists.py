"""Layers of experts that a checkpoint has in lists of modules: `experts.gate_up_projs.3` and `experts.down_projs.3`.

So Unsloth takes apart what a family keeps in one parameter, for bitsandbytes, which quantises linear layers alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from quire.layers.linear import GateUpLinear, Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.quantized.alternate import Alternate
from quire.layers.quantized.codec import Codec
from quire.layers.slot import Slot


class InList(MatrixLayer):
    """Mixed into a layer of an expert whose matrix is a module of a list; `index` is the expert's number."""

    index: int

    def listed(self, name: str) -> str:
        """What files call the module that would be called so if each expert were one."""
        experts, _, leaf = name.rpartition(f".{self.index}.")
        return f"{experts}.{leaf}s.{self.index}"


class LinearInList(InList, Linear):
    """A linear layer that is in a list."""

    def stored_modules(self, names: Sequence[str]) -> list[str]:
        return [self.listed(name) for name in names]

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        return super().slots(self.stored_modules(names))


class GateUpInList(InList, GateUpLinear):
    """Gate and up, which are one module of a list, whose outputs alternate.

    Each half of them counts as a module, whose name says which it is: `gate_up_projs.3:0`.
    """

    def stored_modules(self, names: Sequence[str]) -> list[str]:
        path, _, _ = names[0].rpartition(".")
        return [f"{self.listed(f'{path}.gate_up_proj')}:{half}" for half in (0, 1)]

    def in_files(self, module: str, tensors: Iterable[str], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super().in_files(module.partition(":")[0], tensors, files)

    def codec_of(self, module: str, codec: Codec) -> Codec:
        return codec if codec.cuts else Alternate(codec, half=int(module[-1]))

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for name, slot in super().slots(self.stored_modules(names)):
            path, _, rest = name.partition(":")
            half, tensor = int(rest[0]), rest[1:]
            yield path + tensor, slot if slot.shared else slot.of_stack(half, 2, dim=1).merging(0)
