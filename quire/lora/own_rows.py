# SPDX-License-Identifier: Apache-2.0
"""Rows of embedding tables that an adapter replaces, and DoRA's row norms.

Invariant: a row equal to the model's own, as the model stores it, is not the adapter's.

Shapes: N outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.errors import ModelLoadError
from quire.kernels import ops
from quire.kernels.low_rank import LowRankStacks
from quire.kernels.reference_collectives import tree_sum
from quire.layers.adapter_rows import AdapterTokenRows
from quire.layers.embedding import VocabEmbedding
from quire.lora.adapted import TABLES, AdaptedModule, tensor_error
from quire.lora.targets import AdapterTarget, Targets, marks_of
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

_LEAST = 1e-12  # norm of a row of zeros, whose outputs stay 0


class RowNorms:
    """Norms of the rows of weight and product of one layer, by which DoRA divides outputs (S. Liu et al., 2024).

    A rank with some inputs of each row knows part of its sum of squares, and the background reader must not
    communicate. The parts are added when the adapter first enters a slot, in the same step on all ranks. `group` has
    the other parts; None: there are none. Slices of a layer (same `whole`, its name) are summed as their outputs are,
    so norms have the same bits for any number of ranks.

    `scale_rows` multiplies rows of weight and product in an adapter's stacks by factors [N].
    """

    def __init__(
        self,
        num_outputs: int,
        scale_rows: Callable[[LowRankStacks, Tensor], None],
        group: Group | None,
        whole: str = "",
    ) -> None:
        self._scale_rows = scale_rows
        self.group = group
        self.whole = whole
        self.squares = torch.zeros(num_outputs)
        self._magnitudes = torch.zeros(num_outputs)
        self._bias = torch.zeros(num_outputs)
        self._is_here = torch.zeros(num_outputs, dtype=torch.bool)

    def add(self, here: slice, columns: Iterable[Tensor], magnitudes: Tensor, bias: Tensor | float) -> None:
        """Add outputs with these columns of weight plus product, their magnitudes and the layer's bias."""
        self.squares[here] = sum(part.square().sum(1) for part in columns)
        self._magnitudes[here], self._bias[here] = magnitudes, bias
        self._is_here[here] = True

    def apply(self, squares: Tensor, stacks: LowRankStacks) -> None:
        """Set the output factors in stacks of a single slot; squares [N] are sums over all inputs."""
        norms = squares.sqrt().clamp(min=_LEAST)
        factors = torch.where(self._is_here, self._magnitudes / norms, 1.0)
        self._scale_rows(stacks, factors)
        if self._bias.any():
            stacks.offsets[0] += (1 - factors) * self._bias


def apply_row_norms(norms: Mapping[int, RowNorms], layers: Mapping[int, LowRankStacks]) -> None:
    """Apply norms by layer index; all layers have the same group, so one all-reduce serves all."""
    if not norms:
        return
    wholes: dict[str | int, list[int]] = {}
    for index, own in norms.items():
        wholes.setdefault(own.whole or index, []).append(index)
    squares = [tree_sum([norms[index].squares for index in of]) for of in wholes.values()]
    group, known = next(iter(norms.values())).group, torch.cat(squares)
    sums = known if group is None else ops.all_reduce(known, group)
    for of, whole in zip(wholes.values(), torch.split(sums, [*map(len, squares)]), strict=True):
        for index in of:
            norms[index].apply(whole, layers[index])


_CHUNK = 4096  # rows compared at once


def read_own_rows(
    file: SafetensorsFile,
    modules: Sequence[AdaptedModule],
    targets: Targets,
    max_rows: int,
    dtype: torch.dtype,
) -> Mapping[int, AdapterTokenRows]:
    """Return the replaced rows by index of the table or head.

    Raises:
        ModelLoadError: more than `max_rows` rows, or rows of a module with DoRA.
    """
    found: dict[int, AdapterTokenRows] = {}
    for module in modules:
        for info, own, is_shared in _rows_of(file, module, targets, dtype):
            for index in _tied(module, targets) if is_shared else [module.target.places[0].layer]:
                found[index] = _merged(found.get(index), own)
                if (count := len(found[index].tokens)) > max_rows:
                    problem = f"changes the rows of {count} tokens"
                    raise tensor_error(file, info, f"{problem}; --lora-extra-vocab-size is {max_rows}")
            if len(own.tokens) and "magnitude" in module.tensors:
                raise tensor_error(file, info, "changes rows, which is not supported with use_dora")
    return {index: own for index, own in found.items() if len(own.tokens)}


def count_added(file: SafetensorsFile, rows: Mapping[int, AdapterTokenRows], targets: Targets) -> int:
    """Return the number of added tokens; head and tables must have rows for all of them.

    Raises:
        ModelLoadError: one lacks rows of added tokens.
    """
    added = {
        name: _added(rows, targets, target) for name, target in targets.modules.items() if target.has_rows
    }
    count = max(map(len, added.values()), default=0)
    kinds = {targets.modules[name].is_table for name in added}
    for name, tokens in added.items():
        if count and (tokens != [*range(count)] or len(kinds) < 2):
            raise ModelLoadError(
                f"{file.path}: there are {count} added tokens, for which embedding and head must have consecutive "
                f"rows; {name} has {len(tokens)}"
            )
    return count


def _added(rows: Mapping[int, AdapterTokenRows], targets: Targets, target: AdapterTarget) -> list[int]:
    """Return the offsets of a module's rows after its last own row."""
    index = target.places[0].layer
    size = target.inputs if target.is_table else target.outputs
    own = rows[index].tokens.tolist() if index in rows else []
    return sorted(token - size for token in own if token >= size)


def _rows_of(
    file: SafetensorsFile, module: AdaptedModule, targets: Targets, dtype: torch.dtype
) -> Iterator[tuple[TensorInfo, AdapterTokenRows, bool]]:
    """Yield what each tensor of a module changes, and whether it does so wherever the model uses that table.

    Trained rows and base tables are tied as the model's are; a trained table belongs to its module alone.
    """
    for kind in TABLES:
        if kind in module.tensors:
            info = module.tensors[kind]
            rows = file.tensor(info).to(dtype)
            own = (
                AdapterTokenRows(torch.tensor(module.tokens, dtype=torch.int64), rows.clone())
                if kind == "rows"
                else _changed_rows(rows, module, targets)
            )
            yield info, own, kind != "table"


def _table_of(module: AdaptedModule, targets: Targets) -> VocabEmbedding:
    layer = targets.layers[module.target.places[0].layer].layer
    assert isinstance(layer, VocabEmbedding), "only tables have such tensors"
    return layer


def _tied(module: AdaptedModule, targets: Targets) -> list[int]:
    """Return the indices of all layers with this module's table."""
    layer = _table_of(module, targets)
    return [index for index, own in enumerate(targets.layers) if own.layer is layer]


def _merged(first: AdapterTokenRows | None, then: AdapterTokenRows) -> AdapterTokenRows:
    """Return both; the second takes precedence."""
    if first is None:
        return then
    left = ~torch.isin(first.tokens, then.tokens)
    return AdapterTokenRows(*(torch.cat((one[left], other)) for one, other in zip(first, then, strict=True)))


def _changed_rows(table: Tensor, module: AdaptedModule, targets: Targets) -> AdapterTokenRows:
    """Return the rows of a table [V or more, H], in the model's dtype, that differ from the layer's.

    For a layer of another stage, only rows after the layer's last, by which added tokens are counted.
    """
    layer = _table_of(module, targets)
    is_here = any(targets.layers[index].is_here for index in _tied(module, targets))
    known, found = table[: layer.shape[0]], []
    for start in range(0, len(known) if is_here else 0, _CHUNK):
        kept = _kept(known[start : start + _CHUNK], layer)
        differs = _differ(kept, start, layer, targets.marks.get(layer))
        found.append(differs.nonzero()[:, 0].cpu() + start)
    tokens = torch.cat((*found, torch.arange(len(known), len(table))))
    return AdapterTokenRows(tokens, table[tokens])


def _differ(kept: Tensor, start: int, layer: VocabEmbedding, marks: Tensor | None) -> Tensor:
    """Return which rows, from `start` on, differ from the layer's; marks are compared for a sharded table."""
    if marks is not None:
        return (marks_of(kept) != marks[start : start + len(kept)]).any(1)
    own = layer.rows_here(torch.arange(start, start + len(kept), device=kept.device))
    return (kept != own).any(1)


def _kept(rows: Tensor, layer: VocabEmbedding) -> Tensor:
    """Return rows as the layer would store them, quantized as its own."""
    rows = rows.to(_device_of(layer))
    if layer.packed is None:
        return rows
    ids = torch.arange(len(rows), device=rows.device)
    return ops.packed_embedding(ids, ops.pack_weight(rows, layer.packed.scheme, layer.halves()))


def _device_of(layer: VocabEmbedding) -> torch.device:
    return next(iter(layer.tensors().values())).device
