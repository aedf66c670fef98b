# SPDX-License-Identifier: Apache-2.0
"""Attention of a decoder's tokens to frames of a sound, computed again behind the last token of a window.

Shapes: T tokens, E rows of the encoder's output, M <= E frames of the sound, H hidden size, A alignment heads.
Invariant: it reads neither the KV cache nor the batch, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import UnavailableError, ValidationError
from quire.media import MediaItem
from quire.models.encoder_decoder import CrossingBlock, EncoderDecoder
from quire.multimodal.towers.base import NO_STEP
from quire.multimodal.worker.encoders import EncoderStore
from quire.speech.alignment import Alignment
from quire.worker.media_rows import Embeddings
from quire.worker.worker import Worker


class AlignmentWork:
    """Computation of one alignment on a worker, in slices; the encoder runs again only if its output is gone."""

    def __init__(self, alignment: Alignment, item: MediaItem) -> None:
        self._alignment = alignment
        self._item = item
        self._encoding: Generator[None, None, Embeddings] | None = None
        self.weights: NDArray[np.float32] | None = None
        """Smoothed attention [T, M] of the tokens behind the prompt, after the last slice."""

    @torch.inference_mode()
    def advance(self, worker: Worker) -> None:
        """Compute one slice.

        Raises:
            UnavailableError: the model is not loaded.
            ValidationError: it is no model with cross-attention.
        """
        store, model = worker.encoder, worker.model
        if not isinstance(store, EncoderStore):
            raise UnavailableError("the model is not loaded", retry_after=2)
        if not isinstance(model, EncoderDecoder):
            raise ValidationError("words have times only with a model that has cross-attention")
        if self._encoding is None:
            self._encoding = store.compute(self._item)
        try:
            next(self._encoding)
        except StopIteration as end:
            self.weights = weights_of(model, end.value.values, self._alignment).float().cpu().numpy()


def weights_of(model: EncoderDecoder, encoded: Tensor, alignment: Alignment) -> Tensor:
    """Return the smoothed attention [T, M] of the tokens behind the prompt to the frames of the sound.

    Args:
        encoded: the encoder's output [P, H], of which E rows are real.
    """
    ids = [*alignment.prompt, *alignment.tokens]
    rows = encoded[: model.model.length].to(model.model.dtype)
    weights = _attention(model, rows, ids, alignment.heads)
    weights = weights[:, len(alignment.prompt) :, : max(1, alignment.num_frames // 2)]
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    weights = (weights - mean) / deviation.where(deviation > 0, 1.0)
    return median_filtered(weights, alignment.median_width).mean(dim=0)


def median_filtered(x: Tensor, width: int) -> Tensor:
    """Return x [..., M] with each element replaced by the median of the `width` around it, mirrored at the ends."""
    reach = width // 2
    if reach == 0 or x.shape[-1] <= reach:
        return x
    return F.pad(x, (reach, reach), mode="reflect").unfold(-1, width, 1).sort(dim=-1).values[..., reach]


def _attention(
    model: EncoderDecoder, encoded: Tensor, ids: Sequence[int], heads: Sequence[tuple[int, int]]
) -> Tensor:
    """Return the cross-attention [A, T, E] of (layer, head) pairs, for an encoder's output [E, H]."""
    decoder = model.model
    tokens = torch.tensor(ids, dtype=torch.int64, device=encoded.device)
    x = decoder.embed(tokens, torch.arange(len(ids), device=encoded.device))
    found = dict[tuple[int, int], Tensor]()
    for number, layer in enumerate(decoder.layers[: 1 + max(layer for layer, _ in heads)]):
        assert isinstance(layer, CrossingBlock), "every layer has cross-attention"
        x, weights = _through(layer, x, encoded)
        found |= {(layer, head): weights[head] for layer, head in heads if layer == number}
    return torch.stack([found[pair] for pair in heads])


def _through(layer: CrossingBlock, x: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] -> [T, H], and the cross-attention [heads, T, E]."""

    def heads(rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, layer.head_dim).transpose(0, 1).float()

    def joined(out: Tensor) -> Tensor:
        return out.transpose(0, 1).flatten(1).to(x.dtype)

    own = layer.self_attn.qkv_proj.heads(layer.self_attn_layer_norm(x), NO_STEP)
    q, k, v = (part.transpose(0, 1).float() for part in own)
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.attention.scale)
    x = x + layer.self_attn.out_proj(joined(seen), NO_STEP)
    cross = layer.encoder_attn
    q = heads(cross.q_proj(layer.encoder_attn_layer_norm(x), NO_STEP))
    k, v = heads(cross.k_proj(encoded, NO_STEP)), heads(cross.v_proj(encoded, NO_STEP))
    weights = (q @ k.transpose(1, 2) * layer.attention.scale).softmax(dim=-1)
    x = x + cross.out_proj(joined(weights @ v), NO_STEP)
    return x + layer.mlp(layer.final_layer_norm(x), NO_STEP), weights


def start(alignment: Alignment, item: MediaItem) -> Any:
    """Return the work of an alignment; see `quire.speech.aligner`."""
    return AlignmentWork(alignment, item)
