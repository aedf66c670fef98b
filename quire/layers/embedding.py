"""Token embedding, which may also be the output head, and embeddings of positions.

Shapes: T tokens, N tokens whose logits are wanted, V vocabulary rows, H hidden size.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.lora import LoraStacks
from quire.kernels.rounding import RowRounding
from quire.layers.base import Layer, Module, activation_dtype, model_dtype, parameter
from quire.layers.matrix import MatrixLayer
from quire.layers.own_rows import OwnOutputs, OwnRows
from quire.layers.shard import Span
from quire.layers.slot import Slot
from quire.layers.table_adapters import TableAdapters
from quire.layers.table_share import looked_up_among


class VocabEmbedding(MatrixLayer):
    """A row per token: looked up on the way in, or multiplied with on the way out; a tied model uses one for both.

    `scale` multiplies looked-up rows, rounded to the model's dtype first as Gemma does it. A table that `is_head` is
    packed like a linear layer's weight, and looked up in that form too: there is one copy. A head may have a `bias`;
    with `unit_rows` its rows are divided by their lengths. Looked-up rows are of `out_dtype`. It is cut by tokens: a
    rank looks up those that it has, and makes their logits.
    """

    rounds_inputs = True
    takes_adapters = True
    """Whether whoever calls it says whose the tokens are."""

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
            [Span(vocab_size, uneven=True)],
            size,
            dtype,
            name=name,
            cut="output",
            bias=bias,
            only_looked_up=not is_head,
        )
        self.shape = (vocab_size, size)
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        self.out_dtype = out_dtype
        self.unit_rows = unit_rows
        self.table_adapters: TableAdapters | None = None
        """Of looked-up rows; None: the engine serves no adapters."""
        self.adapters: LoraStacks | None = None
        """Of the product, as those of `Linear`."""
        self.own_rows: OwnRows | None = None
        self.own_outputs: OwnOutputs | None = None

    def forward(self, inputs: Tensor, adapter_rows: Tensor | None = None) -> Tensor:
        """Ids [T] in [0, V) -> their rows [T, H]; rows [T, H] of `out_dtype`, made elsewhere, are taken as they are.

        adapter_rows [T]: see `StepContext`; an adapter may have ids behind V.
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
        known = ids if self.own_rows is None else ids.clamp(max=self.shape[0] - 1)
        rows = self.looked_up(known).to(self.out_dtype)
        if self.own_rows is not None:
            rows = self.own_rows.replace(rows, ids, adapter_rows)
        if self.table_adapters is not None:
            self.table_adapters.add(rows, known, adapter_rows)
        return rows

    def logits(self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0) -> Tensor:
        """hidden [N, H] -> float32 [N, V + num_added]; adapter_rows [N] has the adapter of each, as in `StepContext`.

        Logits behind V are those of tokens that adapters have there; those of others mean nothing.
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
        self, logits: Tensor, hidden: Tensor, adapter_rows: Tensor, adapters: LoraStacks
    ) -> Tensor:
        """Logits [N, V] with what adapters add, of which each rank makes that of its tokens."""
        own = logits if self.group is None else logits[:, self.rows[0]].contiguous()
        ops.lora_linear(own, hidden, adapter_rows, adapters)
        return self._of_all(own)

    def _own_logits(self, logits: Tensor, hidden: Tensor, adapter_rows: Tensor, num_added: int) -> Tensor:
        """Put what rows of adapters make into the logits [N, V]; returns those behind them, [N, num_added]."""
        own, vocab_size = self.own_outputs, logits.shape[1]
        if own is None:
            return logits[:, :0]
        bias: Tensor | None = self.bias
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
        """Tokens of each rank, but for the last, which may have fewer."""
        return -(-self.shape[0] // self.shard.of)

    def _of_all(self, own: Tensor) -> Tensor:
        """Of each of this rank's tokens [N, its share] -> of every token [N, V].

        The last rank has fewer where V cannot be shared out evenly, and shows as many columns as any other.
        """
        if self.group is None:
            return own
        own = F.pad(own, (0, self.share - own.shape[1])) if own.shape[1] < self.share else own
        every = ops.all_gather(own, self.group)
        return every if every.shape[1] == self.shape[0] else every[:, : self.shape[0]].contiguous()

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 logits of this rank's tokens, without adapters."""
        rounded = self.rounded_inputs
        return self._product(hidden) if rounded is None else rounded.product(hidden, self._product)

    def _product(self, hidden: Tensor, way: RowRounding | None = None) -> Tensor:
        if way is not None:
            if self.packed is not None:
                return ops.rounded_linear(hidden, self.packed, way, self.bias)
            hidden = ops.round_rows(hidden, way)
        if self.packed is not None:
            return ops.packed_linear(hidden, self.packed, self.bias, dtype=torch.float32)
        assert self.weight is not None
        return ops.linear(hidden, self.weight, self.bias, torch.float32)

    @property
    def rearranges(self) -> bool:
        return self.unit_rows

    def rearranged(self, weight: Tensor) -> Tensor:
        return F.normalize(weight.float()).to(weight.dtype) if self.unit_rows else weight

    def looked_up(self, ids: Tensor) -> Tensor:
        """Rows [T, H] of the table as it is kept, for ids [T] in [0, V)."""
        return looked_up_among(self.group, self.rows[0], ids, self.rows_here)

    def rows_here(self, ids: Tensor) -> Tensor:
        """Rows [T, H] of those that this rank has, for ids [T] counted from its first, as they are kept."""
        if self.packed is not None:
            return ops.packed_embedding(ids, self.packed)
        assert self.weight is not None
        return ops.embedding(ids, self.weight)


class PositionEmbedding(Layer):
    """A learned row per position; `offset` rows stand unused at the start of the table (2 in OPT).

    Raises:
        ConfigError: the context is to be longer than the table.
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
        """positions [T] -> [T, H] of the activations' dtype."""
        assert positions.dim() == 1, f"learned positions are taken as [T], not {[*positions.shape]}"
        places = positions + self.offset if self.offset else positions
        return ops.embedding(places, self.weight).to(self.out_dtype)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.weight", Slot(self.weight, "normal")


class TokenTypeEmbedding(Layer):
    """A learned row for each kind of token, such as those of a first and those of a second text."""

    def __init__(self, *, config: EngineConfig, count: int, name: str = "") -> None:
        super().__init__(name)
        self.weight = parameter(count, config.arch.hidden_size, dtype=activation_dtype(config))

    def forward(self, token_types: Tensor | None) -> Tensor:
        """token_types [T], or None where all are the first -> rows [T, H], or the one row [H].

        A model that knows but one kind has it for all tokens: tokenizers tell texts apart also for those.
        """
        if token_types is None or len(self.weight) == 1:
            return self.weight[0]
        return ops.embedding(token_types, self.weight)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.weight", Slot(self.weight, "normal")


class SinusoidalEmbedding(Module):
    """Sines, then cosines, of a position at H / 2 wavelengths between 2 pi and 20000 pi (Vaswani et al., 2017).

    Position 0 is that of row `offset` (2 in XGLM).
    """

    rows: Tensor

    def __init__(self, *, config: EngineConfig, offset: int = 0, name: str = "") -> None:
        super().__init__()
        half = config.arch.hidden_size // 2
        num_rows = (config.model.max_model_len or config.arch.max_position_embeddings) + offset
        with torch.device("cpu"):
            frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000.0) / max(half - 1, 1)))
            angles = torch.arange(num_rows).float()[:, None] * frequencies
            rows = F.pad(torch.cat((angles.sin(), angles.cos()), 1), (0, config.arch.hidden_size % 2))
        self.register_buffer("rows", rows.to(activation_dtype(config)), persistent=False)
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        """positions [T] -> [T, H] of the activations' dtype."""
        return ops.embedding(positions + self.offset, self.rows)
