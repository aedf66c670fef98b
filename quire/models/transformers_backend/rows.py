"""What a loaded model must promise to be run on a packed batch, found by running it on a few tokens.

Attention sees a token itself and no other here, so that every token's hidden state must be its own. A convolution, a
state, or angles that depend on the longest request would make it depend on rows that are another's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, UnsupportedModelError
from quire.layers.base import activation_dtype, device_type

Run = Callable[[Tensor, Tensor | None], Tensor]
"""Ids [T] and positions [T], or None where the model is to count them, -> hidden states [T, H]."""

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Of hidden states, in parts of the largest of them."""


def position_offset(run: Run, config: EngineConfig, padding_idx: int | None) -> int:
    """The number that the model gives to the first position: 0, or the one behind that of padding, as in RoBERTa.

    Raises:
        UnsupportedModelError: neither.
        ConfigError: from there on, it has too few for the longest request.
    """
    ids = _ids(config, padding_idx)
    counted = run(ids, None)
    for offset in {0: None, (padding_idx or 0) + 1: None}:
        if _agree(run(ids, torch.arange(offset, offset + len(ids))), counted, config):
            most = config.arch.max_position_embeddings - offset
            if offset and config.model.max_model_len > most:
                raise ConfigError(
                    f"--max-model-len is {config.model.max_model_len}, but may be at most {most}"
                )
            return offset
    raise UnsupportedModelError("it numbers positions in a way of its own")


def check_rows_are_apart(run: Run, config: EngineConfig, padding_idx: int | None, offset: int) -> None:
    """Compare a token among others with the same token alone.

    Raises:
        UnsupportedModelError: it matters who else is there.
    """
    last = (config.model.max_model_len or config.arch.max_position_embeddings - offset) - 1
    middle, ids = min(5, last), _ids(config, padding_idx)
    together = run(ids, torch.tensor([0, middle, last]))[1:2]
    if not _agree(together, run(ids[1:2], torch.tensor([middle])), config):
        raise UnsupportedModelError(
            "a token's hidden state depends on others not by attention alone, or not on the position it is given"
        )


def _ids(config: EngineConfig, padding_idx: int | None) -> Tensor:
    ids = [token for token in range(3, config.arch.vocab_size) if token != padding_idx]
    return torch.tensor(ids[:3], device=device_type(config))


def _agree(one: Tensor, other: Tensor, config: EngineConfig) -> bool:
    difference = (one - other).abs().max().item()
    return difference <= _TOLERANCES[activation_dtype(config)] * other.abs().max().item()
