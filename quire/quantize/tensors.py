# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tensors with scales folded into them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from quire.models.weights import CheckpointWeights
from quire.quantize.sites import Divided, Site

Edit = Callable[[Tensor], Tensor]


class EditedTensors:
    """Reader of tensors in float32, with all edits under their names applied."""

    def __init__(self, weights: CheckpointWeights) -> None:
        self._weights = weights
        self._edits: dict[str, list[Edit]] = defaultdict(list)

    def read(self, name: str) -> Tensor:
        """Return a copy of the tensor in float32."""
        tensor = self._weights.whole(name).to(torch.float32, copy=True)
        for edit in self._edits.get(name, ()):
            tensor = edit(tensor)
        return tensor

    def matrix(self, site: Site) -> Tensor:
        """Return the concatenated weights of a site's modules: [N, K]."""
        return torch.cat([self.read(f"{name}.weight") for name in site.modules])

    def final(self, name: str) -> Tensor:
        """Return the tensor to write: the stored one where nothing was changed."""
        stored = self._weights.whole(name)
        return self.read(name).to(stored.dtype) if name in self._edits else stored

    def scale_inputs(self, site: Site, scales: Tensor) -> None:
        """Multiply the columns of a site's weights, and divide the tensors that produce its inputs."""
        for name in site.modules:
            self._edits[f"{name}.weight"].append(lambda tensor: tensor * scales)
        for part in site.source:
            self._edits[part.tensor].append(_divided(part, scales))


def _divided(part: Divided, scales: Tensor) -> Edit:
    def edit(tensor: Tensor) -> Tensor:
        by = scales if tensor.dim() == 1 else scales.unsqueeze(1)
        tensor[part.rows] = (tensor[part.rows] + part.offset) / by - part.offset
        return tensor

    return edit
