# SPDX-License-Identifier: Apache-2.0
"""Our layers adapted to transformers' calling convention: inputs [1, T, ...] and no step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.config import EngineConfig
from quire.kernels import ops
from quire.layers.base import activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.shard import ShardSpan
from quire.layers.step import StepContext
from quire.models.transformers_backend.plan import ShardingPlan, embedding_scale
from quire.models.transformers_backend.tensors import CheckpointView

_NO_STEP = StepContext(())


class AdapterContext:
    """Current adapter rows for the linear layers of one model; see `StepContext`."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.noted: dict[nn.Module, list[int]] | None = None
        """While recording: the number of rows of each call, by layer."""

    @contextmanager
    def during(self, rows: Tensor | None) -> Iterator[None]:
        """Set the adapters of the rows computed in this context; None: no row has any."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    @contextmanager
    def noting(self) -> Iterator[dict[nn.Module, list[int]]]:
        """Record calls in this context."""
        self.noted = {}
        try:
            yield self.noted
        finally:
            self.noted = None


class HostedLinear(Linear):
    """Linear layer [..., K] -> [..., N]. It takes adapters if every call was seen to have all rows."""

    takes_adapters = False
    adapting = AdapterContext()
    """Replaced by the model's; this default has no rows."""

    def forward(self, x: Tensor, step: StepContext = _NO_STEP) -> Tensor:  # type: ignore[override]
        if self.adapting.noted is not None:
            self.adapting.noted.setdefault(self, []).append(x.shape[:-1].numel())
        if self.adapting.rows is None or not self.takes_adapters:
            return super().forward(x, step)
        rows = x.flatten(0, -2)
        assert len(rows) == len(self.adapting.rows), f"{self.name} is called with other rows than the step's"
        out: Tensor = super().forward(rows, StepContext((), self.adapting.rows))
        return out.unflatten(0, x.shape[:-1])


class HostedEmbedding(VocabEmbedding):
    """Ids [1, T] -> [1, T, H]."""

    takes_adapters = False

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs.flatten()).unflatten(0, inputs.shape)


class HostedHead(VocabEmbedding):
    """Hidden states [1, N, H] -> logits [1, N, V]."""

    takes_adapters = False

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return _logits(self, inputs)


class TiedHead(nn.Module):
    """Output head on the embedding's table, with its own optional bias."""

    def __init__(self, table: VocabEmbedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._tables = (table,)  # in a tuple, so that nn.Module does not register it twice
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        """See `HostedHead`."""
        logits = _logits(self._tables[0], hidden)
        return logits if self.bias is None else logits + self.bias


def _logits(table: VocabEmbedding, hidden: Tensor) -> Tensor:
    """[..., H] -> [..., V]."""
    return table.logits(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])


class PositionSource(Protocol):
    """Provider of the positions of the current pass, int64 [T]; None: the model counts its tokens."""

    positions: Tensor | None


def counts_positions(module: nn.Module) -> bool:
    """Return whether it embeds positions that it derives from the number of past tokens."""
    names = inspect.signature(module.forward).parameters.keys()
    return isinstance(module, nn.Embedding) and {"past_key_values_length", "position_ids"} <= names


class CountedPositions(nn.Module):
    """Position embedding of a model that counts tokens by itself: it gets the real positions instead."""

    def __init__(self, table: nn.Module, source: PositionSource) -> None:
        super().__init__()
        self.table = table
        self._source = source

    def forward(self, tokens: Any, *args: Any, position_ids: Tensor | None = None, **options: Any) -> Any:
        """See the table's own forward."""
        positions = self._source.positions
        if positions is None:
            return self.table(tokens, *args, position_ids=position_ids, **options)
        like = positions if position_ids is None else positions.view(position_ids.shape)
        return self.table(tokens, position_ids=like)


class RotaryTable(nn.Module):
    """Rotary embedding with precomputed angles of all positions, for each set of call arguments.

    It applies to modules that compute a tuple of tensors [1, T, ...] from positions [1, T]; other calls pass through.
    """

    def __init__(self, rotary: nn.Module, config: EngineConfig) -> None:
        super().__init__()
        self.rotary = rotary
        self._num_positions = config.model.max_model_len or config.arch.max_position_embeddings
        self._tables: dict[Any, tuple[Tensor, ...] | None] = {}

    def __getattr__(self, name: str) -> Any:
        """Return other attributes from the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("rotary"), name)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        """See the module's own forward."""
        if position_ids.dim() != 2:
            return self.rotary(x, position_ids, *args, **options)
        key = (args, tuple(options.items()))
        if key not in self._tables:
            self._tables[key] = self._table(x, args, options)
        tables = self._tables[key]
        if tables is None:
            return self.rotary(x, position_ids, *args, **options)
        if tables[0].device != x.device and not x.is_meta:
            tables = self._tables[key] = tuple(table.to(x.device) for table in tables)
        return tuple(_rows(table, position_ids)[None] for table in tables)

    def _table(self, x: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, ...] | None:
        with torch.device("cpu"):
            positions = torch.arange(self._num_positions)[None]
            rows = self.rotary(torch.zeros(1, 1, 1, dtype=x.dtype), positions, *args, **options)
        per_position = isinstance(rows, tuple) and all(
            isinstance(part, Tensor) and part.dim() == 3 and part.shape[:2] == positions.shape
            for part in rows
        )
        return tuple(part[0].contiguous() for part in rows) if per_position else None


def _rows(table: Tensor, position_ids: Tensor) -> Tensor:
    if position_ids.is_meta:
        return table.new_empty(position_ids.shape[1], table.shape[1], device="meta")
    return ops.embedding(position_ids[0], table)


def as_linear(
    module: nn.Module, name: str, stored: Sequence[CheckpointView], config: EngineConfig, plan: ShardingPlan
) -> HostedLinear | None:
    """Return our layer for a module that only multiplies with a stored weight; None for any other."""
    transposed = type(module).forward is Conv1D.forward
    if not transposed and type(module).forward is not nn.Linear.forward:
        return None
    weight = module.weight
    assert isinstance(weight, Tensor), "the forward pass multiplies by it"
    spans = row_spans(stored, weight.shape, transposed)
    if spans is None:
        return None
    inputs = weight.shape[0 if transposed else 1]
    return HostedLinear(
        in_features=inputs,
        out_features=sum(span.size for span in spans),
        bias=module.bias is not None,
        dtype=model_dtype(config),
        name=name,
        partition=plan.partition(name),
        spans=plan.spans(name, spans),
        transposed=transposed,
    )


def row_spans(
    stored: Sequence[CheckpointView], shape: Sequence[int], transposed: bool = False
) -> list[ShardSpan] | None:
    """Return the parts of a weight [N, K] that checkpoints store separately, in order; None if they are no
    rows of it."""
    if len(stored) == 1 and stored[0].view.is_contiguous() and stored[0].view.shape == shape:
        return [ShardSpan(shape[1 if transposed else 0])]
    row, offset = shape[-1], stored[0].view.storage_offset() if stored else 0
    for part in stored:
        view = part.view
        if transposed or view.dim() != 2 or view.stride() != (row, 1) or view.storage_offset() != offset:
            return None
        offset += view.numel()
    return [ShardSpan(len(part.view)) for part in stored] or None


def as_embedding(module: nn.Embedding, name: str, config: EngineConfig, *, is_head: bool) -> HostedEmbedding:
    """Return our table for the token embedding.

    Raises:
        ValueError: it does more than look up rows and multiply them by a number.
    """
    return HostedEmbedding(
        vocab_size=module.num_embeddings,
        size=module.embedding_dim,
        dtype=model_dtype(config),
        scale=embedding_scale(module),
        is_head=is_head,
        out_dtype=activation_dtype(config),
        name=name,
    )


def as_head(module: nn.Linear, name: str, config: EngineConfig) -> HostedHead:
    """Return our table for an untied output head."""
    return HostedHead(
        vocab_size=module.out_features,
        size=module.in_features,
        dtype=model_dtype(config),
        is_head=True,
        bias=module.bias is not None,
        name=name,
    )
