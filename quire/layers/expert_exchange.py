"""How ranks that share out whole experts make the sums of tokens together.

Shapes: T tokens, H hidden size, E experts of the layer, k of a token, N choices.
Invariant: the row of a choice is made by the rank that has its expert, and all rows of a token are added up in one
place, in the order of the experts' numbers, as one rank does alone. So the bits are those of one rank.
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

MOST_FLOATS = 1 << 24
"""Of rows of choices that are there at a time: 64 MiB."""

Adapted = tuple[()] | tuple[Tensor, ExpertAdapters]
"""Which adapter each token has, [T], and those of the rank's experts; or nothing."""


class Exchange(Protocol):
    """Stands in the place of `ops.experts`, where a rank has some of them."""

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, of: ExpertWeights, adapted: Adapted = ()
    ) -> Tensor:
        """x [T, H], chosen and weights [T, k] -> [T, H]; `of` are the experts of this rank."""

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""


def exchange_of(shard: Shard, count: int) -> Exchange | None:
    """That of a rank in a layer of so many experts; None: it has them all."""
    if shard.experts.size == 1:
        return None
    if shard.experts.size == shard.group.size:
        return SameTokens(shard.experts)
    return OwnTokens(shard.experts, shard.group, count)


class SameTokens:
    """All ranks have the same tokens, so nothing has to be sent to experts.

    Rows of choices are added up over the ranks, of which all but one have zeros there: which is exact, takes k times
    the bytes of a sum of tokens, and, being of a known size, can be recorded.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, of: ExpertWeights, adapted: Adapted = ()
    ) -> Tensor:
        num_tokens, top_k = chosen.shape
        most = max(1, MOST_FLOATS // (top_k * x.shape[1]))
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
    """Replicas with tokens of their own: each goes to the ranks that have its experts, and what these make comes back.

    Of the tokens of a replica each of its ranks, `shares`, sends a part. All ranks of `group` call `experts` equally
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
        """What each choice's expert makes, wherever that is: [T, k, H]."""
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
        return "which rank a token goes to is seen in each step"
