"""The layer by which a checkpoint guesses the token after the next (multi-token prediction; DeepSeek-V3, 2024,
arXiv:2412.19437): `block(eh_proj([norm(embedding), norm(state)]))`.

The first such layer guesses further tokens, too, each by the state that it gave for the one before. `MTPArch` says what
families change of it.
"""

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import model_dtype
from quire.layers.linear import Linear
from quire.layers.norm import block_norm
from quire.layers.step import StepContext
from quire.models.blocks import BLOCKS
from quire.models.decoder import rotaries_of
from quire.models.draft_heads.autoregressive import AutoregressiveHead


class MTPHead(AutoregressiveHead):
    """A layer like the target's last one; its states are normed for the target's output head."""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        arch, size = config.arch, config.arch.hidden_size
        self.mtp = arch.mtp
        self.merged, self.renamed, self.unused = arch.names.merged, arch.names.renamed, arch.names.unused
        self.enorm = block_norm(config, f"{prefix}enorm")
        self.hnorm = block_norm(config, f"{prefix}hnorm")
        self.eh_proj = Linear(
            in_features=2 * size,
            out_features=size,
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}eh_proj",
        )
        (rotary,) = rotaries_of(config)
        block = BLOCKS[arch.block_of(0)]
        self.block = block(config=config, prefix=f"{prefix}block", layer=0, rotary=rotary)
        self.head_norm = block_norm(config, f"{prefix}head_norm")

    def behind(self, embedded: Tensor, states: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        parts = (self.enorm(embedded), self.hnorm(states))
        joined = self.eh_proj(torch.cat(parts[::-1] if self.mtp.state_first else parts, dim=-1), step)
        x, residual = self.block(joined, None, positions, step)
        return self.head_norm.add(x, residual)[0] if self.mtp.gives_normed else torch.add(x, residual)

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        return super().compute_logits(
            hidden if self.mtp.gives_normed else self.head_norm(hidden), adapter_rows, num_added
        )
