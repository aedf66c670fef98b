# SPDX-License-Identifier: Apache-2.0
"""The feed-forward block of a decoder layer.

Shapes: T tokens of the step, H hidden size, I intermediate size.
"""

from functools import partial

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.activation import FUNCTIONS, XIELU, Activation
from quire.layers.altup import GaussianTop
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.linear import GateUpLinear, Linear
from quire.layers.step import StepContext


class GatedMLP(Module):
    """`down(act(gate(x)) * up(x))` (SwiGLU: Shazeer, 2020, arXiv:2002.05202); I defaults to the model's.

    With `sparsity`, that fraction of each row of the gate is zeroed (`GaussianTop`).
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        prefix: str,
        intermediate_size: int | None = None,
        sparsity: float = 0.0,
    ) -> None:
        super().__init__()
        arch = config.arch
        size = intermediate_size or arch.intermediate_size
        prepare: Activation | None = None
        if sparsity:
            prepare = GaussianTop(sparsity)
        elif arch.gate_multiplier != 1.0:
            prepare = partial(torch.mul, other=arch.gate_multiplier)
        self.gate_up_proj = GateUpLinear(
            hidden_size=arch.hidden_size,
            intermediate_size=size,
            bias=arch.mlp_bias,
            dtype=model_dtype(config),
            activation=arch.hidden_act,
            name=f"{prefix}.gate_up_proj",
            transposed=arch.transposed_weights,
            prepare=prepare,
            up_first=arch.up_first,
        )
        self.down_proj = _down_proj(config, prefix, size)
        self.down_proj.reads(self.gate_up_proj)
        self.multiplier = arch.mlp_multiplier

    def reads(self, source: RowSource) -> None:
        """Declare that x is the output of `source` and that no other layer reads it; see `Linear.reads`."""
        self.gate_up_proj.reads(source)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        out = self.down_proj(self.gate_up_proj(x, step), step)
        return out if self.multiplier == 1.0 else out * self.multiplier


class PlainMLP(Module):
    """`down(act(up(x)))`; I defaults to the model's."""

    def __init__(self, *, config: EngineConfig, prefix: str, intermediate_size: int | None = None) -> None:
        super().__init__()
        arch = config.arch
        size, learned = intermediate_size or arch.intermediate_size, arch.hidden_act == "xielu"
        self.up_proj = Linear(
            in_features=arch.hidden_size,
            out_features=size,
            bias=arch.mlp_bias,
            dtype=model_dtype(config),
            name=f"{prefix}.up_proj",
            partition="output",
            transposed=arch.transposed_weights,
            activation=None if learned else FUNCTIONS[arch.hidden_act],
        )
        self.act_fn = XIELU(dtype=activation_dtype(config), name=f"{prefix}.act_fn") if learned else None
        self.down_proj = _down_proj(config, prefix, size)

    def reads(self, source: RowSource) -> None:
        """See `GatedMLP.reads`."""
        self.up_proj.reads(source)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        inner = self.up_proj(x, step)
        return self.down_proj(inner if self.act_fn is None else self.act_fn(inner), step)


def _down_proj(config: EngineConfig, prefix: str, intermediate_size: int) -> Linear:
    arch = config.arch
    return Linear(
        in_features=intermediate_size,
        out_features=arch.hidden_size,
        bias=arch.mlp_bias if arch.mlp_out_bias is None else arch.mlp_out_bias,
        dtype=model_dtype(config),
        name=f"{prefix}.down_proj",
        partition="input",
        transposed=arch.transposed_weights,
    )
