# SPDX-License-Identifier: Apache-2.0
"""Attention layers of few models.

`DifferentialAttention` (T. Ye et al., 2024, arXiv:2410.05258), `MixtureOfAttention` (X. Zhang et al., 2022,
arXiv:2210.05144, as in JetMoE, 2024, arXiv:2404.07413), `SharedKVAttention` and `ParallelAttentionMamba`, attention and
Mamba 2 in parallel (Falcon-H1: TII, 2025, arXiv:2507.22448).

Shapes: T tokens of the step, H hidden size, Hq/Hkv query and key-value heads, D head size, E experts, k experts of a
token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import ExpertsArch, ExpertStack
from quire.layers.attention import Attention
from quire.layers.base import Module, RowSource, model_dtype, parameter
from quire.layers.experts import ExpertRouter, LinearInStack
from quire.layers.head_norms import QK_NORMS, head_norm
from quire.layers.linear import Linear, QKVLinear
from quire.layers.mamba import Mamba2Mixer
from quire.layers.quantization import QuantMethod
from quire.layers.rotary import RotaryEmbedding
from quire.layers.self_attention import SelfAttention
from quire.layers.shard import WHOLE, Partition, Shard, ShardSpan
from quire.layers.slot import length
from quire.layers.step import StepContext
from quire.layers.vectors import LayerVector, OutBias, VectorLayer


class Lambda(VectorLayer):
    """Weight of the second softmax: `exp(q1 . k1) - exp(q2 . k2) + start`, of four learned vectors [D].

    `value`, float32 [], is computed once, after loading.
    """

    vectors = tuple(LayerVector(name, f"lambda_{name}") for name in ("q1", "k1", "q2", "k2"))
    q1: Tensor
    k1: Tensor
    q2: Tensor
    k2: Tensor

    def __init__(self, *, head_dim: int, layer: int, name: str) -> None:
        super().__init__(ShardSpan(1, head_dim, replicated=True), beside=True, name=name)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)

    def create_weights(self, method: QuantMethod | None, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self.value = parameter(dtype=torch.float32)

    def finish_loading(self) -> None:
        first, second = (self.q1 * self.k1).sum().exp(), (self.q2 * self.k2).sum().exp()
        self.value.copy_(first - second + self.start)


class DifferentialAttention(Module):
    """Differential attention: `softmax1(v) - lambda * softmax2(v)`; lambda's initial value grows with depth.

    Query heads come in two halves, and so do values: each pair of heads attends to both halves of the values side by
    side, and the second head's output times lambda is subtracted from the first's.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        heads, kv_heads, size = arch.num_heads, arch.num_kv_heads, arch.head_dim
        self.qkv_proj = QKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            bias=arch.attention_bias,
            dtype=dtype,
            name=f"{prefix}.qkv_proj",
            paired=True,
        )
        self.o_proj = Linear(
            in_features=heads * size,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=dtype,
            name=f"{prefix}.o_proj",
            partition="input",
        )
        self.share = Lambda(head_dim=size, layer=layer, name=f"{prefix}.share")
        self.norm = head_norm(config, f"{prefix}.norm", num_heads=2)
        # Every head attends twice, once to each half of the values, so that all have one size. The parts are the halves
        # of the heads, twice; a rank has as many pairs of each.
        self.attn = Attention(
            config=config,
            name=f"{prefix}.attn",
            num_heads=2 * heads,
            num_kv_heads=2 * kv_heads,
            head_dim=size,
            scale=size**-0.5,
            rotary=rotary,
            parts=4,
        )

    def reads(self, source: RowSource) -> None:
        """See `SelfAttention.reads`."""
        self.qkv_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = self.qkv_proj.heads(x, step)
        first, second = v.chunk(2, dim=1)
        values = torch.cat((first, first, second, second), dim=1)
        out = self.attn(torch.cat((q, q), dim=1), torch.cat((k, k), dim=1), values, positions, step)
        # Dimensions: half of the values, half of the heads, number in that half.
        ones, others = out.view(len(x), 2, 2, -1, self.attn.head_dim).unbind(2)
        differences = (ones - self.share.value * others).transpose(1, 2).flatten(2)
        return self.o_proj(((1.0 - self.share.start) * self.norm(differences)).flatten(1), step)


class MixtureOfAttention(Module):
    """Mixture of attention heads: experts are query and output projections; all share Hkv key-value heads.

    All experts compute queries and outputs, of which unrouted ones count as 0. So each step reads all their weights,
    which are small beside those of the MLPs. Ranks have some of the heads of every expert.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch = config.arch
        experts = arch.attention_experts
        assert experts is not None, "a layer of this kind is described"
        self.heads = arch.num_kv_heads, arch.head_dim
        """Number of the rank's heads, and their size."""
        heads, hidden = ShardSpan(*self.heads), ShardSpan(arch.hidden_size)
        self.gate = ExpertRouter(config=config, experts=experts, name=f"{prefix}.gate")
        self.input_linear = _experts(config, experts, (hidden, heads), "output", f"{prefix}.input_linear")
        self.output_linear = _experts(config, experts, (heads, hidden), "input", f"{prefix}.output_linear")
        self.kv_proj = Linear(
            in_features=arch.hidden_size,
            out_features=2 * heads.size,
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}.kv_proj",
            partition="output",
            spans=(heads, heads),
        )
        self.bias = OutBias(config=config, name=f"{prefix}.bias")
        self.attn = Attention(
            config=config,
            name=f"{prefix}.attn",
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            scale=arch.head_dim**-0.5,
            rotary=rotary,
        )

    def reads(self, source: RowSource) -> None:
        """Ignore the declaration: x has several readers here, so it cannot arrive quantized."""

    def apply_shard(self, shard: Shard) -> None:
        own = ShardSpan(self.heads[0]).piece(shard, self.attn.name)
        self.heads = length(own), self.heads[1]

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        chosen, weights = self.gate.choose(x, step)
        every = torch.stack([expert(x, step) for expert in self.input_linear], 1)
        places = chosen.long().unsqueeze(2).expand(-1, -1, every.shape[2])
        # Heads that share keys are adjacent.
        q = torch.unflatten(every.gather(1, places), 2, self.heads).transpose(1, 2).flatten(1, 2)
        k, v = (torch.unflatten(part, 1, self.heads) for part in self.kv_proj(x, step).chunk(2, 1))
        seen = torch.unflatten(self.attn(q, k, v, positions, step), 1, (self.heads[0], -1, self.heads[1]))
        weighted = seen.transpose(1, 2).flatten(2) * weights.unsqueeze(2).to(seen.dtype)
        given = torch.zeros_like(every).scatter(1, places, weighted)
        return self.bias(self._put_together(given, step))

    def _put_together(self, given: Tensor, step: StepContext) -> Tensor:
        """Sum all experts' outputs in expert order: [T, E, Hkv * D] -> [T, H]."""
        first, *others = (
            expert(given[:, index].contiguous(), step) for index, expert in enumerate(self.output_linear)
        )
        for out in others:
            first = first + out
        return first


def _experts(
    config: EngineConfig,
    experts: ExpertsArch,
    sizes: tuple[ShardSpan, ShardSpan],
    partition: Partition,
    name: str,
) -> nn.ModuleList:
    """Return one linear layer per expert, of the given (inputs, outputs)."""
    members = nn.ModuleList()
    for index in range(experts.count):
        member = LinearInStack(
            in_features=sizes[0].size,
            out_features=sizes[1].size,
            bias=False,
            dtype=model_dtype(config),
            name=f"{name}.{index}",
            partition=partition,
            spans=sizes[1:],
        )
        member.takes_adapters = False
        member.index, member.count, member.stack = index, experts.count, ExpertStack()
        members.append(member)
    return members


class SharedKVAttention(Module):
    """Attention that computes queries only and reads the cache of `source` (Brandon et al., 2024, arXiv:2405.12981).

    It has the window and scale of `source`. Invariant: it is no `CacheUser`. An earlier layer writes what it reads in
    the same step, so only the model knows of the sharing.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, source: Attention, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, heads = config.arch, ShardSpan(config.arch.num_heads, config.arch.head_dim)
        self.q_proj = Linear(
            in_features=arch.hidden_size,
            out_features=heads.size,
            bias=arch.attention_bias,
            dtype=model_dtype(config),
            name=f"{prefix}.q_proj",
            partition="output",
            spans=(heads,),
        )
        self.q_norm = None
        if arch.qk_norm is not None:
            self.q_norm = QK_NORMS[arch.qk_norm](config, arch.num_heads, f"{prefix}.q_norm")
        self.o_proj = Linear(
            in_features=heads.size,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=model_dtype(config),
            name=f"{prefix}.o_proj",
            partition="input",
        )
        self.rotary = rotary
        self.head_dim = arch.head_dim
        self._source = (source,)  # in a tuple, so that nn.Module does not register it

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        (source,) = self._source
        q = self.q_proj(x, step).view(len(x), -1, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.rotary is not None:
            q = self.rotary.queries(positions, q, step)
        return self.o_proj(source.attend(q, step), step)


class ParallelAttentionMamba(Module):
    """Attention and Mamba 2 in parallel: `attention(x * a) * b + mamba(x * c) * d`."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        assert config.arch.parallel_attention_mamba is not None, "a layer of this kind is described"
        self.own = config.arch.parallel_attention_mamba
        self.self_attn = SelfAttention(
            config=config, prefix=f"{prefix}.self_attn", layer=layer, rotary=rotary
        )
        self.mamba = Mamba2Mixer(config=config, prefix=f"{prefix}.mamba", layer=layer, rotary=None)

    def reads(self, source: RowSource) -> None:
        """Ignore the declaration: x has two readers here, so it cannot arrive quantized."""

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        own = self.own
        attended = self.self_attn(x * own.attention_in, positions, step) * own.attention_out
        scanned = self.mamba(x * own.mamba_in, positions, step) * own.mamba_out
        return attended + scanned
