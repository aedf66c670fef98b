"""The first tokens of rows whose logits ranks share out, found without bringing the logits together.

Each rank knows the first of its own tokens; what crosses ranks is their logits and numbers. The first of all is the one
that `ops.sample_tokens` takes at temperature 0: the greatest logit, and of equal ones the lowest token, as ranks have
their tokens in order. With top-k it draws from the k first ones and looks at no other: these are among the k first ones
of the ranks.

Shapes: N rows, H hidden size, V tokens, R ranks, S tokens of a rank, k tokens that are shown of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import ops
from quire.models.base import CausalLM
from quire.worker.sampler.sampler import NON_FINITE_CODE

_LEAST_GAIN = 8
"""A logit that crosses ranks with its number takes twice the bytes, and finding it takes time: so many times fewer must
cross than there are."""


class FirstTokens:
    """Of a model whose output head has the same number of tokens on all ranks, but perhaps the last."""

    def __init__(self, model: CausalLM, group: Group, first_token: int, share: int, vocab_size: int) -> None:
        self._model, self._group, self._first_token = model, group, first_token
        self._share, self._vocab_size = share, vocab_size

    @staticmethod
    def of_model(model: object) -> FirstTokens | None:
        """None: it has all logits itself, or makes them in a way of its own."""
        shared = model.shared_head() if isinstance(model, CausalLM) else None
        if shared is None or shared.group is None:
            return None
        assert isinstance(model, CausalLM)
        return FirstTokens(model, shared.group, shared.rows[0].start, shared.share, shared.shape[0])

    def codes(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N] int64, on all ranks alike: a token, or what a `Sampled` has for unusable logits."""
        values, tokens = self._model.own_logits(hidden).max(1)
        best, found = self._of_ranks(values[:, None], tokens[:, None])
        best, rank = best.max(1)
        return found.gather(1, rank[:, None])[:, 0].masked_fill(~best.isfinite(), NON_FINITE_CODE)

    def are_few(self, num: int) -> bool:
        """Whether so many of each rank's tokens are better shown than all."""
        return _LEAST_GAIN * num <= self._share

    def logits(self, hidden: Tensor, num: int) -> Tensor:
        """hidden [N, H] -> float32 [N, V], on all ranks alike, of the `num` first tokens of each rank; -inf of others.

        A row of logits from which no token can be chosen is still one.
        """
        values, tokens = self._of_ranks(*_first(self._model.own_logits(hidden), num))
        return values.new_full((len(hidden), self._vocab_size), -torch.inf).scatter_(1, tokens, values)

    def _of_ranks(self, values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """float32 and int64 [N, k], tokens counted from the rank's first -> the same of all ranks [N, R * k]."""
        tokens = (tokens + self._first_token).int()
        shown = torch.stack((values, tokens.view(torch.float32)), 2).flatten(1)
        every = ops.all_gather(shown, self._group).view(len(values), -1, 2)
        return every[:, :, 0], every[:, :, 1].contiguous().view(torch.int32).long()


def _first(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Of each row [N, S] the first ones in the order of `ops.sample_tokens`, and their places, [N, num].

    Where there are fewer the first of them stands for those that are missing.
    """
    most = min(num, logits.shape[1])
    values, places = (by_looking if logits.device.type == "cpu" else by_keys)(logits, most)
    missing = num - most
    if missing:
        values = torch.cat((values, values[:, :1].expand(-1, missing)), 1)
        places = torch.cat((places, places[:, :1].expand(-1, missing)), 1)
    return values, places


def by_looking(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The same of at most S, where it is known at once whether there are equal ones."""
    values, places = logits.topk(min(most + 1, logits.shape[1]))
    last, next_one = values[:, most - 1], values[:, -1]
    if values.shape[1] > most and ((last == next_one) & (last > -torch.inf)).any():
        # Of equal ones `topk` takes any.
        values, places = logits.sort(dim=1, descending=True, stable=True)
    return values[:, :most], places[:, :most]


def by_keys(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The same without looking at the numbers, for which the host would wait: by integers, none of which are equal.

    A logit's bits are its first ones, of which those of negative numbers go the other way; its place is the last ones.
    """
    count = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # of zeros one has no sign
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(logits.isnan(), 0x7FFFFFFF).long()
    keys = (order << 32) | torch.arange(count - 1, -1, -1, device=logits.device)
    places = keys.topk(most).indices
    return logits.gather(1, places), places
