"""Which rows of tables an adapter has of its own, of all that its file has.

Invariant: a row that is the model's own, as the model keeps it, is none of the adapter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels import ops
from quire.layers.embedding import VocabEmbedding
from quire.layers.own_rows import TokenRows
from quire.lora.adapted import TABLES, AdaptedModule, wrong
from quire.lora.row_marks import marks_of
from quire.lora.targets import Target, Targets
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

_CHUNK = 4096
"""Rows that are compared at once."""


def read_own_rows(
    file: SafetensorsFile,
    modules: Sequence[AdaptedModule],
    targets: Targets,
    max_rows: int,
    dtype: torch.dtype,
) -> Mapping[int, TokenRows]:
    """By the index of each table, or head, what its adapter has in place of its rows.

    Raises:
        ModelLoadError: there are more than `max_rows`, or some in a module that DoRA changes.
    """
    found: dict[int, TokenRows] = {}
    for module in modules:
        for info, own, is_shared in _rows_of(file, module, targets, dtype):
            for index in _tied(module, targets) if is_shared else [module.target.places[0].layer]:
                found[index] = _merged(found.get(index), own)
                if (count := len(found[index].tokens)) > max_rows:
                    problem = f"has rows for {count} tokens that are not the model's"
                    raise wrong(file, info, f"{problem}; --lora-extra-vocab-size is {max_rows}")
            if len(own.tokens) and "magnitude" in module.tensors:
                raise wrong(
                    file, info, "has rows that are not the model's, with which use_dora is not supported"
                )
    return {index: own for index, own in found.items() if len(own.tokens)}


def count_added(file: SafetensorsFile, rows: Mapping[int, TokenRows], targets: Targets) -> int:
    """How many tokens behind the model's an adapter has, for which head and tables must have a row, all of them.

    Raises:
        ModelLoadError: one has not, or leaves some out.
    """
    added = {
        name: _added(rows, targets, target) for name, target in targets.modules.items() if target.has_rows
    }
    count = max(map(len, added.values()), default=0)
    kinds = {targets.modules[name].is_table for name in added}
    for name, tokens in added.items():
        if count and (tokens != [*range(count)] or len(kinds) < 2):
            raise ModelLoadError(
                f"{file.path}: there are {count} tokens behind the model's, for which embedding and head must have "
                f"rows, one behind the other; {name} has {len(tokens)}"
            )
    return count


def _added(rows: Mapping[int, TokenRows], targets: Targets, target: Target) -> list[int]:
    """Of the rows of a module, how far those behind it are behind its last."""
    index = target.places[0].layer
    size = target.inputs if target.is_table else target.outputs
    own = rows[index].tokens.tolist() if index in rows else []
    return sorted(token - size for token in own if token >= size)


def _rows_of(
    file: SafetensorsFile, module: AdaptedModule, targets: Targets, dtype: torch.dtype
) -> Iterator[tuple[TensorInfo, TokenRows, bool]]:
    """What each of a module's tensors changes, and whether it does so wherever the model has that table.

    Trained tokens, and tables that were the model's when the adapter was trained, are tied as the model's are; a table
    that was trained is of its module alone.
    """
    for kind in TABLES:
        if kind in module.tensors:
            info = module.tensors[kind]
            rows = file.tensor(info).to(dtype)
            own = (
                TokenRows(torch.tensor(module.tokens, dtype=torch.int64), rows.clone())
                if kind == "rows"
                else _changed_rows(rows, module, targets)
            )
            yield info, own, kind != "table"


def _table_of(module: AdaptedModule, targets: Targets) -> VocabEmbedding:
    layer = targets.layers[module.target.places[0].layer].layer
    assert isinstance(layer, VocabEmbedding), "no other module has such tensors"
    return layer


def _tied(module: AdaptedModule, targets: Targets) -> list[int]:
    """All that have this module's table."""
    layer = _table_of(module, targets)
    return [index for index, own in enumerate(targets.layers) if own.layer is layer]


def _merged(first: TokenRows | None, then: TokenRows) -> TokenRows:
    """Both; of a token that both have, what the second says."""
    if first is None:
        return then
    left = ~torch.isin(first.tokens, then.tokens)
    return TokenRows(*(torch.cat((one[left], other)) for one, other in zip(first, then, strict=True)))


def _changed_rows(table: Tensor, module: AdaptedModule, targets: Targets) -> TokenRows:
    """Those of a table [V or more, H], in the model's dtype, that are not what the module's layer has.

    Of a layer that another stage has, those behind the layer's, by which tokens are counted.
    """
    layer = _table_of(module, targets)
    is_here = any(targets.layers[index].is_here for index in _tied(module, targets))
    known, found = table[: layer.shape[0]], []
    for start in range(0, len(known) if is_here else 0, _CHUNK):
        kept = _kept(known[start : start + _CHUNK], layer)
        differs = _differ(kept, start, layer, targets.marks.get(layer))
        found.append(differs.nonzero()[:, 0].cpu() + start)
    tokens = torch.cat((*found, torch.arange(len(known), len(table))))
    return TokenRows(tokens, table[tokens])


def _differ(kept: Tensor, start: int, layer: VocabEmbedding, marks: Tensor | None) -> Tensor:
    """Which of these rows, counted from `start`, are not the layer's; of one that ranks share marks are compared."""
    if marks is not None:
        return (marks_of(kept) != marks[start : start + len(kept)]).any(1)
    own = layer.rows_here(torch.arange(start, start + len(kept), device=kept.device))
    return (kept != own).any(1)


def _kept(rows: Tensor, layer: VocabEmbedding) -> Tensor:
    """What the layer would have of rows, rounded as its own are."""
    rows = rows.to(_device_of(layer))
    if layer.packed is None:
        return rows
    ids = torch.arange(len(rows), device=rows.device)
    return ops.packed_embedding(ids, ops.pack_weight(rows, layer.packed.scheme, layer.halves()))


def _device_of(layer: VocabEmbedding) -> torch.device:
    return next(iter(layer.tensors().values())).device
