"""The feed-forward block of a sparse decoder layer (N. Shazeer et al., 2017, arXiv:1701.06538).

Shapes: T tokens of the step, H hidden size.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Module, RowSource, model_dtype
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.router import Router
from quire.layers.step import StepContext
from quire.layers.vectors import OutBias


class SparseMLP(Module):
    """The weighted sum of a token's experts, and of one that sees every token, if there is one."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        experts = config.arch.experts
        assert experts is not None, "a sparse layer has experts"
        self.gate = Router(config=config, experts=experts, name=f"{prefix}.gate")
        shared_kind: type[GatedMLP | PlainMLP] = GatedMLP if experts.gated else PlainMLP
        self.experts = Experts(config=config, experts=experts, prefix=f"{prefix}.experts")
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if experts.latent_size:
            hidden, latent = config.arch.hidden_size, experts.latent_size
            self.fc1_latent_proj = _latent_proj(config, hidden, latent, f"{prefix}.fc1_latent_proj")
            self.fc2_latent_proj = _latent_proj(config, latent, hidden, f"{prefix}.fc2_latent_proj")
        self.weighs_input = experts.weighs_input
        self.out_bias = OutBias(config=config, name=f"{prefix}.out_bias") if experts.out_bias else None
        self.shared_expert: GatedMLP | PlainMLP | None = None
        self.shared_expert_gate: Linear | None = None
        if experts.shared_size:
            self.shared_expert = shared_kind(
                config=config, prefix=f"{prefix}.shared_expert", intermediate_size=experts.shared_size
            )
        if experts.shared_gate:
            self.shared_expert_gate = Linear(
                in_features=config.arch.hidden_size,
                out_features=1,
                bias=False,
                dtype=model_dtype(config),
                name=f"{prefix}.shared_expert_gate",
                activation="sigmoid",
            )

    def reads(self, source: RowSource) -> None:
        """x has several readers here, so nobody rounds it before."""

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        out = self._routed(x, step)
        if self.out_bias is not None:
            out = self.out_bias(out)
        return out if self.shared_expert is None else out + self._shared(x, step)

    def _routed(self, x: Tensor, step: StepContext) -> Tensor:
        chosen, weights = self.gate.choose(x, step)
        if self.weighs_input:
            x, weights = x * weights.to(x.dtype), weights.clamp(1.0, 1.0)
        if self.fc1_latent_proj is not None:
            x = self.fc1_latent_proj(x, step)
        out: Tensor = self.experts(x, chosen, weights, step)
        return out if self.fc2_latent_proj is None else self.fc2_latent_proj(out, step)

    def _shared(self, x: Tensor, step: StepContext) -> Tensor:
        assert self.shared_expert is not None
        out: Tensor = self.shared_expert(x, step)
        if self.shared_expert_gate is None:
            return out
        return out * self.shared_expert_gate(x, step)


def _latent_proj(config: EngineConfig, inputs: int, outputs: int, name: str) -> Linear:
    """Between hidden states and what experts read, or give (Nemotron 3 Super, NVIDIA, 2025)."""
    return Linear(
        in_features=inputs,
        out_features=outputs,
        bias=config.arch.mlp_bias,
        dtype=model_dtype(config),
        name=name,
    )
