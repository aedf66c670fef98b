"""Whether a loaded model tells tokens apart by attention alone, as running it on a packed batch takes for granted.

A convolution, a state, a position that is counted and not given, or angles that depend on the longest request would
make a token's hidden state depend on rows that are another's. So the model is run with attention that sees a token
itself and no other, once on several tokens and once on one of them alone: it must be the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import activation_dtype, device_type
from quire.models.transformers_backend.sites import Port, own_value

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Of hidden states, in parts of the largest of them."""


def why_rows_are_not_apart(
    port: Port, run: Callable[[Tensor, Tensor], Tensor], config: EngineConfig
) -> str | None:
    """Why a model cannot be run on a packed batch: a phrase for people; None if it can."""
    last = (config.model.max_model_len or config.arch.max_position_embeddings) - 1
    middle, vocab_size = min(5, last), config.arch.vocab_size
    ids = [token % vocab_size for token in (3, 7, 11)]
    with port.doing(own_value), torch.inference_mode(), torch.device(device_type(config)):
        together = run(torch.tensor(ids), torch.tensor([0, middle, last]))[1]
        alone = run(torch.tensor(ids[1:2]), torch.tensor([middle]))[0]
    difference = (together - alone).abs().max().item()
    if difference <= _TOLERANCES[activation_dtype(config)] * alone.abs().max().item():
        return None
    return "a token's hidden state depends on others not by attention alone, or not on the position it is given"
