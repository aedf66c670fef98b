# SPDX-License-Identifier: Apache-2.0
"""Base of towers: an image encoder and its projection, computed in slices.

Shapes: n patches, C channels of the tower, m embeddings, H hidden size of the language model.
Invariant: one item is computed at a time (several only of texts whose tower `joins` them), and a slice does the same in
every order, so an item's embeddings have the same bits whatever else is encoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import Multimodal
from quire.kernels import ops
from quire.kernels.attention_metadata import GroupMetadata
from quire.layers.activation import PLAIN
from quire.layers.base import Layer, Module, activation_dtype, model_dtype, parameter
from quire.layers.linear import Linear
from quire.layers.slot import Slot, TensorPart
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.json_object import JsonObject
from quire.worker.media_rows import Embeddings

TOKEN_IDS, LENGTHS = "token_ids", "lengths"
"""Arrays of texts: their tokens one behind the other, and how many each has."""
Arrays = Mapping[str, NDArray[Any]]
Slices = Generator[None, None, Embeddings]
"""Computation of one item: yields between slices, and returns the embeddings."""

NO_STEP = StepContext(())
"""Context of layers outside any step: no adapters."""
_SLICE_FLOPS = 2e9  # Some 20 ms of eight cores.
_LEAST_ROWS = 16
_MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "q_k_v": ("q", "k", "v"),
    "query_key_value": ("query", "key", "value"),
    "linear_q_k_v": ("linear_q", "linear_k", "linear_v"),
    "wi_0_wi_1": ("wi_0", "wi_1"),
}
"""Layers that hold several modules of a checkpoint."""


@dataclass(frozen=True)
class TowerNames(Multimodal):
    """Names of a multimodal checkpoint's tensors as towers know them."""

    @property
    def further_dir(self) -> str:
        """See `Multimodal.further_dir`."""
        return self.encoder_dir

    def name_alone(self, name: str) -> str:
        """Return a name without the levels that only some files have."""
        plain = re.sub(r"^(model\.)+", "", name)
        plain = re.sub(r"^language_model\.(encoder|shared)\.", r"\1.", plain)
        return re.sub(r"^(vision_tower|vision_model)\.vision_model\.", r"\1.", plain)


class TowerState:
    """Item that a tower is computing."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._result: Embeddings | None = None

    def advance(self) -> bool:
        """Compute one slice; return whether it was the last."""
        try:
            next(self._slices)
        except StopIteration as end:
            self._result = end.value
            return True
        return False

    @property
    def result(self) -> Embeddings:
        """Embeddings, after the last slice."""
        assert self._result is not None, "advance() until it returns True"
        return self._result


class Tower(CausalLM):
    """Image encoder; a model to the loader alone, whose layers have the names of `TowerNames` in full."""

    parts: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    """Prefixes of the tower's tensors; all others are the language model's."""
    lm_head = None
    base_prefix = ""
    joined: Mapping[str, tuple[str, ...]] = _MERGED
    """Name of a layer that holds several modules of a checkpoint -> their names."""

    def __init__(self, *, config: EngineConfig) -> None:
        super().__init__(config=config)
        self.dtype = model_dtype(config)
        self.hidden_size = config.arch.hidden_size

    def slices(self, arrays: Arrays) -> Slices:
        """Compute an item from the processor's arrays."""
        raise NotImplementedError

    def joins(self, token_ids: Sequence[int]) -> bool:
        """Return whether a text may be computed in one item with others, and has the same bits then."""
        return False

    def begin(self, arrays: Arrays) -> TowerState:
        """Return the state of an item of which nothing is computed yet.

        `arrays` are what `Processor.floats` returns. A missing array, or one of another shape, raises from `advance`.
        """
        return TowerState(self.slices(arrays))

    @staticmethod
    def advance(state: TowerState) -> bool:
        """Compute one slice; return whether the item is done."""
        return state.advance()

    @staticmethod
    def finish(state: TowerState) -> Embeddings:
        """Return the embeddings [m, H] of an item that is done, in the order of its positions."""
        return state.result

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        """See `CausalLM.checkpoint_layers`."""
        for module in self.modules():
            if isinstance(module, Layer):
                at, dot, leaf = module.name.rpartition(".")
                yield [f"{at}{dot}{part}" for part in self.joined.get(leaf, (leaf,))], module

    def leaves_out(self, tensor_name: str) -> bool:
        """Return whether a tensor is the language model's, or one that the tower does not compute with."""
        if tensor_name.removesuffix(".weight") in self.also_tables:
            return True
        is_own = tensor_name.startswith(self.parts)
        return not is_own or any(re.search(pattern, tensor_name) for pattern in self.unused)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def to_device(self, array: NDArray[Any]) -> Tensor:
        """Return an array of the processor on the device, in the dtype of activations."""
        given = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
        return given.to(self.device, activation_dtype(self.config))

    def linear(self, inputs: int, outputs: int, bias: bool, name: str) -> Linear:
        """Return a linear layer of the tower."""
        return Linear(in_features=inputs, out_features=outputs, bias=bias, dtype=self.dtype, name=name)


class PatchLinear(Linear):
    """Convolution of patches that do not overlap: a linear layer over flattened patches.

    The checkpoint stores the weight as [N, *patch].
    """

    def __init__(
        self, *, patch: Sequence[int], outputs: int, bias: bool, dtype: torch.dtype, name: str
    ) -> None:
        self.patch = tuple(patch)
        self.weight_rows = outputs
        super().__init__(
            in_features=math.prod(patch), out_features=outputs, bias=bias, dtype=dtype, name=name
        )

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for name, slot in super().slots(names):
            if name.endswith(".weight"):
                stored = (slot.source.shape[0], *self.patch)
                yield name, replace(slot, part=replace(slot.source, stored=stored))
            else:
                yield name, slot


class LearnedTable(Layer):
    """Learned rows [*shape] that are added or multiplied, such as position embeddings.

    `suffix` follows the layer's name in the checkpoint, which stores `stored`, the same elements in another shape.
    """

    weight: Tensor

    def __init__(
        self,
        *shape: int,
        config: EngineConfig,
        name: str,
        suffix: str = "",
        stored: Sequence[int] | None = None,
    ) -> None:
        super().__init__(name)
        self.suffix = suffix
        self.stored = None if stored is None else tuple(stored)
        self.weight = parameter(*shape, dtype=activation_dtype(config))

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        part = replace(TensorPart.all(self.weight.shape), stored=self.stored)
        yield f"{names[0]}{self.suffix}", Slot(self.weight, "normal", part)


def gated_by_second(x: Tensor) -> Tensor:
    """Return `first half * silu(second half)`: [n, 2 * I] -> [n, I]."""
    linear, gate = x.chunk(2, -1)
    return ops.activate(gate.contiguous(), "silu") * linear


def quick_gelu(x: Tensor) -> Tensor:
    """Return `x * sigmoid(1.702 * x)`."""
    return ops.activate(x * 1.702, "silu") * (1 / 1.702)


def activation_of(config: JsonObject, key: str, default: str) -> Callable[[Tensor], Tensor]:
    """Return the elementwise activation that a config names.

    Raises:
        UnsupportedModelError: the name is unknown.
    """
    known = {**PLAIN, "quick_gelu": quick_gelu}
    return known[config.choice(key, tuple(known), default)]


@contextmanager
def torch_on_one_thread(most: int | None = None) -> Iterator[None]:
    """Compute torch's own operations on one thread; kernels have threads of their own.

    `most`: no effect if torch has more threads.
    """
    before = torch.get_num_threads()
    if most is not None and before > most:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Rows = Generator[None, None, Tensor]
"""Computation in slices, which returns rows."""


def chunks(num_rows: int, flops_per_row: float, least: int = _LEAST_ROWS) -> Iterable[slice]:
    """Return the rows of each slice of a computation on independent rows, at least so many."""
    size = max(least, int(_SLICE_FLOPS / max(flops_per_row, 1.0)))
    return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))


def by_rows(compute: Callable[[Any], Tensor], x: Tensor | NDArray[Any], flops_per_row: float) -> Rows:
    """Compute what each row gives by itself, some rows at a time."""
    done = []
    for rows in chunks(len(x), flops_per_row):
        done.append(compute(x[rows]))
        yield
    return torch.cat(done)


def in_slices(patch: PatchLinear, patches: NDArray[Any], tower: Tower) -> Rows:
    """Compute the patches of an item, some at a time: [n, K] on the host -> [n, C]."""
    flops = 2.0 * patch.weight_rows * patches.shape[1]
    return by_rows(lambda part: patch(tower.to_device(part), NO_STEP), patches, flops)


def sequences(lengths: Sequence[int], device: torch.device) -> GroupMetadata:
    """Return the metadata of attention within each of some sequences, one behind the other."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return GroupMetadata(
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32, device=device),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )


def angles_of_grid(rows: Tensor, columns: Tensor, angle_count: int, theta: float) -> Tensor:
    """Return [n, 2 * angle_count]: cosines and then sines of 2-D rotary angles, half of them by row, half by column.

    Row and column have the frequencies `theta ** (-2 i / angle_count)`.
    """
    spread = torch.arange(0, angle_count, 2, dtype=torch.float32) / angle_count
    frequencies = 1.0 / (theta**spread)
    angles = torch.cat([place.float()[:, None] * frequencies for place in (rows, columns)], 1)
    return torch.cat((angles.cos(), angles.sin()), 1)


def merged_squares(x: Tensor, rows: int, columns: int, side: int, *, channels_first: bool = False) -> Tensor:
    """Return each square of side x side patches as one row: [rows * columns, C] -> [m, side * side * C].

    A square's patches are in reading order, their channels side by side; with `channels_first` the patches of a channel
    are.
    """
    squares = x.view(rows // side, side, columns // side, side, x.shape[-1])
    order = (0, 2, 4, 1, 3) if channels_first else (0, 2, 1, 3, 4)
    return squares.permute(order).reshape(-1, side * side * x.shape[-1])


class Projection(Module):
    """Two linear layers with an activation between them, after an optional norm: [m, K] -> [m, H]."""

    def __init__(
        self, first: Linear, second: Linear, activate: Callable[[Tensor], Tensor], norm: Module | None = None
    ) -> None:
        super().__init__()
        self.first, self.second, self.norm = first, second, norm
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        out: Tensor = self.second(self.activate(self.first(x, NO_STEP)), NO_STEP)
        return out
