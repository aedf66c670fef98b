# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: exchange of tokens and expert outputs between ranks that hold whole experts.

Shapes: T tokens, H hidden size, E experts of the layer, k of a token, N choices.
Invariant: the rank with an expert computes the rows of its choices, and all rows of a token are added in one place, in
the order of the experts' numbers, as one rank does alone. So the bits are those of one rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.distributed.group import Group
from quire.kernels import ops
from quire.kernels.experts import ExpertAdapters, ExpertWeights
from quire.layers.shard import Shard, members_of

MAX_FLOATS = 1 << 24
"""Largest number of floats in rows of choices at a time: 64 MiB."""

Adapted = tuple[()] | tuple[Tensor, ExpertAdapters]
"""(adapter of each token [T], adapters of the rank's experts), or ()."""


class ExpertExchange(Protocol):
    """Replacement of `ops.experts` for ranks with some of the experts."""

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, of: ExpertWeights, adapted: Adapted = ()
    ) -> Tensor:
        """x [T, H], chosen and weights [T, k] -> [T, H]; `of` are this rank's experts."""

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""


def exchange_of(shard: Shard, count: int) -> ExpertExchange | None:
    """Return the exchange for a layer with `count` experts; None if this rank has them all."""
    if shard.experts.size == 1:
        return None
    if shard.experts.size == shard.group.size:
        return SameTokens(shard.experts)
    return OwnTokens(shard.experts, shard.group, count)


class SameTokens:
    """Exchange between ranks with the same tokens, so that no token has to be sent.

    Rows of choices are all-reduced; all ranks but one have zeros there. That is exact, takes k times the bytes of a sum
    of tokens, and has a fixed size, so it can be captured.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, of: ExpertWeights, adapted: Adapted = ()
    ) -> Tensor:
        num_tokens, top_k = chosen.shape
        most = max(1, MAX_FLOATS // (top_k * x.shape[1]))
        if num_tokens <= most:
            return self._sums(x, chosen, weights, of, adapted)
        parts = []
        for start in range(0, num_tokens, most):
            part = slice(start, start + most)
            own = (adapted[0][part], adapted[1]) if adapted else ()
            parts.append(self._sums(x[part], chosen[part], weights[part], of, own))
        return torch.cat(parts)

    def _sums(
        self, x: Tensor, chosen: Tensor, weights: Tensor, of: ExpertWeights, adapted: Adapted
    ) -> Tensor:
        rows = ops.all_reduce(ops.expert_rows(x, chosen, of, *adapted), self._group)
        return ops.add_choices(rows, chosen, weights).to(x.dtype)

    def why_not_captured(self) -> str | None:
        return self._group.why_not_captured()


class OwnTokens:
    """All-to-all between replicas with their own tokens: each token goes to the ranks with its experts, and rows come
    back.

    Each rank of a replica's `shares` sends a part of the replica's tokens. All ranks of `group` call `experts` equally
    often; one whose replica has no tokens, with none.
    """

    def __init__(self, group: Group, shares: Group, count: int) -> None:
        self._group, self._shares = group, shares
        owners = [rank for rank in range(group.size) for _ in members_of(rank, group.size, count)]
        self._owners = torch.tensor(owners, device="cpu")

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, of: ExpertWeights, adapted: Adapted = ()
    ) -> Tensor:
        assert not adapted, "replicas that share experts have no adapters"
        most = -(-len(x) // self._shares.size)
        part = slice(self._shares.rank * most, (self._shares.rank + 1) * most)
        rows = self._rows(x[part], chosen[part], of)
        out = ops.add_choices(rows, chosen[part].contiguous(), weights[part].contiguous()).to(x.dtype)
        if self._shares.size == 1 or not len(x):
            return out
        return ops.all_gather(pad(out, (0, 0, 0, most - len(out))), self._shares, 0)[: len(x)]

    def _rows(self, x: Tensor, chosen: Tensor, of: ExpertWeights) -> Tensor:
        """Return the expert output of each choice, wherever it is computed: [T, k, H]."""
        choices = chosen.flatten()
        owners = self._owners[choices.long()]
        order = owners.argsort(stable=True)
        counts = torch.bincount(owners, minlength=self._group.size).tolist()
        numbers, _ = ops.all_to_all(choices[order], counts, self._group)
        tokens, came = ops.all_to_all(x[order // chosen.shape[1]], counts, self._group)
        made = ops.expert_rows(tokens, numbers[:, None].contiguous(), of)
        back, _ = ops.all_to_all(made[:, 0], came, self._group)
        rows = torch.empty_like(back)
        rows[order] = back
        return rows.view(*chosen.shape, x.shape[1])

    def why_not_captured(self) -> str | None:
        return "the ranks that a token goes to differ from step to step"
