"""What every causal language model offers to the worker and to the weight loader.

Shapes: T tokens of the step (a flat batch, no batch dimension), N rows whose logits are wanted, E embedding size,
H hidden size, V vocabulary rows.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Layer, Module, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.sliced_linear import SLICES
from quire.layers.slot import Slot
from quire.layers.step import StepContext
from quire.models.stack import Stack

T = TypeVar("T")


class Uncut(NamedTuple):
    """A model as it was before it was cut into pipeline stages; layers of other stages never have memory."""

    layers: list[tuple[list[str], list[str], Layer]]
    """As `CausalLM.adapter_layers` gave them."""
    head: VocabEmbedding | None
    enters: bool = True
    """Whether this stage looks tokens up."""


class CausalLM(Module):
    """Base of all models; the module tree bears the checkpoint's names, but for merged and renamed layers.

    `merged` maps a merged layer's own name to those of the checkpoint's modules it stands for; `renamed` a part of a
    module's path to what the checkpoint has there, which may be nothing; see `CheckpointNames`. Checkpoint tensors
    that match a pattern of `unused` are knowingly left out. `base_prefix` is missing from the names in checkpoints that
    were saved without the output head.
    """

    merged: Mapping[str, tuple[str, ...]] = {}
    renamed: Mapping[str, str] = {}
    unused: tuple[str, ...] = ()
    base_prefix: str = "model."
    folders: tuple[str, ...] = ()
    """Of the checkpoint, in which it has more tensors for this model; their names begin with the folder and a slash."""

    lm_head: VocabEmbedding | None
    """None where the model is pooled, and in a stage before the last."""
    elsewhere: frozenset[str] = frozenset()
    """Checkpoint tensors that other pipeline stages have."""
    uncut: Uncut | None = None
    """None: the model is in one stage."""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        """`prefix`, with its dot, goes before the names of all layers and their caches."""
        super().__init__()
        self.config = config

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """The step's tokens -> hidden states [T, H]; what layers keep of them is in the cache afterwards.

        `inputs` are ids [T] int64, or rows [T, E] as the token embedding gives them. `positions` are [T], or [P, T] to
        a model whose tokens have several.
        """
        raise NotImplementedError

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        """hidden [N, H] -> float32 logits [N, V + num_added]; adapter_rows, num_added: see `VocabEmbedding.logits`."""
        assert self.lm_head is not None, "a model that is pooled, or a stage before the last, has no logits"
        return self.lm_head.logits(hidden, adapter_rows, num_added)

    def stack(self) -> Stack | None:
        """What pipeline stages share out; None: it is not made so."""
        return None

    def behind_layers(self) -> list[nn.Module]:
        """What the last pipeline stage has beside its part of the stack."""
        return [] if self.lm_head is None else [self.lm_head]

    def let_go_of_head(self) -> None:
        """Be a stage before the last: what stands behind the layers is in another process."""
        self.lm_head = None

    def shared_head(self) -> VocabEmbedding | None:
        """The output head, if ranks have its tokens apart and `own_logits` says what each makes; else None."""
        return None

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, its share of V]: what `compute_logits` has of this rank's tokens."""
        raise NotImplementedError("this model has no shared head")

    def pool_head(self) -> Module | None:
        """What the model itself has behind pooled vectors, if anything: float32 [N, H] and a step -> [N, size].

        Of that step there is no more than the adapters of the vectors.
        """
        return None

    def apply_heads(self, pooled: Tensor, task: str, adapter_rows: Tensor | None = None) -> Tensor:
        """Of a model that is pooled, for a task: vectors of texts, or of tokens, float32 [N, H] -> [N, size].

        adapter_rows [N] int32, as in a step: whose they are.
        """
        raise NotImplementedError

    def loaded(self) -> None:
        """Called once, when all layers have their weights, on the device.

        Raises:
            UnsupportedModelError: with these weights the model cannot be served.
        """

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        """Each layer with parameters, under the names of the checkpoint's modules that it holds."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield _module_names(path, self.renamed, self.merged), module

    def adapter_layers(self) -> Iterator[tuple[list[str], list[str], Layer]]:
        """The same layers: the names that transformers has for such modules, those of the checkpoint, and the layer."""
        own = self.config.arch.names.adapters
        stored = {layer: names for names, layer in self.checkpoint_layers()}
        if own is None:
            yield from ((names, names, layer) for layer, names in stored.items())
            return
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield _module_names(path, own.renamed, own.merged), stored[module], module

    def checkpoint_slots(self) -> dict[str, list[Slot]]:
        """Name of each checkpoint tensor that the model needs -> where its parts go."""
        slots: dict[str, list[Slot]] = {}
        for names, layer in self.checkpoint_layers():
            for name, slot in layer.slots(names):
                slots.setdefault(name, []).append(slot)
        return slots

    def leaves_out(self, tensor_name: str) -> bool:
        """Whether a checkpoint tensor is knowingly not used.

        A tied head is stored twice in some files, and a model that is pooled has none.
        """
        if tensor_name in self.elsewhere:
            return True
        head, _, kind = tensor_name.rpartition(".")
        is_tied = kind == "weight" and self.config.arch.tie_word_embeddings
        if head == self.renamed.get("lm_head", "lm_head") and (is_tied or self.config.pooling is not None):
            return True
        arch = self.config.arch
        unread = () if arch.quantization is None else arch.quantization.unread
        of_other_parts = () if arch.part_of is None else arch.part_of.unused
        return any(re.search(pattern, tensor_name) for pattern in (*self.unused, *unread, *of_other_parts))


def _module_names(path: str, renamed: Mapping[str, str], merged: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Of a module of ours; of a merged one those that it stands for."""
    parts = path.partition(f".{SLICES}.")[0].split(".")
    paths = [parts[: end + 1] for end in range(len(parts))]
    *names, leaf = (_of_part(renamed, path, path[-1]) for path in paths)
    leaves = _of_part(merged, parts, (leaf,))
    return [".".join(filter(None, (*names, name))) for name in leaves]


def _of_part(table: Mapping[str, T], path: list[str], otherwise: T) -> T:
    """What is said of the last part of a path: of it at this place, or else of it anywhere."""
    *before, parent, own = ("", "", *path)[-3:]
    for key in (f"{before[0]}.{parent}.{own}", f"{before[0]}.*.{own}", f"{parent}.{own}", own):
        if key in table:
            return table[key]
    return otherwise


def output_head(config: EngineConfig, embedding: VocabEmbedding, name: str) -> VocabEmbedding | None:
    """The token embedding itself where the two are tied, else another table of its size and of that name.

    None where the model is pooled.
    """
    arch = config.arch
    if config.pooling is not None:
        return None
    if arch.tie_word_embeddings:
        return embedding
    vocab_size, size = embedding.shape
    return VocabEmbedding(
        vocab_size=vocab_size,
        size=size,
        dtype=model_dtype(config),
        is_head=True,
        bias=arch.head_bias,
        unit_rows=arch.head_of_unit_rows,
        name=name,
    )
