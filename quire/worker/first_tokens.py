"""The likeliest token of rows whose logits ranks share out, found without bringing the logits together.

Each rank knows the first of its own tokens; what crosses ranks is that one's logit and number. The first of all is the
one that `ops.sample_tokens` takes at temperature 0: the greatest logit, and of equal ones the lowest token, since ranks
have their tokens in order.

Shapes: N rows, H hidden size, V tokens, R ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import ops
from quire.models.base import CausalLM
from quire.worker.sampler.sampler import NON_FINITE_CODE


class FirstTokens:
    """Of a model whose output head has the same number of tokens on all ranks, but perhaps the last."""

    def __init__(self, model: CausalLM, group: Group, first_token: int) -> None:
        self._model, self._group, self._first_token = model, group, first_token

    @staticmethod
    def of_model(model: object) -> FirstTokens | None:
        """None: it has all logits itself, or makes them in a way of its own."""
        shared = model.shared_head() if isinstance(model, CausalLM) else None
        if shared is None or shared.group is None:
            return None
        assert isinstance(model, CausalLM)
        return FirstTokens(model, shared.group, shared.rows[0].start)

    def codes(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N] int64, on all ranks alike: a token, or what a `Sampled` has for unusable logits."""
        own = self._model.own_logits(hidden)
        values, tokens = own.max(1)
        tokens = (tokens + self._first_token).int()
        shown = torch.stack((values, tokens.view(torch.float32)), 1)
        every = ops.all_gather(shown, self._group).view(len(hidden), -1, 2)
        best, rank = every[:, :, 0].max(1)
        found = every[:, :, 1].gather(1, rank[:, None]).view(torch.int32)[:, 0].long()
        return found.masked_fill(~best.isfinite(), NON_FINITE_CODE)
