"""What every causal language model offers to the worker and to the weight loader.

Shapes: T tokens of the step (a flat batch, no batch dimension), N rows whose logits are wanted, E embedding size,
H hidden size, V vocabulary rows.
"""

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Layer, Module, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.slot import Slot
from quire.layers.step import StepContext


class CausalLM(Module):
    """Base of all models; the module tree bears the checkpoint's names, but for merged layers.

    `merged` maps a merged layer's own name to those of the checkpoint's modules it stands for. Checkpoint tensors that
    match a pattern of `unused` are knowingly left out. `base_prefix` is missing from the names in checkpoints that were
    saved without the output head.
    """

    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    unused: ClassVar[tuple[str, ...]] = ()
    base_prefix: ClassVar[str] = "model."

    lm_head: VocabEmbedding

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

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 logits [N, V]."""
        return self.lm_head.logits(hidden)

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        """Each layer with parameters, under the names of the checkpoint's modules that it holds."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                parent, dot, leaf = path.rpartition(".")
                yield [f"{parent}{dot}{name}" for name in self.merged.get(leaf, (leaf,))], module

    def checkpoint_slots(self) -> dict[str, list[Slot]]:
        """Name of each checkpoint tensor that the model needs -> where its parts go."""
        slots: dict[str, list[Slot]] = {}
        for names, layer in self.checkpoint_layers():
            for name, slot in layer.slots(names):
                slots.setdefault(name, []).append(slot)
        return slots

    def leaves_out(self, tensor_name: str) -> bool:
        """Whether a checkpoint tensor is knowingly not used; a tied head is stored twice in some files."""
        if tensor_name == "lm_head.weight" and self.config.arch.tie_word_embeddings:
            return True
        return any(re.search(pattern, tensor_name) for pattern in self.unused)


def output_head(config: EngineConfig, embedding: VocabEmbedding, name: str) -> VocabEmbedding:
    """The token embedding itself where the two are tied, else another table of its size and of that name."""
    if config.arch.tie_word_embeddings:
        return embedding
    vocab_size, size = embedding.shape
    return VocabEmbedding(
        vocab_size=vocab_size, size=size, dtype=model_dtype(config), is_head=True, name=name
    )
