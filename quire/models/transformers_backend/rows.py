# SPDX-License-Identifier: Apache-2.0
"""Start-up checks that a model can run on a packed batch, and batch-invariant linear layers for its own modules.

In the check a token attends to itself only, so its hidden state must not depend on other tokens. A convolution, a
state, or angles that depend on the longest request would make it depend on other requests' rows.

torch chooses a matmul algorithm by the number of rows, so a row's bits would depend on the batch. `RowWise` weights
make `F.linear` use our kernel, which always reduces each row in the same order; other operations see a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, UnsupportedModelError
from quire.kernels import ops
from quire.kernels.linear import FLOAT, PackedWeight
from quire.layers.base import activation_dtype, device_type

_SAME = (Tensor.float, Tensor.type, Tensor.to)
"""Methods that return the same tensor if dtype and device are already right."""


class RowWise(Tensor):
    """Weight [N, K] in float32 on a CPU; `packed` is the same for the kernel."""

    packed: PackedWeight

    @staticmethod
    def of(weight: Tensor) -> RowWise | None:
        """Return the weight as such a tensor; None if no kernel supports it."""
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


Run = Callable[[Tensor, Tensor | None], Tensor]
"""Ids [T], and positions [T] or None for the model's own count -> hidden states [T, H]."""

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Tolerance of hidden states, relative to the largest."""


def position_offset(run: Run, config: EngineConfig, padding_idx: int | None) -> int:
    """Return the model's number of the first position: 0, or the one after padding, as in RoBERTa.

    Raises:
        UnsupportedModelError: neither.
        ConfigError: too few positions remain for the longest request.
    """
    ids = _ids(config, padding_idx)
    counted = run(ids, None)
    for offset in {0: None, (padding_idx or 0) + 1: None}:
        if _agree(run(ids, torch.arange(offset, offset + len(ids))), counted, config):
            most = config.arch.max_position_embeddings - offset
            if offset and config.model.max_model_len > most:
                raise ConfigError(
                    f"--max-model-len is {config.model.max_model_len}, but may be at most {most}"
                )
            return offset
    raise UnsupportedModelError("it numbers positions in a way of its own")


def check_rows_are_apart(run: Run, config: EngineConfig, padding_idx: int | None, offset: int) -> None:
    """Compare a token among others with the same token alone.

    Raises:
        UnsupportedModelError: the results differ.
    """
    last = (config.model.max_model_len or config.arch.max_position_embeddings - offset) - 1
    middle, ids = min(5, last), _ids(config, padding_idx)
    together = run(ids, torch.tensor([0, middle, last]))[1:2]
    if not _agree(together, run(ids[1:2], torch.tensor([middle])), config):
        raise UnsupportedModelError(
            "a token's hidden state depends on others not by attention alone, or not on the position it is given"
        )


def _ids(config: EngineConfig, padding_idx: int | None) -> Tensor:
    ids = [token for token in range(3, config.arch.vocab_size) if token != padding_idx]
    return torch.tensor(ids[:3], device=device_type(config))


def _agree(one: Tensor, other: Tensor, config: EngineConfig) -> bool:
    difference = (one - other).abs().max().item()
    return difference <= _TOLERANCES[activation_dtype(config)] * other.abs().max().item()
