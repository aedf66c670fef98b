"""Packed weights and quantised activations: the layouts that the linear kernels read, and the ways to get there.

Invariant: a matrix is packed once, while loading, and exists once. On a CPU, panels of 16 outputs let a kernel
vectorise over outputs and walk k in order, so that no sum depends on how many rows are multiplied.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

PANEL = 16
"""Outputs per panel."""
PAIR = 2
"""Values of k that stand together in a panel of bfloat16."""
QUAD = 4
"""Values of k that stand together in a panel of integers."""
CHUNK = 64
"""Values of k whose activations share a scale in the fast mode; panels of integers hold whole chunks."""
INT8_ZERO = 128
"""What an int8 weight's byte is larger by."""

Layout = Literal["panels", "rows"]


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a weight is kept.

    "float": as it is. "int8" and "int4": a scale, and without `symmetric` a zero point or a minimum, per output and
    `group_size` values of k; 0: one for all of an output. "fp8" (E4M3, on GPUs): a scale per output or, `per_tensor`,
    one for all; activations are rounded to E4M3 too, with a scale per token, if `fast`. int4 that is not `symmetric`
    is rounded to scales and minimums in blocks (`formats.scaling`) if `two_level`.

    On CPUs with `fast` integers are multiplied by activations rounded to 8 bits, with a scale per token and 64
    values of k (see `ops.packed_linear`), and bfloat16 by activations rounded to bfloat16; otherwise weights are
    widened and activations stay float32. `vendor` and `invariant` are for GPUs: fp8 products may be the
    vendor's library's; a row's products have the same bits in every batch, which on a CPU is always so.
    """

    kind: str = "float"
    group_size: int = 0
    symmetric: bool = True
    fast: bool = True
    per_tensor: bool = False
    vendor: bool = True
    invariant: bool = False
    two_level: bool = False

    @property
    def is_plain_int8(self) -> bool:
        """Whether all k of an output are integers of 8 bits times one scale."""
        return self.kind == "int8" and not self.group_size and self.symmetric


FLOAT = WeightScheme(fast=False)

GatedActivation = Literal["silu_and_mul", "clamped_swiglu"]
"""What a product with a weight in two halves, gate and up, may end in."""
Function = Literal["relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"]
"""An activation of each element: "relu2" is ReLU squared (So et al., 2021, arXiv:2109.08668), and "gelu_tanh" GELU's
approximation through tanh."""
Ending = GatedActivation | Function
"""What a product may end in."""
GATED: tuple[Ending, ...] = ("silu_and_mul", "clamped_swiglu")
"""Those that make one output of two."""


class Native(NamedTuple):
    """A packed weight as the C++ kernels are told of it."""

    tensors: tuple[Tensor, Tensor, Tensor]
    """Data, scales and zeros; what is not there is empty."""
    sizes: tuple[int, int, int, int, int, int]
    """Outputs, inputs, halves, values of k that share a scale, and the codes of the types of scales and zeros."""
    format: tuple[int, int]
    """Whether fast, and the code of the format."""
    padded: int
    """Inputs and what they are padded with."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [N, K] in panels; rows beyond N and k beyond K are 0.

    `halves` is 2 where the panels of the first and second half of N alternate (gate and up), else 1. With P
    panels and G groups, `data` is [P, K, 16] for floats, but for bfloat16 [P, K / 2, 16, 2], the second of two k first;
    uint8 [P, K / 4, 16, 4] of codes of 8 bits, those of int8 with zero point 128; and uint8 [P, K / 8, 16, 4] of codes
    of 4 bits, the first four of eight k in the low nibbles and the others in the high ones. K is padded, of codes to
    whole chunks and groups. `scales` and `zeros` are [P, G, 16]: scales in float32, bfloat16 or float16; zeros in
    uint8, which are zero points, or floats, which are minimums; or either as blocks (`formats.scaling`). Without
    `zeros` int4's zero point is 8.

    So it is in the layout "panels", that of CPUs. In "rows", that of GPUs, outputs are apart: floats [N, K]; int8 or
    E4M3 [N, K] with scales [N], or of groups [N, G]; codes of 4 bits int32 [N, K / 8], K padded to a multiple of 256
    (`formats.words`), with scales and zeros [G, N].
    """

    scheme: WeightScheme
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    outputs: int
    inputs: int
    halves: int = 1
    layout: Layout = "panels"
    code_sums: Tensor | None = None
    """float32 [P, 16], of plain int8 whose activations have zero points: what the integers of each output come to."""
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """Set by the kernels of a device once they have seen it: `Native`, or a GPU's counts of the parts of a product."""

    @staticmethod
    def of(
        scheme: WeightScheme, shape: tuple[int, ...], halves: int, tensors: dict[str, Tensor]
    ) -> "PackedWeight":
        """The matrix of such a scheme and shape [N, K] whose `tensors()` these are."""
        outputs, inputs = shape
        missing: dict[str, Any] = {"scales": None, "zeros": None}
        return PackedWeight(
            scheme=scheme, outputs=outputs, inputs=inputs, halves=halves, **(missing | tensors)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Its memory, by the names of the fields; what kernels have made for themselves is theirs."""
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.init}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def with_code_sums(self) -> "PackedWeight":
        """The same matrix, of plain int8 in panels, with `code_sums`."""
        codes = self.data.transpose(1, 2).flatten(2)[..., : self.inputs]
        sums = codes.sum(-1, dtype=torch.int64) - INT8_ZERO * self.inputs
        return replace(self, code_sums=sums.float())

    def narrowed(self, inputs: slice) -> "PackedWeight":
        """The matrix of these inputs alone: int8 of whole chunks, or fp8, whose scales stand for all k of an output."""
        step = QUAD if self.layout == "panels" else 1
        data = self.data[:, inputs.start // step : inputs.stop // step].contiguous()
        return replace(self, data=data, inputs=inputs.stop - inputs.start, code_sums=None)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PackedWeight":
        """The same matrix, of tensors that `move` makes of its own."""
        moved: dict[str, Any] = {name: move(part) for name, part in self.tensors().items()}
        return replace(self, **moved)

    def with_float32_scales(self) -> "PackedWeight":
        """The same matrix, of scales in floats, with the type that holds those of any other."""
        assert self.scales is not None, "a weight with scales"
        return replace(self, scales=self.scales.float())

    @property
    def nbytes(self) -> int:
        """Memory of the matrix."""
        return sum(part.nbytes for part in self.tensors().values())


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations [T, K] as a weight in fp8 multiplies them: `values` in E4M3 and float32 `scales` [T, 1].

    `dtype` is that of the activations which they stand for, and of what a product makes of them.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[T, K]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.values.device

    def float(self) -> Tensor:
        """What they stand for, in float32."""
        return self.values.float() * self.scales


def num_panels(outputs: int, halves: int) -> int:
    """Panels of a matrix; each half begins with a panel of its own."""
    return -(-(outputs // halves) // PANEL) * halves


def to_panels(rows: Tensor, halves: int) -> Tensor:
    """[N, ...] -> [P, 16, ...], padded with zeros."""
    parts = []
    for half in rows.chunk(halves):
        padding = -len(half) % PANEL
        parts.append(
            torch.cat([half, half.new_zeros(padding, *half.shape[1:])]).view(-1, PANEL, *half.shape[1:])
        )
    return torch.stack(parts, 1).flatten(0, 1)


def from_panels(panels: Tensor, outputs: int, halves: int) -> Tensor:
    """[P, 16, ...] -> [N, ...]."""
    parts = torch.unflatten(panels, 0, (-1, halves)).unbind(1)
    return torch.cat([part.flatten(0, 1)[: outputs // halves] for part in parts])
