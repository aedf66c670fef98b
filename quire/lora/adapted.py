"""What an adapter has for a module of the model, and what is said of a tensor that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from quire.errors import ModelLoadError
from quire.lora.targets import Target
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

Kind = Literal["a", "b", "magnitude", "expand_bias", "bias", "weight", "base_table", "table", "rows"]
"""A module's tensors: the product b @ a, [outputs, r] and [r, inputs]; and, of [outputs] each, the lengths of the rows
of weight and product together (S. Liu et al., 2024, arXiv:2402.09353), a bias of b, and one in place of the module's
own; or, of a layer behind what is pooled, the whole weight [outputs, inputs]. Of an embedding or the head, [V, H]: what
the model had, and what was trained; and the rows of some tokens."""
TABLES: tuple[Kind, ...] = ("base_table", "table", "rows")
"""Those of embeddings and the head; what comes later counts, where two have a row."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """What the file has of a module: a product of a rank, which is scaled, biases, rows of tokens, or some of these."""

    target: Target
    tensors: Mapping[Kind, TensorInfo]
    rank: int
    """0: it has no product."""
    scale: float
    tokens: tuple[int, ...] = ()
    """Those of which `rows` are."""
    take: Callable[[Kind, Tensor], Tensor] = lambda _kind, tensor: tensor
    """What of a tensor of the file is the module's."""

    @property
    def of_layers(self) -> Mapping[Kind, TensorInfo]:
        """The tensors of what is added to what layers make."""
        return {kind: info for kind, info in self.tensors.items() if kind not in TABLES}


def wrong(file: SafetensorsFile, info: TensorInfo, problem: str) -> ModelLoadError:
    """What is to be said of a tensor."""
    return ModelLoadError(f"{file.path}: tensor {info.name!r} {problem}")
