# SPDX-License-Identifier: Apache-2.0
"""Pooling specification of a model, resolved at startup and read by front end and worker.

Invariant: torch-free data. The front end validates requests against it, and the worker builds its pooler from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import ValidationError
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, PoolingParams

POOLINGS = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len", "all", "step")
"""Pooling types: first token, last token, means (plain, weighted by position, over the root of the length), maximum;
no pooling ("all"; "step": tokens that end a step).
"""

TOKEN_TASKS = (TOKEN_EMBED, TOKEN_CLASSIFY)
CLASS_TASKS = (CLASSIFY, TOKEN_CLASSIFY)


@dataclass(frozen=True)
class HeadLayer:
    """Linear layer behind a model, with its activation.

    Attributes:
        name: the checkpoint's module; one in a subfolder is prefixed with that and a slash.
        activation: a key of `quire.pooling.pooler.ACTIVATIONS`.
        rows: outputs that are computed, in this order; empty: all.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"
    rows: tuple[int, ...] = ()
    num_stored: int = 0  # Outputs of the checkpoint's module, a superset of `rows`.

    @property
    def folder(self) -> str:
        """Checkpoint folder of its tensors; empty: the model's own files."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class PoolingSpec:
    """Pooling of one model.

    Attributes:
        tasks: of `POOLING_TASKS`; the first is the default.
        pooling: of `POOLINGS`; several with + between if their vectors are concatenated; for token weights "max" or
        "sum".
        size: numbers per embedding, or classes.
        labels: names of the classes, if any.
        activation: default activation after the head: "none", "normalize", "softmax", "sigmoid"; for token weights
            "log1p_relu" or "log1p_log1p_relu".
        matryoshka: sizes to which an embedding may be truncated; empty: none; (0,): any.
        prompts: name -> text put before an input ("query", "document" ...).
        default_prompt: name of the prompt for inputs that name none.
        similarity: comparison of two embeddings: "cosine", "dot", "euclidean" or "manhattan"; of token embeddings
            "maxsim" or "meanmaxsim" ("maxsim" for any other value).
        skipped_words: document tokens that no query token is matched with.
        side_lengths: tokens to which a query, and a document, is truncated before comparison.
        step_token_id: token that ends a step, for step rewards.
        returned_token_ids: classes that are returned, for step rewards; empty: all.
        head: layers between pooled vectors (or all tokens') and the activation, beside the model's own.
        include_prompt: whether the tokens of those prompts are pooled, too.
        head_of_adapters: whether the checkpoint has no head, and adapters bring one.
        weighs_vocabulary: whether an embedding has a number per token id: the maximum or the sum of the model's logits
            over all tokens of a text. Such a model computes texts whole.
        template_options: options of the chat template that formats a prompt of two texts; None: there is none.
        own_heads: task -> its own head (token weights and token vectors of BGE-M3).
    """

    tasks: tuple[str, ...]
    pooling: str
    size: int
    labels: tuple[str, ...] = ()
    activation: str = "none"
    matryoshka: tuple[int, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    include_prompt: bool = True
    similarity: str = "cosine"
    skipped_words: tuple[str, ...] = ()
    side_lengths: tuple[int | None, int | None] = (None, None)
    step_token_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    head: tuple[HeadLayer, ...] = ()
    own_heads: tuple[tuple[str, tuple[HeadLayer, ...]], ...] = ()
    head_of_adapters: bool = False
    weighs_vocabulary: bool = False
    template_options: tuple[tuple[str, Any], ...] | None = None

    @property
    def poolings(self) -> tuple[str, ...]:
        """Types of `POOLINGS`, more than one if vectors are concatenated."""
        return tuple(self.pooling.split("+"))

    def head_of(self, task: str) -> tuple[HeadLayer, ...]:
        """Return the head layers of a task."""
        return dict(self.own_heads).get(task, self.head)

    def size_of(self, task: str) -> int:
        """Return the numbers per text, or per token, of a task."""
        return self.head_of(task)[-1].outputs if task in dict(self.own_heads) else self.size

    def num_numbers(self, params: PoolingParams, token_ids: list[int]) -> int:
        """Return the total of numbers for a prompt."""
        size = len(params.returned_token_ids or self.returned_token_ids) or params.dimensions
        each = size or self.size_of(self.task_of(params))
        if self.task_of(params) not in TOKEN_TASKS:
            return each
        tag = self.step_token_id if params.step_tag_id is None else params.step_tag_id
        is_of_steps = self.pooling == "step" and tag is not None
        return each * (token_ids.count(tag) if is_of_steps and tag is not None else len(token_ids))

    @property
    def is_cross_encoder(self) -> bool:
        """True if it scores how well two texts, read as one, match."""
        return CLASSIFY in self.tasks and self.size == 1

    @property
    def task_of_words(self) -> str | None:
        """Task that returns token weights, of a text's tokens or of the vocabulary; None: there is none."""
        if self.weighs_vocabulary:
            return EMBED
        weighs = TOKEN_CLASSIFY in dict(self.own_heads) and self.size_of(TOKEN_CLASSIFY) == 1
        return TOKEN_CLASSIFY if weighs else None

    def task_of(self, params: PoolingParams) -> str:
        """Return a request's task."""
        return params.task or self.tasks[0]

    def reads_every_token(self, params: PoolingParams) -> bool:
        """Return whether the hidden states of all tokens are needed, so that no cached prefix can be used."""
        return self.pooling != "last" or self.task_of(params) in TOKEN_TASKS

    @property
    def always_reads_every_token(self) -> bool:
        """True if that holds for every task."""
        return all(self.reads_every_token(PoolingParams(task=task)) for task in self.tasks)

    def activation_of(self, params: PoolingParams) -> str:
        """Return the activation for a request; an explicit request gets one even if the model has no default."""
        if params.use_activation is False:
            return "none"
        if self.task_of(params) in CLASS_TASKS and self.tasks[0] not in CLASS_TASKS:
            return "none"  # token weights, whose head has its own activation
        if params.use_activation is None or self.activation != "none":
            return self.activation
        if self.task_of(params) not in CLASS_TASKS:
            return "normalize"
        return "sigmoid" if self.size == 1 else "softmax"

    def check(self, params: PoolingParams) -> None:
        """Reject parameters that this model does not support.

        Raises:
            ValidationError: `param` names the field.
        """
        task = self.task_of(params)
        if task not in self.tasks:
            raise ValidationError(
                f"task is {task}, but this model is served for {', '.join(self.tasks)}", param="task"
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, task)
        chosen = params.returned_token_ids
        if chosen and task not in CLASS_TASKS:
            raise ValidationError(
                f"returned_token_ids chooses among classes, and the task is {task}",
                param="returned_token_ids",
            )
        if chosen and max(chosen) >= self.size_of(task):
            raise ValidationError(
                f"returned_token_ids has {max(chosen)}, but the model gives {self.size_of(task)} numbers",
                param="returned_token_ids",
            )
        if params.step_tag_id is not None and self.pooling != "step":
            raise ValidationError(
                "step_tag_id is for step reward models, and this is none", param="step_tag_id"
            )

    def _check_dimensions(self, dimensions: int, task: str) -> None:
        if task in CLASS_TASKS:
            raise ValidationError(f"dimensions are of embeddings, and the task is {task}", param="dimensions")
        if self.matryoshka == (0,):
            is_allowed, allowed = dimensions <= self.size, f"1 to {self.size} numbers"
        else:
            sizes = sorted({*self.matryoshka, self.size})
            is_allowed, allowed = dimensions in sizes, f"{', '.join(map(str, sizes))} numbers, no others"
        if not is_allowed:
            raise ValidationError(
                f"dimensions is {dimensions}, but this model's embeddings can have {allowed}",
                param="dimensions",
            )
