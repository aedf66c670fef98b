"""A matrix that a module of transformers multiplies with by itself, as routers of experts do.

torch picks a way to multiply by the number of rows, so the bits of one row would depend on the others. This tensor has
`F.linear` computed by our kernel, which reduces each row in the same order always; otherwise it is the tensor it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import ops
from quire.kernels.linear import FLOAT, PackedWeight

_SAME = (Tensor.float, Tensor.type, Tensor.to)
"""What changes nothing, where it asks for what the tensor is."""


class RowWise(Tensor):
    """A weight [N, K] in float32 on a CPU; `packed` is the same for the kernel."""

    packed: PackedWeight

    @staticmethod
    def of(weight: Tensor) -> RowWise | None:
        """The weight as such a tensor; None where no kernel multiplies with it."""
        if weight.dim() != 2 or not weight.is_cpu or not ops.pack_weight.takes("cpu", weight, FLOAT, 1):
            return None
        made = weight.as_subclass(RowWise)
        made.packed = ops.pack_weight(weight, FLOAT)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and isinstance(args[1], RowWise):
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return args[0] if func in _SAME and result is args[0] else result


def _linear(x: Tensor, weight: RowWise, bias: Tensor | None = None) -> Tensor:
    return ops.packed_linear(x, weight.packed, bias)
