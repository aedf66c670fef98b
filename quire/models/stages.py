"""Pipeline parallelism: neighbouring layers of a model in a process of their own, and what goes from one to the next.

Invariant: which stage has a layer follows from the model's layers and `--pipeline-partition` alone, so all ranks agree
without a word; the checkpoint's tensors of other stages are those of the whole model that this one has no slots for.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from math import inf

from torch import Tensor

from quire.distributed.group import ALONE, Group
from quire.errors import ConfigError
from quire.layers.base import Module
from quire.layers.kv_cache import cache_users
from quire.layers.step import StepContext
from quire.models.base import CausalLM, Uncut
from quire.models.decoder import DecoderForCausalLM

logger = logging.getLogger(__name__)

OPTION = "--pipeline-parallel-size"


@dataclass(frozen=True, slots=True)
class Stage:
    """One of several in a row; `group` are the ranks that have the same share of each, by their stages."""

    index: int = 0
    of: int = 1
    group: Group = field(default=ALONE, compare=False)

    @staticmethod
    def of_group(group: Group) -> "Stage":
        """That of a rank of a group."""
        return Stage(group.rank, group.size, group)

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head, and samples."""
        return self.index == self.of - 1


ALL = Stage()


class Elsewhere(Module):
    """In the place of a layer that another stage has: what comes goes on."""

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        return x, residual


def take_stage(model: CausalLM, stage: Stage) -> None:
    """Leave of a model without weights what one stage computes.

    Raises:
        ConfigError: the model cannot be cut so; the message says why.
    """
    # A subclass of one that hands on one stream may hand on more.
    if type(model) is not DecoderForCausalLM or model.config.arch.skips:
        raise ConfigError(
            f"{OPTION}: {type(model).__name__} hands more than one stream from layer to layer, and cannot be cut into "
            "stages; --tensor-parallel-size may share out its layers"
        )
    keep = [next(cache_users(layer), None) is not None for layer in model.model.layers]
    counts = model.config.parallel.stage_sizes or balanced(_layer_bytes(model), stage.of, keep)
    first, end = list(pairwise([0, *accumulate(counts)]))[stage.index]
    logger.info("stage %d of %d: layers %d to %d of %d", stage.index, stage.of, first, end - 1, sum(counts))
    names = model.checkpoint_slots().keys()
    model.uncut = Uncut([*model.adapter_layers()], model.lm_head, stage.is_first)
    for number, _ in enumerate(model.model.layers):
        if not first <= number < end:
            model.model.layers[number] = Elsewhere()
    if next(cache_users(model), None) is None:
        raise ConfigError(
            f"{OPTION}: no layer of stage {stage.index}, {first} to {end - 1}, keeps anything of a request; "
            "--pipeline-partition can give it others"
        )
    model.take_ends(enters=stage.is_first, ends=stage.is_last)
    model.elsewhere = frozenset(names - model.checkpoint_slots().keys())


def balanced(costs: Sequence[int], num_stages: int, keep: Sequence[bool] = ()) -> tuple[int, ...]:
    """How many neighbours each stage gets, at least one, so that the largest sum of costs is as small as can be.

    And, if it can be, at least one of those that `keep` says to keep something of a request; by default all do.
    """
    sums, kept = [0, *accumulate(costs)], [0, *accumulate(keep or [True] * len(costs))]

    def cost(first: int, end: int) -> float:
        return sums[end] - sums[first] if kept[first] < kept[end] else inf

    @cache
    def least(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Of the costs from `first` on: the largest sum, and the counts."""
        if stages == 1:
            return cost(first, len(costs)), (len(costs) - first,)
        return min(
            (max(cost(first, end), most), (end - first, *counts))
            for end in range(first + 1, len(costs) - stages + 2)
            for most, counts in [least(end, stages - 1)]
        )

    return least(0, num_stages)[1]


def _layer_bytes(model: DecoderForCausalLM) -> list[int]:
    """Of each layer's parameters; what only the first or the last stage has counts with its layer."""
    decoder = model.model
    costs = [_num_bytes(layer) for layer in decoder.layers]
    costs[0] += sum(map(_num_bytes, (decoder.embed_tokens, decoder.embed_positions, decoder.embed_norm)))
    costs[-1] += sum(map(_num_bytes, (decoder.norm, model.lm_head)))
    return costs


def _num_bytes(module: Module | None) -> int:
    return 0 if module is None else sum(param.nbytes for param in module.parameters())
