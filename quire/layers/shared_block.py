# SPDX-License-Identifier: Apache-2.0
"""Transformer block shared by several layers, each with its own low-rank adapters (Zamba 2; arXiv:2411.15242).

Shapes: T tokens of the step, H hidden size, I intermediate size, Hq heads of size D = 2 H / Hq, K and N features.
A turn is one use of a block: it has its own cache and its own adapters, which the checkpoint stores in the block.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import SharedBlocksArch
from quire.layers.activation import GATED
from quire.layers.attention import Attention
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.linear import Linear, QKVLinear
from quire.layers.norm import RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Partition, ShardSpan
from quire.layers.step import StepContext
from quire.layers.turns import LayerTurns


class TurnAdapters(nn.ModuleDict):
    """Low-rank adapters of one weight, one per turn (Hu et al., 2021, arXiv:2106.09685)."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        prefix: str,
        turns: Sequence[int],
        inputs: int,
        spans: Sequence[ShardSpan],
    ) -> None:
        own = shared_blocks_of(config)
        rank = own.adapter_rank
        super().__init__(
            {
                str(turn): nn.ModuleList(
                    (
                        span_linear(config, f"{prefix}.{turn}.0", inputs, (ShardSpan(rank),), "whole"),
                        span_linear(config, f"{prefix}.{turn}.1", rank, spans, "output"),
                    )
                )
                for turn in turns
            }
        )
        layers = tuple(own.layers[turn] for turn in turns)
        for turn, layer in zip(turns, layers, strict=True):
            for linear in cast(nn.ModuleList, self[str(turn)]):
                idle = tuple(other for other in layers if other != layer)
                cast(Linear, linear).turns = LayerTurns((layer,), layers[0], idle)

    def keep_turns(self, turns: Collection[int]) -> None:
        """Drop the adapters of other turns."""
        _keep(self, turns)

    def added(self, x: Tensor, turn: int, step: StepContext) -> Tensor:
        """x [T, K] -> [T, N]."""
        left, right = cast(nn.ModuleList, self[str(turn)])
        out: Tensor = right(left(x, step), step)
        return out


def _keep(by_turn: nn.ModuleDict, turns: Collection[int]) -> None:
    for key in [key for key in by_turn if int(key) not in turns]:
        del by_turn[key]


class SharedAttention(Module):
    """Attention of a block, with or without adapters of q, k and v."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, turns: Sequence[int], rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, wide, heads = config.arch, 2 * config.arch.hidden_size, config.arch.num_heads
        self.qkv_proj = QKVLinear(
            hidden_size=wide,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=arch.head_dim,
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}.qkv_proj",
        )
        self.o_proj = span_linear(config, f"{prefix}.o_proj", wide, (ShardSpan(arch.hidden_size),), "input")
        self.adapters: list[TurnAdapters] = []
        for part in "qkv" if shared_blocks_of(config).adapts_attention else "":
            name, span = f"linear_{part}_adapter_list", ShardSpan(heads, arch.head_dim)
            adapters = TurnAdapters(
                config=config, prefix=f"{prefix}.{name}", turns=turns, inputs=wide, spans=(span,)
            )
            self.add_module(name, adapters)
            self.adapters.append(adapters)
        self.attn = nn.ModuleDict(
            {
                str(turn): Attention(
                    config=config,
                    name=f"{prefix}.attn.{turn}",
                    num_heads=heads,
                    num_kv_heads=heads,
                    head_dim=arch.head_dim,
                    scale=(arch.head_dim / 2) ** -0.5,
                    rotary=rotary,
                )
                for turn in turns
            }
        )

    def keep_turns(self, turns: Collection[int]) -> None:
        """See `SharedBlock.keep_turns`."""
        for adapters in self.adapters:
            adapters.keep_turns(turns)
        _keep(self.attn, turns)

    def forward(self, x: Tensor, positions: Tensor, turn: int, step: StepContext, own: StepContext) -> Tensor:
        """x [T, 2 H] -> [T, H]; `own` is the step with adapter rows of this turn."""
        heads = self.qkv_proj.heads(x, own)
        if self.adapters:
            added = [adapters.added(x, turn, step) for adapters in self.adapters]
            heads = [part + more.view(part.shape) for part, more in zip(heads, added, strict=True)]
        q, k, v = heads
        return self.o_proj(self.attn[str(turn)](q, k, v, positions, step), own)


class SharedMLP(Module):
    """Gated MLP of a block, with adapters of gate and up."""

    def __init__(self, *, config: EngineConfig, prefix: str, turns: Sequence[int]) -> None:
        super().__init__()
        arch, bias = config.arch, config.arch.mlp_bias
        hidden, inner = ShardSpan(arch.hidden_size), ShardSpan(arch.intermediate_size)
        self.gate_up_proj = span_linear(
            config, f"{prefix}.gate_up_proj", hidden.size, (inner, inner), "output", bias
        )
        self.gate_up_proj_adapter_list = TurnAdapters(
            config=config,
            prefix=f"{prefix}.gate_up_proj_adapter_list",
            turns=turns,
            inputs=hidden.size,
            spans=(inner, inner),
        )
        self.down_proj = span_linear(config, f"{prefix}.down_proj", inner.size, (hidden,), "input", bias)
        self.gate = GATED[arch.hidden_act]

    def forward(self, x: Tensor, turn: int, step: StepContext, own: StepContext) -> Tensor:
        """x [T, H] -> [T, H]; `own` is the step with adapter rows of this turn."""
        added = self.gate_up_proj_adapter_list.added(x, turn, step)
        return self.down_proj(self.gate(self.gate_up_proj(x, own) + added), own)


class SharedBlock(Module):
    """Attention and MLP over the concatenation of hidden states and embeddings."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, turns: Sequence[int], rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        self.turns = frozenset(turns)
        self.input_layernorm = RMSNorm(
            size=2 * config.arch.hidden_size,
            eps=config.arch.norm_eps,
            dtype=activation_dtype(config),
            name=f"{prefix}.input_layernorm",
        )
        self.self_attn = SharedAttention(
            config=config, prefix=f"{prefix}.self_attn", turns=turns, rotary=rotary
        )
        self.pre_ff_layernorm = block_norm(config, f"{prefix}.pre_ff_layernorm")
        self.feed_forward = SharedMLP(config=config, prefix=f"{prefix}.feed_forward", turns=turns)
        self._turns = tuple(turns)
        layers = tuple(shared_blocks_of(config).layers[turn] for turn in turns)
        attention, mlp = self.self_attn, self.feed_forward
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            linear.turns = LayerTurns(layers, layers[0])

    def keep_turns(self, turns: Collection[int]) -> None:
        """Drop the parts of turns that other pipeline stages compute; can be called repeatedly."""
        self.turns = self.turns.intersection(turns)
        self.self_attn.keep_turns(self.turns)
        self.feed_forward.gate_up_proj_adapter_list.keep_turns(self.turns)

    def forward(self, x: Tensor, embedded: Tensor, positions: Tensor, turn: int, step: StepContext) -> Tensor:
        """x and the embeddings [T, H] -> [T, H]."""
        x = self.input_layernorm(torch.cat((x, embedded), dim=1))
        own = self._of_turn(turn, step)
        x = self.pre_ff_layernorm(self.self_attn(x, positions, turn, step, own))
        return self.feed_forward(x, turn, step, own)

    def _of_turn(self, turn: int, step: StepContext) -> StepContext:
        """Return the step with adapter rows counted from the slots of this turn on; see `LayerTurns`."""
        adapters, rows = self.self_attn.qkv_proj.adapters, step.adapter_rows
        if adapters is None or rows is None:
            return step
        first = self._turns.index(turn) * (len(adapters.a) // len(self._turns))
        return replace(step, adapter_rows=torch.where(rows < 0, rows, rows + first))


def shared_blocks_of(config: EngineConfig) -> SharedBlocksArch:
    """Return the model's shared-block config."""
    assert config.arch.shared_blocks is not None, "a model of this kind is described"
    return config.arch.shared_blocks


def span_linear(
    config: EngineConfig,
    name: str,
    inputs: int,
    spans: Sequence[ShardSpan],
    partition: Partition,
    bias: bool = False,
) -> Linear:
    """Return a merged linear layer with these output spans."""
    return Linear(
        in_features=inputs,
        out_features=sum(span.size for span in spans),
        bias=bias,
        dtype=model_dtype(config),
        name=name,
        partition=partition,
        spans=spans,
    )
