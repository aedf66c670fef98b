# SPDX-License-Identifier: Apache-2.0
"""Alternating updates (AltUp; Baykal et al., 2023, arXiv:2301.13310) and statistical top-k activation sparsity.

Shapes: N streams, of which a layer computes the first, T tokens of the step, H hidden size, I features, or those of a
rank.
"""

from __future__ import annotations

from functools import reduce
from statistics import NormalDist

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.distributed.group import ALONE, Group
from quire.kernels import ops
from quire.kernels.reference_collectives import tree_sum
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.head_norms import added_up
from quire.layers.linear import ExactLinear
from quire.layers.norm import block_norm
from quire.layers.shard import Shard, ShardSpan
from quire.layers.step import StepContext
from quire.layers.vectors import LayerVector, VectorLayer


class GaussianTop(Module):
    """Statistical top-k (Gemma 3n, 2025; Bui et al., 2025, arXiv:2506.06644): `relu(x - quantile)`.

    The quantile `sparsity` is estimated per row under a normal distribution. If rows are sharded, partial sums are
    all-gathered.
    """

    def __init__(self, sparsity: float) -> None:
        super().__init__()
        self.deviations = NormalDist().inv_cdf(sparsity)
        self.slices = 0
        """Number of equal parts of the rank's share of a row that are summed separately; 0: rows are not sharded."""
        self.group: Group = ALONE

    def apply_shard(self, shard: Shard) -> None:
        self.group, self.slices = shard.group, max(self.slices, 1)

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        return None if self.group.size == 1 else self.group.why_not_captured()

    def forward(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, I]."""
        mean = self._mean(x)
        spread = self._mean((x - mean).square()).sqrt()
        return ops.activate(x - (mean + self.deviations * spread), function="relu")

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean of whole rows, [T, 1]."""
        if not self.slices:
            return x.mean(-1, keepdim=True)
        sums = added_up(x.float().reshape(len(x), self.slices, -1))
        if self.group.size > 1:
            sums = ops.all_gather(sums, self.group)
        total = tree_sum(sums.unbind(1)) / (x.shape[1] * self.group.size)
        return total[:, None].to(x.dtype)


class Scale(VectorLayer):
    """Scale per dimension, stored under this layer's bare name."""

    vectors = (LayerVector("weight", "", "ones"),)
    weight: Tensor

    def __init__(self, *, size: int, dtype: torch.dtype, name: str) -> None:
        super().__init__(ShardSpan(1, size, replicated=True), dtype=dtype, name=name)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return x * self.weight


class AltUp(Module):
    """Prediction of each stream's next value, and its correction by the layer's output for the first stream.

    Both are sums of streams, in stream order, with coefficients computed from each token.
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
        """Streams [N, T, H] -> predictions [N, T, H]."""
        coefficients = self.prediction_coefs(self._modalities(streams[0], step), step)
        by_stream = coefficients.t().reshape(self.streams, self.streams, -1, 1)  # to, from, token
        terms = (by_stream[:, source] * streams[source] for source in range(self.streams))
        return reduce(torch.add, terms) + streams

    def correct(self, predicted: Tensor, made: Tensor, step: StepContext) -> Tensor:
        """Predictions [N, T, H] and the first stream's output [T, H] -> streams [N, T, H]."""
        coefficients = self.correction_coefs(self._modalities(made, step), step) + 1.0
        return (made - predicted[0]) * coefficients.t().unsqueeze(-1) + predicted

    def _modalities(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> in (-1, 1), [T, N]."""
        return torch.tanh(self.modality_router(self.router_norm(x) * self.shrink, step))


def _small(config: EngineConfig, name: str, inputs: int, outputs: int) -> ExactLinear:
    return ExactLinear(
        in_features=inputs, out_features=outputs, bias=False, dtype=model_dtype(config), name=name
    )
