"""Sharper attention at later positions (Nakanishi, 2025, arXiv:2501.19399), in the form of Llama 4.

Shapes: T tokens, P positions, Hq query heads, D head size.
"""

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import Temperature
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype


class TemperatureTuning(Module):
    """Queries times `1 + scale * log(1 + floor((position + offset) / interval))`."""

    table: Tensor

    def __init__(self, *, config: EngineConfig, temperature: Temperature) -> None:
        super().__init__()
        arch = config.arch
        with torch.device("cpu"):
            positions = torch.arange(config.model.max_model_len or arch.max_position_embeddings)
            steps = torch.floor((positions.float() + temperature.offset) / temperature.interval)
            table = (1.0 + temperature.scale * torch.log1p(steps)).to(activation_dtype(config))
        self.register_buffer("table", table.unsqueeze(1), persistent=False)

    def forward(self, positions: Tensor, q: Tensor) -> Tensor:
        """positions [T], q [T, Hq, D] -> the same shape."""
        return q * ops.embedding(positions, self.table).unsqueeze(-1)
