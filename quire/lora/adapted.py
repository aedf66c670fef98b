# SPDX-License-Identifier: Apache-2.0
"""Tensors that an adapter has for a module of the model, and errors about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from quire.errors import ModelLoadError
from quire.lora.targets import AdapterTarget
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

Kind = Literal["a", "b", "magnitude", "expand_bias", "bias", "weight", "base_table", "table", "rows"]
"""Kinds of a module's tensors.

- a [r, inputs], b [outputs, r]: the product b @ a
- magnitude [outputs]: DoRA's row norms of weight and product (S. Liu et al., 2024, arXiv:2402.09353)
- expand_bias [outputs]: bias of b; bias [outputs]: replaces the module's own
- weight [outputs, inputs]: whole weight of a layer after the pooler
- base_table, table [V, H]: embedding or head before and after training; rows: rows of some tokens
"""
TABLES: tuple[Kind, ...] = (
    "base_table",
    "table",
    "rows",
)  # of embeddings and the head; later ones take precedence


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """Tensors of one module: a scaled product, biases, rows of tokens, or some of these."""

    target: AdapterTarget
    tensors: Mapping[Kind, TensorInfo]
    rank: int
    """Rank of the product; 0: there is none."""
    scale: float
    tokens: tuple[int, ...] = ()
    """Token ids of `rows`."""
    take: Callable[[Kind, Tensor], Tensor] = lambda _kind, tensor: tensor
    """Extracts the module's part of a tensor of the file."""

    @property
    def layer_tensors(self) -> Mapping[Kind, TensorInfo]:
        """Tensors that change layer outputs."""
        return {kind: info for kind, info in self.tensors.items() if kind not in TABLES}


def tensor_error(file: SafetensorsFile, info: TensorInfo, problem: str) -> ModelLoadError:
    """Return an error about a tensor."""
    return ModelLoadError(f"{file.path}: tensor {info.name!r} {problem}")
