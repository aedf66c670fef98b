"""Mixture of attention heads (X. Zhang et al., 2022, arXiv:2210.05144), as JetMoE has it (2024, arXiv:2404.07413).

Shapes: T tokens of the step, H hidden size, Hkv heads of size D, E experts, k experts of a token.
"""

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import ExpertsArch, ExpertStack
from quire.layers.attention import Attention
from quire.layers.base import Module, RowSource, model_dtype
from quire.layers.experts import LinearInStack
from quire.layers.linear import Linear
from quire.layers.rotary import RotaryEmbedding
from quire.layers.router import Router
from quire.layers.shard import Cut, Shard, Span
from quire.layers.slot import length
from quire.layers.step import StepContext
from quire.layers.vectors import OutBias


class MixtureOfAttention(Module):
    """Experts are projections into the queries of Hkv heads, and out of what these see; all share keys and values.

    All make their queries, of which those of the chosen attend; what others would give is 0. So each step reads the
    matrices of all, which are small beside those of the MLPs. Ranks have some of the heads of every expert.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch = config.arch
        experts = arch.attention_experts
        assert experts is not None, "a layer of this kind is described"
        self.heads = arch.num_kv_heads, arch.head_dim
        """How many a rank has, and their size."""
        heads, hidden = Span(*self.heads), Span(arch.hidden_size)
        self.gate = Router(config=config, experts=experts, name=f"{prefix}.gate")
        self.input_linear = _experts(config, experts, (hidden, heads), "output", f"{prefix}.input_linear")
        self.output_linear = _experts(config, experts, (heads, hidden), "input", f"{prefix}.output_linear")
        self.kv_proj = Linear(
            in_features=arch.hidden_size,
            out_features=2 * heads.size,
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}.kv_proj",
            cut="output",
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
        """x has several readers here, so nobody rounds it before."""

    def take_share(self, shard: Shard) -> None:
        own = Span(self.heads[0]).piece(shard, self.attn.name)
        self.heads = length(own), self.heads[1]

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        chosen, weights = self.gate.choose(x, step)
        every = torch.stack([expert(x, step) for expert in self.input_linear], 1)
        places = chosen.long().unsqueeze(2).expand(-1, -1, every.shape[2])
        # The heads that share keys lie side by side.
        q = torch.unflatten(every.gather(1, places), 2, self.heads).transpose(1, 2).flatten(1, 2)
        k, v = (torch.unflatten(part, 1, self.heads) for part in self.kv_proj(x, step).chunk(2, 1))
        seen = torch.unflatten(self.attn(q, k, v, positions, step), 1, (self.heads[0], -1, self.heads[1]))
        weighted = seen.transpose(1, 2).flatten(2) * weights.unsqueeze(2).to(seen.dtype)
        given = torch.zeros_like(every).scatter(1, places, weighted)
        return self.bias(self._put_together(given, step))

    def _put_together(self, given: Tensor, step: StepContext) -> Tensor:
        """What all experts make [T, E, Hkv * D] -> [T, H], in the order of their numbers."""
        first, *others = (
            expert(given[:, index].contiguous(), step) for index, expert in enumerate(self.output_linear)
        )
        for out in others:
            first = first + out
        return first


def _experts(
    config: EngineConfig, experts: ExpertsArch, sizes: tuple[Span, Span], cut: Cut, name: str
) -> nn.ModuleList:
    """Of so many inputs and outputs."""
    members = nn.ModuleList()
    for index in range(experts.count):
        member = LinearInStack(
            in_features=sizes[0].size,
            out_features=sizes[1].size,
            bias=False,
            dtype=model_dtype(config),
            name=f"{name}.{index}",
            cut=cut,
            spans=sizes[1:],
        )
        member.takes_adapters = False
        member.index, member.count, member.stack = index, experts.count, ExpertStack()
        members.append(member)
    return members
