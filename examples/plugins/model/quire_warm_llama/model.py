# SPDX-License-Identifier: Apache-2.0
"""The network, made of quire's parts; each is named as the checkpoint names it."""

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head
from quire.models.decoder import Decoder


class WarmLlamaForCausalLM(CausalLM):
    """Llama's layers, and an output head whose logits are cooled or warmed."""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.merged = config.arch.names.merged
        self.unused = config.arch.names.unused
        self.model = Decoder(config=config, prefix=f"{prefix}model")
        self.lm_head = output_head(config, self.model.embed_tokens, f"{prefix}lm_head")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Ids and positions [T] -> hidden states [T, H]."""
        return self.model(inputs, positions, step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 logits [N, V]."""
        return torch.mul(super().compute_logits(hidden), self.config.arch.logits_multiplier)
