# SPDX-License-Identifier: Apache-2.0
"""Base class of causal language models: the interface to the worker and to the weight loader; and its construction.

Shapes: T tokens of the step (a flat batch, no batch dimension), N rows whose logits are wanted, E embedding size,
H hidden size, V vocabulary rows.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ModelLoadError
from quire.layers.base import Layer, Module, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.sliced_linear import SLICES
from quire.layers.slot import Slot
from quire.layers.step import StepContext
from quire.models.stack import Stack

T = TypeVar("T")


class UnsplitModel(NamedTuple):
    """Full model before it was split into pipeline stages; layers of other stages never get memory."""

    layers: list[tuple[list[str], list[str], Layer]]
    """Output of `CausalLM.adapter_layers`."""
    head: VocabEmbedding | None
    enters: bool = True
    """True if this stage embeds tokens."""


class CausalLM(Module):
    """Base of all models; the module tree has the checkpoint's names, except for merged and renamed layers.

    `merged` maps a merged layer's name to the checkpoint modules that it merges; `renamed` maps a part of a module's
    path to the checkpoint's, which may be empty; see `CheckpointNames`. Checkpoint tensors that match a pattern of
    `unused` are skipped. `base_prefix` is missing from the names in checkpoints that were saved without the output
    head.
    """

    merged: Mapping[str, tuple[str, ...]] = {}
    renamed: Mapping[str, str] = {}
    unused: tuple[str, ...] = ()
    base_prefix: str = "model."
    also_tables: tuple[str, ...] = ()
    """Other modules in whose place a checkpoint may store the token table, the best first; all hold the same."""
    folders: tuple[str, ...] = ()
    """Folders of the checkpoint with more tensors for this model, whose names begin with the folder and a slash."""

    lm_head: VocabEmbedding | None
    """None in a pooling model, and in all stages but the last."""
    other_stage_tensors: frozenset[str] = frozenset()
    """Checkpoint tensors of other pipeline stages."""
    uncut: UnsplitModel | None = None
    """None: the model is in one stage."""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        """Prepend `prefix`, including its dot, to the names of all layers and their caches."""
        super().__init__()
        self.config = config

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Compute hidden states [T, H] of the step's tokens, and update the cache.

        `inputs` are ids [T] int64, or rows [T, E] as the token embedding returns them. `positions` are [T], or [P, T]
        for a model with several per token.
        """
        raise NotImplementedError

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        """hidden [N, H] -> float32 logits [N, V + num_added]; adapter_rows, num_added: see `VocabEmbedding.logits`."""
        assert self.lm_head is not None, "a pooling model, or a stage before the last, has no logits"
        return self.lm_head.logits(hidden, adapter_rows, num_added)

    def base_model(self) -> CausalLM:
        """Return the model that computes the hidden states: this one, unless it wraps another."""
        return self

    def stack(self) -> Stack | None:
        """Return the layer stack that pipeline stages split; None: not supported."""
        return None

    @property
    def takes_media(self) -> bool:
        """True if rows can take embeddings of media in place of token embeddings."""
        stack = self.stack()
        return stack is not None and stack.takes_media

    def modules_after_layers(self) -> list[nn.Module]:
        """Return the last pipeline stage's modules after the stack."""
        return [] if self.lm_head is None else [self.lm_head]

    def drop_head(self) -> None:
        """Drop the modules after the layers, which another stage computes."""
        self.lm_head = None

    def shared_head(self) -> VocabEmbedding | None:
        """Return the output head if it is sharded over ranks and `own_logits` works; else None."""
        return None

    def own_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, its share of V]: the rank's columns of `compute_logits`."""
        raise NotImplementedError("this model has no shared head")

    def pool_head(self) -> Module | None:
        """Return the model's own head for pooled vectors, if any: float32 [N, H] and a step -> [N, size].

        The step has only the vectors' adapters.
        """
        return None

    def apply_heads(self, pooled: Tensor, task: str, adapter_rows: Tensor | None = None) -> Tensor:
        """Apply a pooling model's head for a task to vectors of texts or tokens: float32 [N, H] -> [N, size].

        adapter_rows [N] int32, as in a step.
        """
        raise NotImplementedError

    def loaded(self) -> None:
        """Check the model; called once, when all layers have their weights, on the device.

        Raises:
            UnsupportedModelError: the model cannot be served with these weights.
        """

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        """Yield each layer with parameters, with the names of the checkpoint modules that it holds."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield _module_names(path, self.renamed, self.merged), module

    def adapter_layers(self) -> Iterator[tuple[list[str], list[str], Layer]]:
        """Yield (transformers' module names, checkpoint module names, layer) for the same layers."""
        own = self.config.arch.names.adapters
        stored = {layer: names for names, layer in self.checkpoint_layers()}
        if own is None:
            yield from ((names, names, layer) for layer, names in stored.items())
            return
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield _module_names(path, own.renamed, own.merged), stored[module], module

    def checkpoint_slots(self) -> dict[str, list[Slot]]:
        """Return checkpoint tensor name -> slots of its parts, for all tensors that the model needs."""
        slots: dict[str, list[Slot]] = {}
        for names, layer in self.checkpoint_layers():
            for name, slot in layer.slots(names):
                slots.setdefault(name, []).append(slot)
        return slots

    def leaves_out(self, tensor_name: str) -> bool:
        """Return whether a checkpoint tensor is skipped on purpose.

        Some files store a tied head twice, and a pooling model has no head.
        """
        if tensor_name in self.other_stage_tensors:
            return True
        head, _, kind = tensor_name.rpartition(".")
        if head in self.also_tables and kind == "weight":
            return True
        is_tied = kind == "weight" and self.config.arch.tie_word_embeddings
        if head == self.renamed.get("lm_head", "lm_head") and (is_tied or self.config.pooling is not None):
            return True
        arch = self.config.arch
        unread = () if arch.quantization is None else arch.quantization.unread
        of_other_parts = () if arch.part_of is None else arch.part_of.unused
        return any(re.search(pattern, tensor_name) for pattern in (*self.unused, *unread, *of_other_parts))


def _module_names(path: str, renamed: Mapping[str, str], merged: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the checkpoint names of one of our modules; of a merged one all that it merges."""
    parts = path.partition(f".{SLICES}.")[0].split(".")
    paths = [parts[: end + 1] for end in range(len(parts))]
    *names, leaf = (_of_part(renamed, path, path[-1]) for path in paths)
    leaves = _of_part(merged, parts, (leaf,))
    return [".".join(filter(None, (*names, name))) for name in leaves]


def _of_part(table: Mapping[str, T], path: list[str], otherwise: T) -> T:
    """Return the entry for the last part of a path: the one for this place, or else the one for any place."""
    *before, parent, own = ("", "", *path)[-3:]
    for key in (f"{before[0]}.{parent}.{own}", f"{before[0]}.*.{own}", f"{parent}.{own}", own):
        if key in table:
            return table[key]
    return otherwise


def output_head(config: EngineConfig, embedding: VocabEmbedding, name: str) -> VocabEmbedding | None:
    """Return the token embedding itself if the two are tied, else another table of its size under that name.

    None for a pooling model.
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


logger = logging.getLogger(__name__)

_OLD_STYLE: dict[str, Callable[[EngineConfig], Any]] = {
    "config": lambda config: config.arch,
    "model_config": lambda config: config.model,
    "cache_config": lambda config: config.cache,
    "quant_config": lambda config: config.quantization,
    "scheduler_config": lambda config: config.scheduler,
    "parallel_config": lambda config: config.parallel,
    "lora_config": lambda config: config.lora if config.lora.enable_lora else None,
}
"""Old-style constructor parameter -> the part of the configuration that it gets."""


_REST = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def construct(model_cls: type[CausalLM], config: EngineConfig, prefix: str = "") -> CausalLM:
    """Return a model object, constructed by `(*, config: EngineConfig, prefix="")` or by old-style parameter names.

    An old-style constructor takes `ModelArch` as `config`, and is recognized by its other parameters, from
    `_OLD_STYLE`.
    Such a class calls `torch.nn.Module.__init__`, and its `config` is set afterwards.

    Raises:
        ModelLoadError: the constructor has other required parameters.
    """
    parameters = inspect.signature(model_cls).parameters
    named: dict[str, Any] = {"prefix": prefix} if "prefix" in parameters else {}
    beside = parameters.keys() & _OLD_STYLE.keys() - {"config"}
    if not beside:
        return model_cls(config=config, **named)
    needed = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in _REST}
    unknown = sorted(needed - _OLD_STYLE.keys() - {"prefix"})
    if unknown:
        raise ModelLoadError(
            f"{model_cls.__module__}:{model_cls.__qualname__} wants {', '.join(unknown)}; a model is made by "
            "(*, config: EngineConfig, prefix: str)"
        )
    logger.warning(
        "%s has an old-style constructor; give it (*, config: EngineConfig, prefix)", model_cls.__name__
    )
    given: dict[str, Any] = {name: _OLD_STYLE[name](config) for name in parameters if name in _OLD_STYLE}
    model: Any = model_cls(**given, **named)
    model.config = config
    return model
