# SPDX-License-Identifier: Apache-2.0
"""Execution of pooling requests: tokenization, engine requests, windows, and the reply's common fields.

Invariant: all prompts of a request are tokenized off the event loop, and its numbers are counted, before the first
prompt is submitted. The client is watched from before that to the end; if it disconnects, remaining work is dropped or
aborted. All inputs of a request, also if split into windows, form one list of engine requests.
Lexical weights: BGE-M3 weighs a text's tokens (Chen et al., 2024, arXiv:2402.03216) without the special ones, SPLADE
all tokens of the vocabulary. Each token counts once, with its largest weight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray
from starlette.requests import Request

from quire.adapters import adapter_terms
from quire.config.pooling import PoolingSpec
from quire.engine.prompt_forms import TokenizedPrompt, parts_of
from quire.engine.tokenizer import beside_loop
from quire.entrypoints.openai.errors import own_id_of
from quire.entrypoints.openai.generation import NO_MEDIA, media_details, timings_of
from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.entrypoints.openai.protocol.responses import PromptTokensDetails
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import apply_request_settings, tenant_of
from quire.errors import DeadlineError, ValidationError
from quire.outputs import RequestStateStats, joined_stats
from quire.pooling.inputs import PoolingInputs
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling.server.protocol import (
    MAX_INPUTS,
    PoolingFields,
    PromptUsage,
    TaskFields,
    check_numbers,
)
from quire.pooling.server.scoring import TextWindows, is_normalized
from quire.pooling_params import PoolingParams, TextOptions

Pooled = PoolingRequestOutput[PoolingOutput]

Inputs = Sequence[str | list[int]]
Prepare = Callable[[], Awaitable[list[TokenizedPrompt]]]


@dataclass(frozen=True)
class PoolingJob:
    """One HTTP request to a pooling model, with the answer's id and model name."""

    server: ServerState
    request: Request
    body: EngineRequest
    id: str
    model: str

    @classmethod
    def of(cls, request: Request, body: EngineRequest, prefix: str) -> PoolingJob:
        """Check the model's name, and apply headers and key to the request.

        Raises:
            NotFoundError: the model is not served; ValidationError: a header is invalid.
        """
        server = server_of(request)
        model = server.check_model(body.model)
        apply_request_settings(request, body)
        return cls(server, request, body, f"{prefix}{own_id_of(request.scope)}", model)

    @property
    def inputs(self) -> PoolingInputs:
        inputs = self.server.engine.input_processor.pooling
        assert isinstance(inputs, PoolingInputs), "the route of a pooling model"
        return inputs

    async def run(
        self, params: PoolingParams, num_chars: int, tokenize: Callable[[], list[TokenizedPrompt]]
    ) -> list[Pooled]:
        """Return the pooled output of each prompt that `tokenize` returns. Raises as `run_prepared`."""
        return await self.run_prepared(params, lambda: beside_loop(num_chars, tokenize))

    async def run_prepared(self, params: PoolingParams, prepare: Prepare) -> list[Pooled]:
        """Return the pooled output of each prompt that `prepare` returns.

        Raises:
            QuireError: a prompt is invalid, or the engine rejects or fails it.
            ClientDisconnectedError: the client disconnected, also before the prompts were ready.
        """
        return await self.server.in_flight.run(self._pooled(params, prepare), self.request.receive)

    async def _pooled(self, params: PoolingParams, prepare: Prepare) -> list[Pooled]:
        try:
            with self.server.engine.reserve():
                async with asyncio.timeout(self.body.time_left()):
                    prompts = await prepare()
        except TimeoutError:
            raise DeadlineError("the request timed out before its prompts were ready") from None
        check_count(len(prompts))
        check_numbers(self.inputs.spec, params, prompts, self.server.config.max_pooled_numbers)
        return await self.server.engine.encode_all(
            [self._with_salt(prompt) for prompt in prompts],
            params,
            [f"{self.id}-{index}" for index in range(len(prompts))],
            priority=self.body.priority,
            tenant=tenant_of(self.request, self.body),
            **adapter_terms(self.server.adapters.get(self.model)),
            timeout_s=self.body.time_left(),
            trace_headers=self.body.trace_headers,
            data_parallel_rank=self.body.replica,
        )

    def head(self, pooled: Sequence[Pooled], media_tokens: Mapping[str, int] = NO_MEDIA) -> dict[str, Any]:
        """Return the common first fields of replies."""
        return {
            "id": self.id,
            "created": int(time.time()),
            "model": self.model,
            **reply_fields(pooled, self.body.notes, media_tokens),
        }

    def _with_salt(self, prompt: TokenizedPrompt) -> Any:
        salt = self.body.cache_salt
        return {**prompt.as_prompt(), **({} if salt is None else {"cache_salt": salt})}


def check_count(num_prompts: int) -> None:
    """Raise ValidationError if the request makes too many prompts."""
    if num_prompts > MAX_INPUTS:
        raise ValidationError(
            f"the prompt makes {num_prompts} prompts; at most {MAX_INPUTS} are allowed", param="prompt"
        )


def text_options(body: PoolingFields, **others: Any) -> TextOptions:
    """Return the tokenization options of a request."""
    return TextOptions(
        body.truncate_prompt_tokens,
        body.truncation_side,
        add_special_tokens=body.add_special_tokens,
        prompt_name=body.prompt_name,
        **others,
    )


def reply_fields(
    pooled: Sequence[Pooled], notes: RequestNotes, media_tokens: Mapping[str, int] = NO_MEDIA
) -> dict[str, Any]:
    """Return usage, timings and ignored fields for a reply."""
    times = joined_stats([one.metrics for one in pooled]) if pooled else RequestStateStats()
    usage = usage_of(pooled, media_tokens)
    return {"usage": usage, "timings": timings_of(times), "ignored": notes.ignored or UNSET}


def usage_of(pooled: Sequence[Pooled], media_tokens: Mapping[str, int]) -> PromptUsage:
    num_tokens = sum(len(one.prompt_token_ids) for one in pooled)
    num_cached_tokens = sum(one.num_cached_tokens for one in pooled)
    details = PromptTokensDetails(num_cached_tokens, **media_details(media_tokens))
    return PromptUsage(num_tokens, num_tokens, details)


@contextmanager
def renamed_param(name: str, param: str = "prompt") -> Iterator[None]:
    """Rename the engine's parameter to the request's field in errors."""
    try:
        yield
    except ValidationError as error:
        if error.param != param:
            raise
        raise type(error)(error.message.replace(param, name, 1), param=name) from None


@dataclass(frozen=True)
class PooledInputs:
    """Pooled outputs of inputs, or of the windows of each input."""

    pooled: list[Pooled]
    windows: TextWindows | None = None
    is_normalized: bool = False
    media_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens in whose place media are, by kind."""

    def numbers(self) -> list[NDArray[np.float32]]:
        """Return the numbers of each input."""
        if self.windows is None:
            return [one.outputs.data for one in self.pooled]
        return self.windows.joined(self.pooled, normalized=self.is_normalized)


async def embed_each(
    job: PoolingJob, inputs: Inputs, options: TextOptions, params: PoolingParams, *, in_windows: bool
) -> PooledInputs:
    """Return the pooled output of each input; with `in_windows`, long inputs are averaged over their windows.

    Raises:
        QuireError: as `PoolingJob.run`, and if the options truncate texts that are split into windows.
    """
    normalized = is_normalized(job.inputs.spec, params.use_activation)
    if not in_windows:
        return PooledInputs(await run_each(job, inputs, options, params))
    windows = TextWindows(job.inputs, options, check_count)
    pooled = await job.run(params, num_chars(inputs), lambda: windows.prompts(inputs))
    return PooledInputs(pooled, windows, normalized)


def cuts_by_default(body: EngineRequest, *fields: str, in_windows: bool) -> bool:
    """Return whether an API that truncates by default does so here: with windows only if a field requests it."""
    return not in_windows or bool(body.model_fields_set & {*fields})


async def run_each(
    job: PoolingJob, inputs: Inputs, options: TextOptions, params: PoolingParams
) -> list[Pooled]:
    """Return the pooled output of each input. Raises as `PoolingJob.run` does."""
    return await job.run(params, num_chars(inputs), lambda: tokenize_each(job.inputs, inputs, options))


def tokenize_each(pooling: PoolingInputs, inputs: Inputs, options: TextOptions) -> list[TokenizedPrompt]:
    return [pooling.tokenize(parts_of(one), options) for one in inputs]


def num_chars(inputs: Inputs) -> int:
    """Return the characters of the texts, which determine the cost of tokenization."""
    return sum(len(one) for one in inputs if isinstance(one, str))


def task_of(body: TaskFields, spec: PoolingSpec) -> str | None:
    """Return the task of a pooling request; None: the model's default.

    Raises:
        ValidationError: lexical weights are requested from a model without them, or in another form.
    """
    if not body.lexical_weights:
        return body.task
    problem = None
    task = spec.task_of_words
    if task is None:
        problem = "needs a model with lexical weights, which this one has not"
    elif body.task not in (None, task):
        problem = f"needs the task {task}, but the task is {body.task}"
    elif body.average_windows:
        problem = "cannot be combined with average_windows"
    elif body.encoding_format != "float":
        problem = "cannot be encoded as base64"
    if problem is not None:
        raise ValidationError(f"lexical_weights {problem}", param="lexical_weights")
    return task


def words_of(pooled: Iterable[Pooled], special_ids: frozenset[int]) -> Iterator[msgspec.Raw]:
    """Yield an object token id -> weight for each text: weights above 0, special tokens excluded."""
    return (msgspec.Raw(msgspec.json.encode(one.lexical_weights(special_ids))) for one in pooled)
