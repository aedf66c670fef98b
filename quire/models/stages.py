"""Pipeline parallelism: neighbouring layers of a model in a process of their own, and what goes from one to the next.

Invariant: a stage has the layers that it is told, or else those of `partition`; the checkpoint's tensors of other
stages are those of the whole model that this one has no slots for.
"""

from dataclasses import dataclass, field

from torch import nn

from quire.config.speculative import MEDUSA
from quire.distributed.group import ALONE, Group
from quire.errors import ConfigError
from quire.models.base import CausalLM, Uncut
from quire.models.decoder import Decoder, DecoderForCausalLM
from quire.models.encoder import Encoder, EncoderModel
from quire.models.gemma3n import Gemma3nDecoder, Gemma3nForCausalLM
from quire.models.opt import OPTDecoder, OPTForCausalLM
from quire.models.partition import OPTION, partition
from quire.models.pooling.model import PoolingModel
from quire.models.rwkv7 import RWKV7Decoder, RWKV7ForCausalLM
from quire.models.stack import Stack
from quire.models.zamba2 import Zamba2Decoder, Zamba2ForCausalLM


@dataclass(frozen=True, slots=True)
class Stage:
    """One of several in a row; `group` are the ranks that have the same share of each, by their stages.

    `sizes` are the layers of each; (): as each model is cut that is not measured.
    """

    index: int = 0
    of: int = 1
    group: Group = field(default=ALONE, compare=False)
    sizes: tuple[int, ...] = ()

    @staticmethod
    def of_group(group: Group) -> "Stage":
        """That of a rank of a group."""
        return Stage(group.rank, group.size, group)

    @staticmethod
    def with_layers(own: range, num_layers: int) -> "Stage":
        """That of some layers of a model, between one with those before and one with those behind, if there are any."""
        before, behind = own.start, num_layers - own.stop
        sizes = (*([before] if before else []), len(own), *([behind] if behind else []))
        return Stage(int(before > 0), len(sizes), sizes=sizes)

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
    stack = stack_of(model)
    sizes = stage.sizes or partition(model, stack, stage.of)
    first = sum(sizes[: stage.index])
    names = model.checkpoint_slots().keys()
    model.uncut = Uncut([*model.adapter_layers()], model.lm_head, stage.is_first)
    if not stage.is_last:
        model.let_go_of_head()
    stack.take_stage(range(first, first + sizes[stage.index]), _read_here_too(model, stage))
    model.elsewhere = frozenset(names - model.checkpoint_slots().keys())


def _read_here_too(model: CausalLM, stage: Stage) -> list[nn.Module]:
    """The first stage's table of tokens, if this one reads it, too: as the head, or where heads guess by it."""
    heads = None if model.config.draft is None else model.config.draft.arch.draft
    guesses = stage.is_last and heads is not None and heads.method != MEDUSA
    table = getattr(model.stack(), "embed_tokens", None) if guesses else None
    return [module for module in (model.lm_head, table) if module is not None]


def stack_of(model: CausalLM) -> Stack:
    """What is cut of a model.

    Raises:
        ConfigError: the model has no layers that can be cut apart.
    """
    stack, body = model.stack(), model.body if isinstance(model, PoolingModel) else model
    if stack is None or not {type(body), type(stack)} <= CUT:
        raise ConfigError(
            f"{OPTION}: what {type(body).__name__} hands from layer to layer is not known here, so it cannot be cut "
            "into stages; --tensor-parallel-size may share out its layers"
        )
    return stack
