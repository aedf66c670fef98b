# SPDX-License-Identifier: Apache-2.0
"""Base of layers with one large weight: sharding, checkpoint slots and the packed form.

Invariant: a weight exists once. Before `finish_loading` it is the parameters that its quantization method created,
afterwards `packed`, which the device's kernels read. Where there are none, `weight` stays, dequantized.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from quire.distributed.group import Group
from quire.errors import ConfigError
from quire.kernels import reference
from quire.kernels.linear import FLOAT, PackedWeight
from quire.layers.base import Layer, parameter
from quire.layers.input_quantization import InputQuantization
from quire.layers.quantization import FLOATS, HeldByOtherRank, QuantMethod
from quire.layers.quantized.codec import Codec
from quire.layers.shard import WHOLE, Partition, Shard, ShardSpan, StackMember
from quire.layers.slot import Slot, TensorPart, length

_PACKED = "packed."
_VALUES = "packed_values."


@dataclass(frozen=True, slots=True)
class ModuleRows:
    """Rows that a layer reads of one checkpoint module's weight."""

    name: str
    num_rows: int
    """Rows of the module's weight."""
    region: slice
    """Rows that all ranks together read here."""
    rows: slice
    """Rows that this rank reads."""
    place: slice
    """Rows of the layer that they become."""


class MatrixLayer(Layer):
    """Base of layers with a weight [N, K] and optionally a bias [N].

    `spans` are the parts of N that are sharded separately: the merged checkpoint modules, or the parts of a module that
    is stored merged, perhaps in `groups`: an equal part of each span, then the next of each. `transposed`: the
    checkpoint stores [K, N]. A weight that is `only_looked_up` is never quantized. One with a `member` is a whole
    matrix of several that are distributed over ranks (experts): this rank has all of it or nothing.
    """

    makes_products = False
    """True if the layer computes all its matmuls itself and so may permute its inputs."""

    quantizes_inputs = False
    """True if its matmuls apply `input_quantization`."""

    def __init__(
        self,
        spans: Sequence[ShardSpan],
        inputs: int,
        dtype: torch.dtype,
        *,
        name: str,
        partition: Partition,
        bias: bool = False,
        transposed: bool = False,
        only_looked_up: bool = False,
        groups: int = 1,
        member: StackMember | None = None,
    ) -> None:
        super().__init__(name)
        self.spans = tuple(spans)
        self.member = member
        self.groups = groups
        self.inputs = inputs
        self.dtype = dtype
        self.partition: Partition = partition
        self.has_bias = bias
        self.transposed = transposed
        self.only_looked_up = only_looked_up
        self.create_weights(FLOATS)

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        self.method, self.shard = method.looked_up() if self.only_looked_up else method, shard
        self.is_here = self.member is None or self.member.is_of(shard)
        if not self.is_here:
            self.method = HeldByOtherRank(method)
        outputs = shard if self.partition == "output" else WHOLE
        self.rows = tuple(span.piece(outputs, self.name) for span in self.spans)
        self.num_rows = sum(map(length, self.rows))
        self.columns = self._columns(shard if self.partition == "input" else WHOLE)
        self.weight: nn.Parameter | None = None
        self.packed: PackedWeight | None = None
        self.packed_values: PackedWeight | None = None
        """Last rows of a QKV layer if its method packs values apart; `packed` has the rows before them."""
        self.input_order: nn.Parameter | None = None
        """int64 [K]: column j of `packed` belongs to input input_order[j]; None: not permuted."""
        self.input_quantization: InputQuantization | None = None
        """Activation quantization of the input, if the checkpoint specifies it."""
        self.sources: list[tuple[str, slice]] = []
        """Checkpoint tensors that `weight` is read from, and their rows in it; known once slots are made."""
        self.method.create(self)
        crosses = shard.group.size > 1 and self.partition != "whole"
        self.group: Group | None = shard.group if crosses else None
        """Ranks that all-gather or all-reduce the outputs, depending on `partition`; None: outputs are complete."""
        self.adds_once = self.is_here and (self.partition != "input" or shard.rank == 0)
        """True if this rank adds the bias, which must enter a sum once."""
        self.bias = parameter(self.num_rows, dtype=self.dtype) if self.has_bias and self.adds_once else None

    def _columns(self, shard: Shard) -> slice:
        count, rest = divmod(self.inputs, shard.of)
        if rest or (shard.of > 1 and count % self.method.input_unit):
            raise ConfigError(
                f"{self.name}: {self.inputs} inputs cannot be split over {shard.of} ranks in multiples of"
                f" {self.method.input_unit}, which {self.method.name} weights need"
            )
        return slice(shard.rank * count, (shard.rank + 1) * count)

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        return None if self.group is None else self.group.why_not_captured()

    def stored_modules(self, names: Sequence[str]) -> list[str]:
        """Return the names in the files of the modules that the layer holds."""
        return list(names)

    def stored_name(self, module: str, tensor: str) -> str:
        """Return the name in the files of a module's tensor."""
        return f"{module}.{tensor}"

    def in_files(self, module: str, tensors: Iterable[str], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of a module's tensors that `files` has."""
        at = {tensor: self.stored_name(module, tensor) for tensor in tensors}
        return {tensor: files[name] for tensor, name in at.items() if name in files}

    def codec_of(self, module: str, codec: Codec) -> Codec:
        """Return the codec for this layer's part of a module that `codec` decodes."""
        return codec

    def own(self, tensor: Tensor) -> Tensor:
        """Return this layer's part of a tensor stored for its module."""
        return tensor

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield from self.method.slots(self, names)
        if self.has_bias:
            yield from self._bias_slots(names)

    def _bias_slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for piece in self.pieces(names):
            bias, rows = (
                (torch.empty(0, dtype=self.dtype), slice(0, 0))
                if self.bias is None  # held by another rank
                else (self.bias[piece.place], piece.rows)
            )
            yield (
                f"{piece.name}.bias",
                Slot(bias, "zeros", TensorPart((piece.num_rows,), (piece.region,), (rows,))),
            )

    def pieces(self, names: Sequence[str]) -> list[ModuleRows]:
        """Return the rows that the layer reads of the checkpoint modules; one name per span, or one for all."""
        total = sum(span.size for span in self.spans)
        if len(names) == 1 and self.groups == 1 and self.num_rows == total:
            everything = slice(0, total)
            return [ModuleRows(names[0], total, everything, everything, everything)]
        sources = list(names) * len(self.spans) if len(names) == 1 else names
        members: dict[str, list[int]] = {}
        for index, name in enumerate(sources):
            members.setdefault(name, []).append(index)
        return [piece for name, spans in members.items() for piece in self.pieces_of(name, spans)]

    def pieces_of(self, name: str, members: Sequence[int]) -> Iterator[ModuleRows]:
        """Yield the rows read of one module, whose parts are the spans `members`."""
        starts = [0, *accumulate(map(length, self.rows))]
        num_rows, first = sum(self.spans[index].size for index in members), 0
        groups = self.groups if len(members) > 1 else 1
        for group in range(groups):
            for index in members:
                rows, size = self.rows[index], self.spans[index].size // groups
                begin = min(max(group * size, rows.start), rows.stop)
                end = max(begin, min((group + 1) * size, rows.stop))
                # Take no rows of a group that belongs to another rank.
                taken = first + begin - group * size if end > begin else first
                place = starts[index] + begin - rows.start
                yield ModuleRows(
                    name,
                    num_rows,
                    slice(first, first + size),
                    slice(taken, taken + end - begin),
                    slice(place, place + end - begin),
                )
                first += size

    def finish_loading(self) -> None:
        self.method.finish(self)
        if self.bias is not None and self.packed is not None:
            self.bias = nn.Parameter(self.bias.float(), requires_grad=False)

    def replaced(self, device_type: str) -> Collection[str]:
        return self.method.replaced(self, device_type)

    def tensors(self) -> dict[str, Tensor]:
        packed = ((_PACKED, self.packed), (_VALUES, self.packed_values))
        parts = {
            prefix + name: part
            for prefix, weight in packed
            if weight is not None
            for name, part in weight.tensors().items()
        }
        return super().tensors() | parts

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self.method.replaced(self, "cpu"):
            setattr(self, name, None)
        packed, values = (
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for prefix in (_PACKED, _VALUES)
        )
        super().restore(
            {name: each for name, each in tensors.items() if not name.startswith((_PACKED, _VALUES))}
        )
        (rows, inputs), apart = self.matrix_shape(), self.num_value_rows if values else 0
        if packed:
            assert self.packed is None, "a layer is restored once"
            self.packed = PackedWeight.of(self.method.scheme, (rows - apart, inputs), self.halves(), packed)
        if values:
            assert self.method.values is not None, "the method that packed them apart"
            self.packed_values = PackedWeight.of(self.method.values, (apart, inputs), 1, values)

    def matrix(self) -> PackedWeight:
        """Return the weight for kernels that read several at once; an unpacked one is in layout "rows"."""
        if self.packed is not None:
            return self.packed
        assert self.weight is not None, "a layer is loaded before it is used"
        outputs, inputs = self.weight.shape
        return PackedWeight(FLOAT, self.weight.data, None, None, outputs, inputs, self.halves(), "rows")

    def unpacked(self) -> Tensor:
        """Return the dequantized finished weight [N, K], columns in input order."""
        weight = reference.unpack_weight(self.matrix()).detach()
        if self.packed_values is not None:
            weight = torch.cat((weight, reference.unpack_weight(self.packed_values)))
        return weight if self.input_order is None else weight[:, self.input_order.argsort()]

    def adopt(self, weight: Tensor) -> None:
        """Set the weight by reference."""
        self.weight = nn.Parameter(weight, requires_grad=False)

    def matrix_shape(self) -> tuple[int, int]:
        """Return (outputs, inputs) of this rank's shard of the finished weight."""
        return self.num_rows, length(self.columns)

    @property
    def num_value_rows(self) -> int:
        """Rows of the rank's shard that a method may pack apart, the last ones: values beside queries and keys."""
        return 0

    @property
    def rearranges(self) -> bool:
        """True if the multiplied weight is derived from the checkpoint's, so that its stored form cannot be kept."""
        return False

    def rearranged(self, weight: Tensor) -> Tensor:
        """Return the weight to multiply with, derived from the checkpoint's."""
        return weight

    def halves(self) -> int:
        """Return the number of parts in which the outputs are packed."""
        return 1
