"""What the layers around one large matrix share: how it is cut, where its tensors go, and how it is found packed.

Invariant: a matrix exists once. Before it is finished it is the parameters that its method made, afterwards `packed`,
the form that the device's kernels read; where there are none, `weight` stays, and a quantised one is what its integers
stand for.
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
from quire.layers.quantization import FLOATS, Elsewhere, QuantMethod
from quire.layers.quantized.codec import Codec
from quire.layers.rounded_inputs import RoundedInputs
from quire.layers.shard import WHOLE, Cut, Member, Shard, Span
from quire.layers.slot import Part, Slot, length

_PACKED = "packed."


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that a layer takes of the matrix of one of the checkpoint's modules."""

    name: str
    num_rows: int
    """Of the module's matrix."""
    region: slice
    """The rows that all ranks take together at this place."""
    rows: slice
    """Those that this rank takes."""
    place: slice
    """Where they are in the layer."""


class MatrixLayer(Layer):
    """Base of layers with a matrix [N, K] and perhaps a bias [N].

    `spans` are the parts of N that are cut by themselves: those of the checkpoint's modules that are merged here, or of
    a module that holds them merged already, perhaps in `groups`: an equal part of each span, then the next of each.
    `transposed` says that the checkpoint stores [K, N]. A matrix that is `only_looked_up` stays as it is, whatever the
    method. One that is a `member` of some which are shared out whole is all there, or not at all.
    """

    makes_products = False
    """Whether all products of its matrix are made by itself, so that it can bring what it reads into another order."""

    rounds_inputs = False
    """Whether its products see `rounded_inputs`."""

    def __init__(
        self,
        spans: Sequence[Span],
        inputs: int,
        dtype: torch.dtype,
        *,
        name: str,
        cut: Cut,
        bias: bool = False,
        transposed: bool = False,
        only_looked_up: bool = False,
        groups: int = 1,
        member: Member | None = None,
    ) -> None:
        super().__init__(name)
        self.spans = tuple(spans)
        self.member = member
        self.groups = groups
        self.inputs = inputs
        self.dtype = dtype
        self.cut: Cut = cut
        self.has_bias = bias
        self.transposed = transposed
        self.only_looked_up = only_looked_up
        self.create_weights(FLOATS)

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        self.method, self.shard = method.looked_up() if self.only_looked_up else method, shard
        self.is_here = self.member is None or self.member.is_of(shard)
        if not self.is_here:
            self.method = Elsewhere(method)
        outputs = shard if self.cut == "output" else WHOLE
        self.rows = tuple(span.piece(outputs, self.name) for span in self.spans)
        self.num_rows = sum(map(length, self.rows))
        self.columns = self._columns(shard if self.cut == "input" else WHOLE)
        self.weight: nn.Parameter | None = None
        self.packed: PackedWeight | None = None
        self.input_order: nn.Parameter | None = None
        """int64 [K]: column j of `packed` is that of input input_order[j]; None: as they come."""
        self.rounded_inputs: RoundedInputs | None = None
        """What it is multiplied by, where a checkpoint says how that is rounded; None: as it comes."""
        self.sources: list[tuple[str, slice]] = []
        """The checkpoint's tensors that `weight` is read of, and the rows of each in it; known with the slots."""
        self.method.create(self)
        crosses = shard.group.size > 1 and self.cut != "whole"
        self.group: Group | None = shard.group if crosses else None
        """Those with whom its outputs are put together, or added up, depending on the cut; None: they are whole."""
        self.adds_once = self.is_here and (self.cut != "input" or shard.rank == 0)
        """Whether this rank adds what is added to a sum once."""
        self.bias = parameter(self.num_rows, dtype=self.dtype) if self.has_bias and self.adds_once else None

    def _columns(self, shard: Shard) -> slice:
        count, rest = divmod(self.inputs, shard.of)
        if rest or (shard.of > 1 and count % self.method.input_unit):
            raise ConfigError(
                f"{self.name}: {self.inputs} inputs cannot be cut for {shard.of} ranks into multiples of"
                f" {self.method.input_unit}, which {self.method.name} weights want"
            )
        return slice(shard.rank * count, (shard.rank + 1) * count)

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        return None if self.group is None else self.group.why_not_captured()

    def stored_modules(self, names: Sequence[str]) -> list[str]:
        """The modules that files have, of those that the layer holds."""
        return list(names)

    def stored_name(self, module: str, tensor: str) -> str:
        """What files call a tensor of a module."""
        return f"{module}.{tensor}"

    def in_files(self, module: str, tensors: Iterable[str], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of a module's tensors that are in `files`."""
        at = {tensor: self.stored_name(module, tensor) for tensor in tensors}
        return {tensor: files[name] for tensor, name in at.items() if name in files}

    def codec_of(self, module: str, codec: Codec) -> Codec:
        """What reads this layer's part of a module, which `codec` reads."""
        return codec

    def own(self, tensor: Tensor) -> Tensor:
        """What is this layer's of a tensor that files have for its module."""
        return tensor

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield from self.method.slots(self, names)
        if self.has_bias:
            yield from self._bias_slots(names)

    def _bias_slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for piece in self.pieces(names):
            bias, rows = (
                (torch.empty(0, dtype=self.dtype), slice(0, 0))
                if self.bias is None  # another rank has it
                else (self.bias[piece.place], piece.rows)
            )
            yield f"{piece.name}.bias", Slot(bias, "zeros", Part((piece.num_rows,), (piece.region,), (rows,)))

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """What the layer takes of the outputs of the checkpoint's modules, one name for each span or one for all."""
        total = sum(span.size for span in self.spans)
        if len(names) == 1 and self.groups == 1 and self.num_rows == total:
            everything = slice(0, total)
            return [Piece(names[0], total, everything, everything, everything)]
        sources = list(names) * len(self.spans) if len(names) == 1 else names
        members: dict[str, list[int]] = {}
        for index, name in enumerate(sources):
            members.setdefault(name, []).append(index)
        return [piece for name, spans in members.items() for piece in self.pieces_of(name, spans)]

    def pieces_of(self, name: str, members: Sequence[int]) -> Iterator[Piece]:
        """What is taken of one module, of which these spans are parts."""
        starts = [0, *accumulate(map(length, self.rows))]
        num_rows, first = sum(self.spans[index].size for index in members), 0
        groups = self.groups if len(members) > 1 else 1
        for group in range(groups):
            for index in members:
                rows, size = self.rows[index], self.spans[index].size // groups
                begin = min(max(group * size, rows.start), rows.stop)
                end = max(begin, min((group + 1) * size, rows.stop))
                # Of a group that is another rank's, nothing at all.
                taken = first + begin - group * size if end > begin else first
                place = starts[index] + begin - rows.start
                yield Piece(
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
        parts = {} if self.packed is None else self.packed.tensors()
        return super().tensors() | {_PACKED + name: part for name, part in parts.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self.method.replaced(self, "cpu"):
            setattr(self, name, None)
        plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PACKED)}
        parts = {name.removeprefix(_PACKED): tensors[name] for name in tensors.keys() - plain.keys()}
        super().restore(plain)
        if parts:
            assert self.packed is None, "a layer is restored once"
            self.packed = PackedWeight.of(self.method.scheme, self.matrix_shape(), self.halves(), parts)

    def matrix(self) -> PackedWeight:
        """The weight as kernels of several matrices read it; one that its device's kernels left plain is in rows."""
        if self.packed is not None:
            return self.packed
        assert self.weight is not None, "a layer is loaded before it is used"
        outputs, inputs = self.weight.shape
        return PackedWeight(FLOAT, self.weight.data, None, None, outputs, inputs, self.halves(), "rows")

    def unpacked(self) -> Tensor:
        """What the finished matrix stands for [N, K], its columns as inputs come."""
        weight = reference.unpack_weight(self.matrix()).detach()
        return weight if self.input_order is None else weight[:, self.input_order.argsort()]

    def adopt(self, weight: Tensor) -> None:
        """Make this tensor the weight."""
        self.weight = nn.Parameter(weight, requires_grad=False)

    def matrix_shape(self) -> tuple[int, int]:
        """Outputs and inputs of the rank's share of the finished matrix."""
        return self.num_rows, length(self.columns)

    @property
    def rearranges(self) -> bool:
        """Whether what is multiplied by is not the checkpoint's matrix but made of it: its numbers cannot stay."""
        return False

    def rearranged(self, weight: Tensor) -> Tensor:
        """What is multiplied by, of the checkpoint's matrix."""
        return weight

    def halves(self) -> int:
        """In how many parts the outputs are packed."""
        return 1
