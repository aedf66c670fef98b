# SPDX-License-Identifier: Apache-2.0
"""Token embedding, also as output head, embeddings of positions and token types, and their adapters.

Shapes: T tokens, N tokens whose logits are wanted, V vocabulary rows, H hidden size. Of adapters: S slots, R ranks, and
per head K and N input and output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.linear import RowQuantization
from quire.kernels.low_rank import LowRankStacks
from quire.layers.adapter_rows import AdapterEmbeddingRows, AdapterOutputRows
from quire.layers.base import Layer, Module, activation_dtype, model_dtype, parameter
from quire.layers.matrix import MatrixLayer
from quire.layers.shard import ShardSpan
from quire.layers.slot import Slot


class HeadAdapters:
    """Adapters of a per-head linear layer.

    Args:
        stacks: of weights [N, K]; slot s has those from s * H on, one for each head.
    """

    def __init__(self, stacks: LowRankStacks, num_heads: int) -> None:
        self._stacks = stacks
        factors = stacks.input_factors
        self._factors = None if factors is None else factors.view(-1, num_heads, factors.shape[1])
        self._heads = torch.arange(num_heads, dtype=torch.int32, device=stacks.a.device)

    def scaled(self, x: Tensor, adapter_rows: Tensor) -> Tensor:
        """Scale the input x [T, H, K]: DoRA's factors where a checkpoint has weights [K, N].

        adapter_rows [T] int32 as in `ops.low_rank_linear`.
        """
        if self._factors is None:
            return x
        factors = self._factors[adapter_rows.clamp(min=0)]
        return x * torch.where(adapter_rows[:, None, None] < 0, 1.0, factors).to(x.dtype)

    def add(self, out: Tensor, x: Tensor, adapter_rows: Tensor) -> None:
        """Add the adapters' output for x [T, H, K] to out [T, H, N] in place.

        adapter_rows [T] int32 as in `ops.low_rank_linear`.
        """
        first = adapter_rows[:, None] * len(self._heads)
        of_heads = torch.where(first < 0, -1, first + self._heads).flatten()
        ops.low_rank_linear(out.flatten(0, 1), x.flatten(0, 1), of_heads, self._stacks)


def gather_rows(group: Group | None, own: slice, ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows [T, H] of tokens [T], each from the rank of the group that holds it.

    Args:
        own: the tokens that this rank holds.
        look_up: returns the rows of tokens, counted from the rank's first.
    """
    if group is None:
        return look_up(ids)
    local = ids - own.start
    foreign = (local < 0) | (local >= own.stop - own.start)
    # -0.0, which the other ranks add, changes no number, not even 0.0.
    rows = look_up(local.masked_fill(foreign, 0)).masked_fill(foreign[:, None], -0.0)
    return ops.all_reduce(rows, group)


class TableAdapters:
    """Adapters of an embedding table [V, H].

    Args:
        stacks: of the weight [H, V] that multiplies a token's one-hot row, so its `a` is looked up, too.
        group: the ranks that share the table; None: this one has all of it.
        own: the tokens that this rank holds.
    """

    def __init__(self, stacks: LowRankStacks, group: Group | None = None, own: slice = slice(0, 0)) -> None:
        self._group, self._own = group, own
        slots, _, self._num_rows, ranks = stacks.a.shape
        self._a = stacks.a.view(slots * self._num_rows, ranks)
        # The looked-up rows are already multiplied by A.
        same = torch.eye(ranks, dtype=stacks.a.dtype, device=stacks.a.device)
        self._expand = replace(stacks, a=same.repeat(slots, 1, 1, 1))

    def add(self, rows: Tensor, ids: Tensor, adapter_rows: Tensor) -> None:
        """Add the adapters' rows for ids [T] in [0, V) to rows [T, H] in place.

        adapter_rows [T] int32 as in `ops.low_rank_linear`.
        """
        first = adapter_rows.clamp(min=0) * self._num_rows
        shrunk = gather_rows(
            self._group, self._own, ids, lambda local: ops.embedding(local + first, self._a).to(rows.dtype)
        )
        ops.low_rank_linear(rows, shrunk, adapter_rows, self._expand)


class VocabEmbedding(MatrixLayer):
    """Embedding row per token, looked up or multiplied as output head; a tied model uses one table for both.

    `scale` multiplies looked-up rows, rounded to the model's dtype first as in Gemma. A table that `is_head` is packed
    like a linear layer's weight and looked up in that form too: there is one copy. A head may have a `bias`;
    `unit_rows` divides its rows by their norms. Looked-up rows have `out_dtype`. It is sharded by tokens: a rank looks
    up its tokens and computes their logits.
    """

    quantizes_inputs = True
    takes_adapters = True
    """True if callers pass the tokens' `adapter_rows`."""

    def __init__(
        self,
        *,
        vocab_size: int,
        size: int,
        dtype: torch.dtype,
        scale: float | None = None,
        is_head: bool = False,
        bias: bool = False,
        unit_rows: bool = False,
        out_dtype: torch.dtype = torch.float32,
        name: str = "",
    ) -> None:
        super().__init__(
            [ShardSpan(vocab_size, uneven=True)],
            size,
            dtype,
            name=name,
            partition="output",
            bias=bias,
            only_looked_up=not is_head,
        )
        self.shape = (vocab_size, size)
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        self.out_dtype = out_dtype
        self.unit_rows = unit_rows
        self.table_adapters: TableAdapters | None = None
        """Adapters of looked-up rows; None: the engine serves no adapters."""
        self.adapters: LowRankStacks | None = None
        """Adapters of the matmul, as in `Linear`."""
        self.adapter_embeddings: AdapterEmbeddingRows | None = None
        self.adapter_outputs: AdapterOutputRows | None = None
        self._bias_apart: tuple[Layer, ...] = ()

    def adds(self, bias: Layer) -> None:
        """Declare a layer whose float32 `weight` [V] is the bias of a head that has none of its own."""
        self._bias_apart = (bias,)  # a tuple, so that the layer stays its owner's

    @property
    def whole_bias(self) -> Tensor | None:
        """Bias of the logits."""
        return self._added_bias if self._bias_apart else self.bias

    @property
    def _added_bias(self) -> Tensor:
        """Bias that another layer holds."""
        weight = self._bias_apart[0].weight
        assert isinstance(weight, Tensor), "see `adds`"
        return weight

    def forward(self, inputs: Tensor, adapter_rows: Tensor | None = None) -> Tensor:
        """Ids [T] in [0, V) -> rows [T, H]; input rows [T, H] of `out_dtype` (prompt embeddings) are returned
        unchanged.

        adapter_rows [T]: see `StepContext`; an adapter may have ids from V on.
        """
        if inputs.is_floating_point():
            return inputs
        rows = (
            self.looked_up(inputs).to(self.out_dtype)
            if adapter_rows is None
            else self._adapted(inputs, adapter_rows)
        )
        return rows if self.scale is None else rows * self.scale

    def _adapted(self, ids: Tensor, adapter_rows: Tensor) -> Tensor:
        known = ids if self.adapter_embeddings is None else ids.clamp(max=self.shape[0] - 1)
        rows = self.looked_up(known).to(self.out_dtype)
        if self.adapter_embeddings is not None:
            rows = self.adapter_embeddings.replace(rows, ids, adapter_rows)
        if self.table_adapters is not None:
            self.table_adapters.add(rows, known, adapter_rows)
        return rows

    def logits(self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0) -> Tensor:
        """hidden [N, H] -> float32 [N, V + num_added]; adapter_rows [N] as in `StepContext`.

        Logits from V on belong to tokens that adapters add; rows without such an adapter have undefined values there.
        """
        logits = self._of_all(self.own_logits(hidden))
        if adapter_rows is None:
            return logits
        hidden = hidden.to(logits.dtype)
        added = self._own_logits(logits, hidden, adapter_rows, num_added)
        if self.adapters is not None:
            logits = self._with_products(logits, hidden, adapter_rows, self.adapters)
        return torch.cat((logits, added), 1) if num_added else logits

    def _with_products(
        self, logits: Tensor, hidden: Tensor, adapter_rows: Tensor, adapters: LowRankStacks
    ) -> Tensor:
        """Return logits [N, V] with adapters added; each rank computes its tokens and all-gathers."""
        own = logits if self.group is None else logits[:, self.rows[0]].contiguous()
        ops.low_rank_linear(own, hidden, adapter_rows, adapters)
        return self._of_all(own)

    def _own_logits(self, logits: Tensor, hidden: Tensor, adapter_rows: Tensor, num_added: int) -> Tensor:
        """Write the adapters' own rows into logits [N, V]; return those of added tokens, [N, num_added]."""
        own, vocab_size = self.adapter_outputs, logits.shape[1]
        if own is None:
            return logits[:, :0]
        bias = self.whole_bias
        if bias is not None:
            bias = self._of_all(bias[None])[0]
        if not num_added:
            own.replace(logits, hidden, adapter_rows, bias)
            return logits[:, :0]
        wide = F.pad(logits, (0, num_added))
        own.replace(wide, hidden, adapter_rows, bias)
        logits.copy_(wide[:, :vocab_size])
        return wide[:, vocab_size:]

    @property
    def share(self) -> int:
        """Tokens per rank; the last rank may have fewer."""
        return -(-self.shape[0] // self.shard.of)

    def _of_all(self, own: Tensor) -> Tensor:
        """All-gather this rank's logits [N, its share] -> [N, V].

        The last rank pads to the common width if V is not divisible.
        """
        if self.group is None:
            return own
        own = F.pad(own, (0, self.share - own.shape[1])) if own.shape[1] < self.share else own
        every = ops.all_gather(own, self.group)
        return every if every.shape[1] == self.shape[0] else every[:, : self.shape[0]].contiguous()

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 logits of this rank's tokens, without adapters."""
        rounded = self.input_quantization
        return self._product(hidden) if rounded is None else rounded.product(hidden, self._product)

    def _product(self, hidden: Tensor, way: RowQuantization | None = None) -> Tensor:
        if way is not None:
            if self.packed is not None:
                return ops.rounded_linear(hidden, self.packed, way, self.whole_bias)
            hidden = ops.round_rows(hidden, way)
        if self.packed is not None:
            return ops.packed_linear(hidden, self.packed, self.whole_bias, dtype=torch.float32)
        assert self.weight is not None
        logits = ops.linear(hidden, self.weight, self.bias, torch.float32)
        return logits + self._added_bias if self._bias_apart else logits

    @property
    def rearranges(self) -> bool:
        return self.unit_rows

    def rearranged(self, weight: Tensor) -> Tensor:
        return F.normalize(weight.float()).to(weight.dtype) if self.unit_rows else weight

    def looked_up(self, ids: Tensor) -> Tensor:
        """Return rows [T, H] of the table in its stored dtype, for ids [T] in [0, V)."""
        return gather_rows(self.group, self.rows[0], ids, self.rows_here)

    def rows_here(self, ids: Tensor) -> Tensor:
        """Return rows [T, H] of this rank's table in its stored dtype, for ids [T] counted from its first."""
        if self.packed is not None:
            return ops.packed_embedding(ids, self.packed)
        assert self.weight is not None
        return ops.embedding(ids, self.weight)


class PositionEmbedding(Layer):
    """Learned row per position; the first `offset` rows of the table are unused (2 in OPT).

    Raises:
        ConfigError: the context would be longer than the table.
    """

    def __init__(self, *, config: EngineConfig, offset: int = 0, name: str = "") -> None:
        super().__init__(name)
        num_positions = config.arch.max_position_embeddings
        if config.model.max_model_len > num_positions:
            raise ConfigError(
                f"--max-model-len is {config.model.max_model_len}, but the model has learned {num_positions} positions"
            )
        self.weight = parameter(num_positions + offset, config.arch.hidden_size, dtype=model_dtype(config))
        self.offset = offset
        self.out_dtype = activation_dtype(config)

    def forward(self, positions: Tensor) -> Tensor:
        """positions [T] -> [T, H] in the activations' dtype."""
        assert positions.dim() == 1, f"learned positions are taken as [T], not {[*positions.shape]}"
        places = positions + self.offset if self.offset else positions
        return ops.embedding(places, self.weight).to(self.out_dtype)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.weight", Slot(self.weight, "normal")


class TokenTypeEmbedding(Layer):
    """Learned row per token type, such as those of a first and a second text."""

    def __init__(self, *, config: EngineConfig, count: int, name: str = "") -> None:
        super().__init__(name)
        self.weight = parameter(count, config.arch.hidden_size, dtype=activation_dtype(config))

    def forward(self, token_types: Tensor | None) -> Tensor:
        """token_types [T], or None if all are the first -> rows [T, H], or the one row [H].

        A model with one type uses it for all tokens: tokenizers number texts apart for such models, too.
        """
        if token_types is None or len(self.weight) == 1:
            return self.weight[0]
        return ops.embedding(token_types, self.weight)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.weight", Slot(self.weight, "normal")


class SinusoidalEmbedding(Module):
    """Sines, then cosines, of a position at H / 2 wavelengths between 2 pi and 20000 pi (Vaswani et al., 2017).

    Position 0 is row `offset` (2 in XGLM). `through_last`: the last wavelength is 20000 pi; otherwise the next one
    would be. There are `num_rows` positions, by default those of the context.
    """

    rows: Tensor

    def __init__(
        self,
        *,
        config: EngineConfig,
        offset: int = 0,
        through_last: bool = True,
        num_rows: int = 0,
        name: str = "",
    ) -> None:
        super().__init__()
        half = config.arch.hidden_size // 2
        num_rows = num_rows or config.model.max_model_len or config.arch.max_position_embeddings
        with torch.device("cpu"):
            spread = math.log(10000.0) / max(half - through_last, 1)
            frequencies = torch.exp(torch.arange(half).float() * -spread)
            angles = torch.arange(num_rows + offset).float()[:, None] * frequencies
            rows = F.pad(torch.cat((angles.sin(), angles.cos()), 1), (0, config.arch.hidden_size % 2))
        self.register_buffer("rows", rows.to(activation_dtype(config)), persistent=False)
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        """positions [T] -> [T, H] in the activations' dtype."""
        return ops.embedding(positions + self.offset, self.rows)
