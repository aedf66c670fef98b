"""What a model that does not generate makes of its prompts: settled once at start, and read by both processes.

Invariant: torch-free data. Whoever serves requests checks them against it, and the worker's pooler is built from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import ValidationError
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, PoolingParams

POOLINGS = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len", "all", "step")
"""How a text's tokens become one vector: the first token's, the last one's, means (plain, by position, over the root of
the length), the greatest of each number; or they do not ("all"; "step": those at a token that ends a step)."""

TOKEN_TASKS = (TOKEN_EMBED, TOKEN_CLASSIFY)
CLASS_TASKS = (CLASSIFY, TOKEN_CLASSIFY)


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer behind a model, and what follows it.

    Attributes:
        name: the checkpoint's module; one in a folder of its own has that before it, with a slash.
        activation: a key of `quire.layers.pooling_head.ACTIVATIONS`.
        rows: those of the module's outputs that are computed, in this order; empty: all.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"
    rows: tuple[int, ...] = ()
    num_stored: int = 0
    """Outputs of the checkpoint's module, of which there are `rows`."""

    @property
    def folder(self) -> str:
        """The folder of the checkpoint in which its tensors are; empty: they are with the model's own."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class PoolingSpec:
    """Of one model.

    Attributes:
        tasks: of `POOLING_TASKS`, what it is made for first.
        pooling: of `POOLINGS`; several ways of making one vector, with + between, if their vectors are joined; of words
            "max" or "sum".
        size: numbers per embedding, or classes.
        labels: names of the classes, if it has classes.
        activation: what follows the head by default: "none", "normalize", "softmax", "sigmoid"; of words "log1p_relu"
            or "log1p_log1p_relu".
        matryoshka: sizes to which an embedding may be cut; empty: it may not be; (0,): to any.
        prompts: name -> text put before an input ("query", "document" ...).
        default_prompt: the name of the one that is put before inputs that name none.
        similarity: how two embeddings are compared: "cosine", "dot", "euclidean" or "manhattan"; those of tokens
            "maxsim" or "meanmaxsim", and as "maxsim" if anything else is said.
        skipped_words: tokens of documents with which no token of a query is matched.
        side_lengths: tokens to which a query, and a document, is cut before they are compared.
        step_token_id: the token that ends a step, for rewards of steps.
        returned_token_ids: the classes that are given out, for rewards of steps; empty: all.
        head: what comes between pooled vectors (or all tokens') and the activation, beside what the model has itself.
        include_prompt: whether vectors are made of the tokens of those prompts, too.
        head_of_adapters: whether the checkpoint has no head, and adapters bring one.
        weighs_vocabulary: whether an embedding has a number for each token id: the greatest that the model's head gives
            it over all tokens of a text, or the sum. Such a model computes texts whole.
        template_options: what the chat template of the model is told that makes a prompt of two texts; None: none does.
        own_heads: task -> what comes there for it instead (the words' weights and the vectors of tokens of BGE-M3).
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
        """Of `POOLINGS`, more than one if vectors are joined."""
        return tuple(self.pooling.split("+"))

    def head_of(self, task: str) -> tuple[HeadLayer, ...]:
        """The layers behind what is pooled for a task."""
        return dict(self.own_heads).get(task, self.head)

    def size_of(self, task: str) -> int:
        """Numbers for each text, or token, of a task."""
        return self.head_of(task)[-1].outputs if task in dict(self.own_heads) else self.size

    def num_numbers(self, params: PoolingParams, token_ids: list[int]) -> int:
        """How many a prompt makes."""
        size = len(params.returned_token_ids or self.returned_token_ids) or params.dimensions
        each = size or self.size_of(self.task_of(params))
        if self.task_of(params) not in TOKEN_TASKS:
            return each
        tag = self.step_token_id if params.step_tag_id is None else params.step_tag_id
        is_of_steps = self.pooling == "step" and tag is not None
        return each * (token_ids.count(tag) if is_of_steps and tag is not None else len(token_ids))

    @property
    def is_cross_encoder(self) -> bool:
        """Whether it says of two texts, read as one, how well they go together."""
        return CLASSIFY in self.tasks and self.size == 1

    @property
    def task_of_words(self) -> str | None:
        """The task that gives weights of words: of those of a text's tokens, or of all; None: there is none."""
        if self.weighs_vocabulary:
            return EMBED
        weighs = TOKEN_CLASSIFY in dict(self.own_heads) and self.size_of(TOKEN_CLASSIFY) == 1
        return TOKEN_CLASSIFY if weighs else None

    def task_of(self, params: PoolingParams) -> str:
        """What a request wants."""
        return params.task or self.tasks[0]

    def reads_every_token(self, params: PoolingParams) -> bool:
        """Whether the hidden states of all tokens must be seen, so that none may come out of the cache."""
        return self.pooling != "last" or self.task_of(params) in TOKEN_TASKS

    @property
    def always_reads_every_token(self) -> bool:
        """Whether that is so whatever a request wants."""
        return all(self.reads_every_token(PoolingParams(task=task)) for task in self.tasks)

    def activation_of(self, params: PoolingParams) -> str:
        """What is applied to a request's numbers; one that asks for a function gets one where the model has none."""
        if params.use_activation is False:
            return "none"
        if self.task_of(params) in CLASS_TASKS and self.tasks[0] not in CLASS_TASKS:
            return "none"  # words' weights, whose head ends in its own function
        if params.use_activation is None or self.activation != "none":
            return self.activation
        if self.task_of(params) not in CLASS_TASKS:
            return "normalize"
        return "sigmoid" if self.size == 1 else "softmax"

    def check(self, params: PoolingParams) -> None:
        """Refuse what this model cannot do.

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
                "step_tag_id is for models that reward each step, which this one does not",
                param="step_tag_id",
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
