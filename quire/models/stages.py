"""Pipeline parallelism: neighbouring layers of a model in a process of their own, and what goes from one to the next.

Invariant: which stage has a layer follows from the model's layers and `--pipeline-partition` alone, so all ranks agree
without a word; the checkpoint's tensors of other stages are those of the whole model that this one has no slots for.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from math import inf

from torch import nn

from quire.config.speculative import MEDUSA
from quire.distributed.group import ALONE, Group
from quire.errors import ConfigError
from quire.layers.embedding import VocabEmbedding
from quire.layers.kv_cache import cache_users
from quire.models.base import CausalLM, Uncut
from quire.models.decoder import Decoder, DecoderForCausalLM
from quire.models.encoder import Encoder, EncoderModel
from quire.models.gemma3n import Gemma3nDecoder, Gemma3nForCausalLM
from quire.models.opt import OPTDecoder, OPTForCausalLM
from quire.models.pooling.model import PoolingModel
from quire.models.rwkv7 import RWKV7Decoder, RWKV7ForCausalLM
from quire.models.stack import Stack
from quire.models.zamba2 import Zamba2Decoder, Zamba2ForCausalLM

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
        RWKV7Decoder,
        Zamba2Decoder,
        Encoder,
    }
)
"""Models, and what is under their heads, of which is known that stages make of them what one process makes. A subclass
is another one: it may hand on more from layer to layer."""


def take_stage(model: CausalLM, stage: Stage) -> None:
    """Leave of a model without weights what one stage computes.

    Raises:
        ConfigError: the model cannot be cut so; the message says why.
    """
    stack = _stack(model)
    keep = [next(cache_users(layer), None) is not None for layer in stack.layers]
    joined = stack.joined()
    counts = model.config.parallel.stage_sizes or balanced(_bytes_read(model, stack), stage.of, keep, joined)
    firsts = [0, *accumulate(counts)]
    _check_cut(firsts[1:-1], joined)
    first, end = list(pairwise(firsts))[stage.index]
    partition = ",".join(map(str, counts))
    logger.info(
        "stage %d of %d: layers %d to %d, as by --pipeline-partition %s",
        *(stage.index, stage.of, first, end - 1, partition),
    )
    names = model.checkpoint_slots().keys()
    model.uncut = Uncut([*model.adapter_layers()], model.lm_head, stage.is_first)
    if not stage.is_last:
        model.let_go_of_head()
    stack.take_stage(range(first, end), _read_here_too(model, stage))
    if next(cache_users(model), None) is None:
        raise ConfigError(
            f"{OPTION}: no layer of stage {stage.index}, {first} to {end - 1}, keeps anything of a request; "
            "--pipeline-partition can give it others"
        )
    model.elsewhere = frozenset(names - model.checkpoint_slots().keys())


def _read_here_too(model: CausalLM, stage: Stage) -> list[nn.Module]:
    """The first stage's table of tokens, if this one reads it, too: as the head, or where heads guess by it."""
    heads = None if model.config.draft is None else model.config.draft.arch.draft
    guesses = stage.is_last and heads is not None and heads.method != MEDUSA
    table = getattr(model.stack(), "embed_tokens", None) if guesses else None
    return [module for module in (model.lm_head, table) if module is not None]


def _stack(model: CausalLM) -> Stack:
    """Raises ConfigError: the model has no layers that can be cut apart."""
    stack, body = model.stack(), model.body if isinstance(model, PoolingModel) else model
    if stack is None or not {type(body), type(stack)} <= CUT:
        raise ConfigError(
            f"{OPTION}: what {type(body).__name__} hands from layer to layer is not known here, so it cannot be cut "
            "into stages; --tensor-parallel-size may share out its layers"
        )
    return stack


def _check_cut(firsts: Collection[int], joined: Collection[int]) -> None:
    for first in firsts:
        if first in joined:
            latest = min(joined) - 1
            raise ConfigError(
                f"{OPTION}: a stage would begin with layer {first}, but those behind {latest} are together, since they "
                f"read keys and values of each other: the last stage begins with layer {latest} at the latest "
                "(--pipeline-partition)"
            )


def balanced(
    costs: Sequence[int], num_stages: int, keep: Sequence[bool] = (), joined: Collection[int] = ()
) -> tuple[int, ...]:
    """How many neighbours each stage gets, at least one, so that the largest sum of costs is as small as can be.

    And, if it can be, at least one of those that `keep` says to keep something of a request; by default all do. If it
    can be, none begins with one that is `joined` to that before it.
    """
    sums, kept = [0, *accumulate(costs)], [0, *accumulate(keep or [True] * len(costs))]

    def cost(first: int, end: int) -> float:
        return sums[end] - sums[first] if kept[first] < kept[end] and first not in joined else inf

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


def _bytes_read(model: CausalLM, stack: Stack) -> list[int]:
    """What a step reads of each layer's parameters; what only the first or the last stage has counts with its layer.

    Reading them takes most of a step's time. Of a table in which tokens are looked up a step reads next to nothing.
    """
    costs = [_num_bytes([layer]) for layer in stack.layers]
    entering = stack.end_modules(stack.entering)
    tables = [part for module in entering for part in module.modules() if isinstance(part, VocabEmbedding)]
    costs[0] += _num_bytes(entering) - _num_bytes(tables)
    costs[-1] += _num_bytes(stack.end_modules(stack.leaving)) + _num_bytes(model.behind_layers())
    return costs


def _num_bytes(modules: Iterable[nn.Module]) -> int:
    return sum(param.nbytes for module in modules for param in module.parameters())
