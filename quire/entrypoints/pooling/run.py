"""The one way from a request for what a model pools to its reply.

Invariant: every prompt of a request is tokenized, off the event loop, and what it makes is counted, before the first is
handed to the engine; the client is watched from before that until the last has come, and what is left is dropped or
aborted if it goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from quire.engine.pooling_inputs import PoolingInputs, TextOptions
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.tokenizer import beside_loop
from quire.entrypoints.openai.errors import own_id_of
from quire.entrypoints.openai.notes import Notes
from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.entrypoints.openai.protocol.responses import PromptTokensDetails
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import apply_terms, tenant_of
from quire.entrypoints.openai.usage import timings_of
from quire.entrypoints.pooling.numbers import check_numbers
from quire.entrypoints.pooling.protocol import MAX_INPUTS, PoolingFields, PromptUsage
from quire.errors import DeadlineError, ValidationError
from quire.outputs import RequestStateStats, joined_stats
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams

Pooled = PoolingRequestOutput[PoolingOutput]


@dataclass(frozen=True)
class Job:
    """One HTTP request: who asks, under which id the answer goes, and what the model is."""

    server: ServerState
    request: Request
    body: EngineRequest
    id: str
    model: str

    @classmethod
    def of(cls, request: Request, body: EngineRequest, prefix: str) -> Job:
        """Check the model's name and settle the request's terms.

        Raises:
            NotFoundError: another model is meant; ValidationError: a term is wrong.
        """
        server = server_of(request)
        model = server.check_model(body.model)
        apply_terms(request, body)
        return cls(server, request, body, f"{prefix}{own_id_of(request.scope)}", model)

    @property
    def inputs(self) -> PoolingInputs:
        inputs = self.server.engine.input_processor.pooling
        assert inputs is not None, "the route of a pooling model"
        return inputs

    async def run(
        self, params: PoolingParams, num_chars: int, tokenize: Callable[[], list[TokenizedPrompt]]
    ) -> list[Pooled]:
        """What is pooled of each prompt.

        Raises:
            QuireError: a prompt cannot be honoured, or the engine cannot take or finish it.
            ClientDisconnectedError: the client went away, be it before the prompts were ready.
        """
        work = self._pooled(params, num_chars, tokenize)
        return await self.server.in_flight.run(work, self.request.receive)

    async def _pooled(
        self, params: PoolingParams, num_chars: int, tokenize: Callable[[], list[TokenizedPrompt]]
    ) -> list[Pooled]:
        try:
            with self.server.engine.reserve():
                async with asyncio.timeout(self.body.time_left()):
                    prompts = await beside_loop(num_chars, tokenize)
        except TimeoutError:
            raise DeadlineError("the request's time was over before its prompts were ready") from None
        check_count(len(prompts))
        check_numbers(self.inputs.spec, params, prompts, self.server.config.max_pooled_numbers)
        return await self.server.engine.encode_all(
            [self._with_salt(prompt) for prompt in prompts],
            params,
            [f"{self.id}-{index}" for index in range(len(prompts))],
            priority=self.body.priority,
            tenant=tenant_of(self.request, self.body),
            lora_request=self.server.adapters.get(self.model),
            timeout_s=self.body.time_left(),
            trace_headers=self.body.trace_headers,
            data_parallel_rank=self.body.replica,
        )

    def head(self, pooled: Sequence[Pooled]) -> dict[str, Any]:
        """What all replies begin with."""
        return {
            "id": self.id,
            "created": int(time.time()),
            "model": self.model,
            **told_of(pooled, self.body.notes),
        }

    def _with_salt(self, prompt: TokenizedPrompt) -> Any:
        salt = self.body.cache_salt
        return {**prompt.as_prompt(), **({} if salt is None else {"cache_salt": salt})}


def check_count(num_prompts: int) -> None:
    """Raises ValidationError: what was sent makes more than one request may have."""
    if num_prompts > MAX_INPUTS:
        raise ValidationError(
            f"the prompt makes {num_prompts} prompts; at most {MAX_INPUTS} are allowed", param="prompt"
        )


def text_options(body: PoolingFields, **others: Any) -> TextOptions:
    """How a request's texts become tokens."""
    return TextOptions(
        body.truncate_prompt_tokens,
        body.truncation_side,
        add_special_tokens=body.add_special_tokens,
        prompt_name=body.prompt_name,
        **others,
    )


def told_of(pooled: Sequence[Pooled], notes: Notes) -> dict[str, Any]:
    """What all replies tell besides what was pooled."""
    times = joined_stats([one.metrics for one in pooled]) if pooled else RequestStateStats()
    return {"usage": usage_of(pooled), "timings": timings_of(times), "ignored": notes.ignored or UNSET}


def usage_of(pooled: Sequence[Pooled]) -> PromptUsage:
    num_tokens = sum(len(one.prompt_token_ids) for one in pooled)
    num_cached_tokens = sum(one.num_cached_tokens for one in pooled)
    return PromptUsage(num_tokens, num_tokens, PromptTokensDetails(num_cached_tokens))


@contextmanager
def called(name: str, param: str = "prompt") -> Iterator[None]:
    """Around what the engine checks: call something in errors what the request calls it."""
    try:
        yield
    except ValidationError as error:
        if error.param != param:
            raise
        raise type(error)(error.message.replace(param, name, 1), param=name) from None
