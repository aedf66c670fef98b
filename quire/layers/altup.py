"""Alternating updates (AltUp; Baykal et al., 2023, arXiv:2301.13310): a wide stream at the cost of a narrow one.

Shapes: N streams, of which a layer computes the first, T tokens of the step, H hidden size.
"""

from functools import reduce

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.linear import ExactLinear
from quire.layers.norm import block_norm
from quire.layers.shard import Span
from quire.layers.step import StepContext
from quire.layers.vectors import Vector, VectorLayer


class Scale(VectorLayer):
    """A number for each dimension; in the checkpoint it has the name of this layer, and no other."""

    vectors = (Vector("weight", "", "ones"),)
    weight: Tensor

    def __init__(self, *, size: int, dtype: torch.dtype, name: str) -> None:
        super().__init__(Span(1, size, replicated=True), dtype=dtype, name=name)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return x * self.weight


class AltUp(Module):
    """What each stream is expected to be behind a layer, and how it is put right by what the layer makes of the first.

    Both are sums of streams, in the order of their numbers, with coefficients that each token chooses.
    """

    def __init__(self, *, config: EngineConfig, prefix: str, streams: int) -> None:
        super().__init__()
        self.streams, self.shrink = streams, 1.0 / config.arch.hidden_size
        self.router_norm = block_norm(config, f"{prefix}.router_norm")
        self.modality_router = _small(config, f"{prefix}.modality_router", config.arch.hidden_size, streams)
        self.prediction_coefs = _small(config, f"{prefix}.prediction_coefs", streams, streams * streams)
        self.correction_coefs = _small(config, f"{prefix}.correction_coefs", streams, streams)
        self.correct_output_scale = Scale(
            size=config.arch.hidden_size,
            dtype=activation_dtype(config),
            name=f"{prefix}.correct_output_scale",
        )

    def predict(self, streams: Tensor, step: StepContext) -> Tensor:
        """Streams [N, T, H] -> what is expected of them, [N, T, H]."""
        coefficients = self.prediction_coefs(self._modalities(streams[0], step), step)
        by_stream = coefficients.t().reshape(self.streams, self.streams, -1, 1)  # of, from, token
        terms = (by_stream[:, source] * streams[source] for source in range(self.streams))
        return reduce(torch.add, terms) + streams

    def correct(self, predicted: Tensor, made: Tensor, step: StepContext) -> Tensor:
        """Predictions [N, T, H], and what the first stream has become [T, H] -> streams [N, T, H]."""
        coefficients = self.correction_coefs(self._modalities(made, step), step) + 1.0
        return (made - predicted[0]) * coefficients.t().unsqueeze(-1) + predicted

    def _modalities(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> in (-1, 1), [T, N]."""
        return torch.tanh(self.modality_router(self.router_norm(x) * self.shrink, step))


def _small(config: EngineConfig, name: str, inputs: int, outputs: int) -> ExactLinear:
    return ExactLinear(
        in_features=inputs, out_features=outputs, bias=False, dtype=model_dtype(config), name=name
    )
