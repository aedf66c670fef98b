"""What a model that does not generate makes of its prompts: settled once at start, and read by both processes.

Invariant: torch-free data. Whoever serves requests checks them against it, and the worker's pooler is built from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.pooling_params import CLASSIFY

POOLINGS = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len", "all", "step")
"""How a text's tokens become one vector: the first token's, the last one's, means (plain, by position, over the root of
the length), the greatest of each number; or they do not ("all"; "step": those at a token that ends a step)."""


@dataclass(frozen=True)
class PoolingSpec:
    """Of one model.

    Attributes:
        tasks: of `POOLING_TASKS`, what it is made for first.
        pooling: of `POOLINGS`.
        size: numbers per embedding, or classes.
        labels: names of the classes, if it has classes.
        activation: what follows the head by default: "none", "normalize", "softmax" or "sigmoid".
        matryoshka: sizes to which an embedding may be cut; empty: it may not be; (0,): to any.
        prompts: name -> text put before an input ("query", "document" ...).
        default_prompt: the name of the one that is put before inputs that name none.
        similarity: how two embeddings are compared: "cosine", "dot", "euclidean" or "manhattan".
        step_token_id: the token that ends a step, for rewards of steps.
    """

    tasks: tuple[str, ...]
    pooling: str
    size: int
    labels: tuple[str, ...] = ()
    activation: str = "none"
    matryoshka: tuple[int, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    similarity: str = "cosine"
    step_token_id: int | None = None

    @property
    def is_cross_encoder(self) -> bool:
        """Whether it says of two texts, read as one, how well they go together."""
        return CLASSIFY in self.tasks and self.size == 1
