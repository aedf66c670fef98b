"""Experts without a gate: each an MLP as dense layers have, called with those tokens that chose it.

Shapes: T tokens of the step, H hidden size, k experts of a token.
Invariant: a token's experts are added up in the order of their numbers, whoever else is in the batch.
"""

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import ExpertsArch
from quire.errors import ConfigError
from quire.layers.base import Module
from quire.layers.mlp import PlainMLP
from quire.layers.step import StepContext

_NO_STEP = StepContext(())


class PlainExperts(Module):
    """`PlainMLP`s by their numbers (Nemotron 3, NVIDIA, 2025)."""

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, prefix: str) -> None:
        super().__init__()
        if config.parallel.enable_expert_parallel:
            raise ConfigError(
                f"--enable-expert-parallel: {prefix} (PlainExperts) cannot be shared out expert by expert yet"
            )
        for index in range(experts.count):
            expert = PlainMLP(
                config=config, prefix=f"{prefix}.{index}", intermediate_size=experts.intermediate_size
            )
            expert.up_proj.takes_adapters = expert.down_proj.takes_adapters = False
            self.add_module(str(index), expert)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, _step: StepContext) -> Tensor:
        """x [T, H], as `Router` chose and weighted -> [T, H]."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in torch.unique(chosen).tolist():
            tokens, places = torch.where(chosen == expert)
            rows = self.get_submodule(str(expert))(x[tokens], _NO_STEP)
            out.index_add_(0, tokens, rows.float() * weights[tokens, places, None])
        return out.to(x.dtype)

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        return "experts without a gate are called one by one"
