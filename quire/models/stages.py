# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: partition of a model's layers into stages, and removal of other stages' modules.

Invariant: a stage has the layers of its config, or else those of `partition`, which depends on the layers' costs and
caches and on `--pipeline-partition` alone; the caller that measures costs must give all ranks the same ones. The
tensors of other stages are those of the whole model without slots here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from math import inf, log

from torch import nn

from quire.config.speculative import MEDUSA
from quire.distributed.group import ALONE, Group
from quire.errors import ConfigError
from quire.layers.embedding import VocabEmbedding
from quire.layers.kv_cache import cache_users
from quire.models.base import CausalLM, UnsplitModel
from quire.models.decoder import Decoder, DecoderForCausalLM
from quire.models.encoder import EncoderModel, EncoderStack
from quire.models.gemma3n import Gemma3nDecoder, Gemma3nForCausalLM
from quire.models.gemma4 import Gemma4Decoder, Gemma4ForCausalLM
from quire.models.opt import OPTDecoder, OPTForCausalLM
from quire.models.rwkv7 import RWKV7Decoder, RWKV7ForCausalLM
from quire.models.stack import Stack
from quire.models.zamba2 import Zamba2Decoder, Zamba2ForCausalLM

OPTION = "--pipeline-parallel-size"
ALIKE = 1.05
"""Durations are rounded to powers of this: measurements repeat no more exactly."""
_UNITS = 1000
"""Resolution: the least duration is this many units. Sums of integers are the same in any order."""


def partition(
    model: CausalLM, stack: Stack, num_stages: int, costs: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the number of layers of each stage, from `--pipeline-partition` or balanced by cost.

    `stack` is the model's; neither has been split yet. Modules of the first or the last stage only count with its
    layer.
    Without `costs`, a layer costs the bytes that a step reads.

    Raises:
        ConfigError: the model cannot be split so; the message says why.
    """
    keep = [next(cache_users(layer), None) is not None for layer in stack.layers]
    asked, joined = model.config.parallel.stage_sizes, stack.joined()
    sizes = asked or balanced(bytes_read(model, stack) if costs is None else costs, num_stages, keep, joined)
    for stage, (first, end) in enumerate(pairwise([0, *accumulate(sizes)])):
        _check_beginning(first, joined)
        if not any(keep[first:end]):
            raise ConfigError(
                f"{OPTION}: no layer of stage {stage}, {first} to {end - 1}, keeps anything of a request; "
                "--pipeline-partition can give it others"
            )
    return sizes


def _check_beginning(first: int, joined: Collection[int]) -> None:
    if first in joined:
        latest = min(joined) - 1
        raise ConfigError(
            f"{OPTION}: a stage would begin with layer {first}, but the layers after {latest} must be in one stage, "
            f"since they share keys and values: the last stage begins with layer {latest} at the latest "
            "(--pipeline-partition)"
        )


def balanced(
    costs: Sequence[int], num_stages: int, keep: Sequence[bool] = (), joined: Collection[int] = ()
) -> tuple[int, ...]:
    """Return contiguous stage sizes, each at least one, that minimize the largest sum of costs.

    If possible, each stage has a layer with a cache (`keep`; by default all have one), and none begins with a layer
    that is `joined` to the one before it.
    """
    sums, kept = [0, *accumulate(costs)], [0, *accumulate(keep or [True] * len(costs))]

    def cost(first: int, end: int) -> float:
        return sums[end] - sums[first] if kept[first] < kept[end] and first not in joined else inf

    @cache
    def least(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return (largest sum, sizes) for the costs from `first` on."""
        if stages == 1:
            return cost(first, len(costs)), (len(costs) - first,)
        return min(
            (max(cost(first, end), most), (end - first, *counts))
            for end in range(first + 1, len(costs) - stages + 2)
            for most, counts in [least(end, stages - 1)]
        )

    return least(0, num_stages)[1]


def in_units(seconds: Sequence[float]) -> list[int]:
    """Return durations in units of the least, rounded so that noise does not decide."""
    least = min(seconds)
    return [round(_UNITS * ALIKE ** round(log(each / least, ALIKE))) for each in seconds]


def bytes_read(model: CausalLM, stack: Stack) -> list[int]:
    """Return the bytes that a step reads of each layer; modules of the first or last stage only count with its layer.

    Reading them takes most of a step's time. A lookup table counts almost nothing; experts count in full, although a
    step may read a few.
    """
    costs = [_num_bytes([layer]) for layer in stack.layers]
    entering = stack.end_modules(stack.entering)
    tables = [part for module in entering for part in module.modules() if isinstance(part, VocabEmbedding)]
    costs[0] += _num_bytes(entering) - _num_bytes(tables)
    costs[-1] += _num_bytes(stack.end_modules(stack.leaving)) + _num_bytes(model.modules_after_layers())
    return costs


def _num_bytes(modules: Iterable[nn.Module]) -> int:
    return sum(param.nbytes for module in modules for param in module.parameters())


@dataclass(frozen=True, slots=True)
class Stage:
    """One of several pipeline stages; `group` are the ranks with the same shard in each stage, in stage order.

    `sizes` are the layers of each stage; (): the partition of an unmeasured model.
    """

    index: int = 0
    of: int = 1
    group: Group = field(default=ALONE, compare=False)
    sizes: tuple[int, ...] = ()

    @staticmethod
    def of_group(group: Group) -> Stage:
        """Return the stage of this process in a group."""
        return Stage(group.rank, group.size, group)

    @staticmethod
    def with_layers(own: range, num_layers: int) -> Stage:
        """Return the stage with these layers, between neighbors with those before and after, if any."""
        before, behind = own.start, num_layers - own.stop
        sizes = (*([before] if before else []), len(own), *([behind] if behind else []))
        return Stage(int(before > 0), len(sizes), sizes=sizes)

    @property
    def is_first(self) -> bool:
        """True if it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if it has the head and samples."""
        return self.index == self.of - 1


ALL = Stage()


CUT: frozenset[type[nn.Module]] = frozenset(
    {
        DecoderForCausalLM,
        OPTForCausalLM,
        Gemma3nForCausalLM,
        RWKV7ForCausalLM,
        Zamba2ForCausalLM,
        EncoderModel,
        Decoder,
        OPTDecoder,
        Gemma3nDecoder,
        Gemma4Decoder,
        Gemma4ForCausalLM,
        RWKV7Decoder,
        Zamba2Decoder,
        EncoderStack,
    }
)
"""Models and decoders whose stages are known to compute what one process computes. A subclass counts as unknown: it may
pass on more from layer to layer.
"""


def apply_stage(model: CausalLM, stage: Stage) -> None:
    """Remove from a model without weights what other stages compute.

    Raises:
        ConfigError: the model cannot be split so; the message says why.
    """
    stack = stack_of(model)
    sizes = stage.sizes or partition(model, stack, stage.of)
    first = sum(sizes[: stage.index])
    names = model.checkpoint_slots().keys()
    model.uncut = UnsplitModel([*model.adapter_layers()], model.lm_head, stage.is_first)
    if not stage.is_last:
        model.drop_head()
    stack.apply_stage(range(first, first + sizes[stage.index]), _read_here_too(model, stage))
    model.other_stage_tensors = frozenset(names - model.checkpoint_slots().keys())


def _read_here_too(model: CausalLM, stage: Stage) -> list[nn.Module]:
    """Return the first stage's embedding if this stage needs a copy: as tied head, or for draft heads."""
    heads = None if model.config.draft is None else model.config.draft.arch.draft
    guesses = stage.is_last and heads is not None and heads.method != MEDUSA
    table = getattr(model.stack(), "embed_tokens", None) if guesses else None
    return [module for module in (model.lm_head, table) if module is not None]


def stack_of(model: CausalLM) -> Stack:
    """Return the layer stack that is split.

    Raises:
        ConfigError: the model does not support pipeline stages.
    """
    stack, body = model.stack(), model.base_model()
    if stack is None or not {type(body), type(stack)} <= CUT:
        raise ConfigError(
            f"{OPTION}: {type(body).__name__} does not support pipeline stages; "
            "--tensor-parallel-size may shard its layers"
        )
    return stack
