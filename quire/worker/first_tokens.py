# SPDX-License-Identifier: Apache-2.0
"""Top tokens of a vocabulary sharded over ranks, without gathering all logits."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import ops
from quire.models.base import CausalLM
from quire.worker.sampler.sampler import NON_FINITE_CODE

_LEAST_GAIN = (
    8  # minimal ratio of a rank's logits to those exchanged: each travels with its id, in twice the bytes
)


class FirstTokens:
    """Top tokens of an output head that is sharded over ranks, all shards but perhaps the last of equal size.

    Each rank finds the top tokens of its shard, and only their logits and ids are exchanged. The order is that of
    `ops.sample_tokens`: highest logit first, of equal ones the lowest token. The global top k are among the top k of
    the ranks.

    Shapes: N rows, H hidden size, V tokens, R ranks, S tokens of a rank, k tokens exchanged per rank.
    """

    def __init__(self, model: CausalLM, group: Group, first_token: int, share: int, vocab_size: int) -> None:
        self._model, self._group, self._first_token = model, group, first_token
        self._share, self._vocab_size = share, vocab_size

    @staticmethod
    def from_model(model: object) -> FirstTokens | None:
        """Return None if the model has all logits itself or computes them in its own way."""
        shared = model.shared_head() if isinstance(model, CausalLM) else None
        if shared is None or shared.group is None:
            return None
        assert isinstance(model, CausalLM)
        return FirstTokens(model, shared.group, shared.rows[0].start, shared.share, shared.shape[0])

    def codes(self, hidden: Tensor) -> Tensor:
        """Map hidden [N, H] to [N] int64, equal on all ranks: a token, or the code of `Sampled` for unusable logits."""
        values, tokens = self._model.own_logits(hidden).max(1)
        best, found = self._of_ranks(values[:, None], tokens[:, None])
        best, rank = best.max(1)
        return found.gather(1, rank[:, None])[:, 0].masked_fill(~best.isfinite(), NON_FINITE_CODE)

    def are_few(self, num: int) -> bool:
        """Return whether exchanging `num` tokens of each rank is cheaper than all logits."""
        return _LEAST_GAIN * num <= self._share

    def logits(self, hidden: Tensor, num: int) -> Tensor:
        """Map hidden [N, H] to float32 [N, V], equal on all ranks: the `num` top tokens of each rank, -inf elsewhere.

        A row of logits from which no token can be sampled remains one.
        """
        values, tokens = self._of_ranks(*_first(self._model.own_logits(hidden), num))
        return values.new_full((len(hidden), self._vocab_size), -torch.inf).scatter_(1, tokens, values)

    def _of_ranks(self, values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather float32 and int64 [N, k], tokens counted from the rank's first, to [N, R * k]."""
        tokens = (tokens + self._first_token).int()
        shown = torch.stack((values, tokens.view(torch.float32)), 2).flatten(1)
        every = ops.all_gather(shown, self._group).view(len(values), -1, 2)
        return every[:, :, 0], every[:, :, 1].contiguous().view(torch.int32).long()


def _first(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return values and indices [N, num] of the top tokens of each row [N, S], in the order of `ops.sample_tokens`.

    If S is smaller than `num`, the top token is repeated.
    """
    most = min(num, logits.shape[1])
    values, places = (_top_checked if logits.device.type == "cpu" else by_keys)(logits, most)
    missing = num - most
    if missing:
        values = torch.cat((values, values[:, :1].expand(-1, missing)), 1)
        places = torch.cat((places, places[:, :1].expand(-1, missing)), 1)
    return values, places


def _top_checked(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the top tokens on a host: check for ties at the boundary, and sort if there are any."""
    values, places = logits.topk(min(most + 1, logits.shape[1]))
    last, next_one = values[:, most - 1], values[:, -1]
    if values.shape[1] > most and ((last == next_one) & (last > -torch.inf)).any():
        # `topk` breaks ties arbitrarily.
        values, places = logits.sort(dim=1, descending=True, stable=True)
    return values[:, :most], places[:, :most]


def by_keys(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the top tokens without synchronizing with the device, by distinct integer keys.

    The high bits of a key are the logit's bits in sortable order, the low bits its reversed index.
    """
    count = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(logits.isnan(), 0x7FFFFFFF).long()
    keys = (order << 32) | torch.arange(count - 1, -1, -1, device=logits.device)
    places = keys.topk(most).indices
    return logits.gather(1, places), places
