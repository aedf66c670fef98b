"""Runs the prompts of one HTTP request on the engine; shared by all endpoint families.

Invariant: closing `Outputs` closes every engine generator in it, which aborts what is still running; an output
that ended in an error is raised, never passed on as text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from quire.beam_search_params import BeamSearchParams
from quire.engine.queue_limits import Place
from quire.errors import FOREIGN_WORDS, DeadlineError, EngineError, ValidationError
from quire.inputs import TokensPrompt
from quire.lora_request import LoRARequest
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.structured_output.params import FAULT, PARAM

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

Indexed = tuple[int, RequestOutput]
"""Index of the prompt, and an output for it."""
Taker = Callable[[int, RequestOutput], bool]
"""Deals at once with an output of a prompt that ends nothing, or does nothing and returns False."""


class Outputs:
    """The outputs of several prompts, in the order in which they come.

    Args:
        prompts: any number, with token ids; each runs as an engine request of its own.
        request_id: of the HTTP request; the engine's ids are derived from it.
        timeout_s: after so many seconds a prompt ends, as if `max_tokens` had been reached, with stop_reason "timeout".
        stream_interval: tokens of one prompt that are gathered before an output is passed on.
        place: in the engine's queue, for all of them.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        prompts: list[TokensPrompt],
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        stream_interval: int = 1,
        place: Place | None = None,
    ) -> None:
        terms: dict[str, Any] = {
            "priority": priority,
            "tenant": tenant,
            "lora_request": lora_request,
            "timeout_s": timeout_s,
            "trace_headers": trace_headers,
            "data_parallel_rank": data_parallel_rank,
            "place": place,
        }
        self._taker: Taker | None = None
        # Those of several prompts, and those that are gathered, wait for each other.
        if len(prompts) == 1 and stream_interval <= 1:
            terms["offer"] = self._offer
        generators = [
            _gathered(
                index, engine.generate(prompt, params, f"{request_id}-{index}", **terms), stream_interval
            )
            for index, prompt in enumerate(prompts)
        ]
        self.prompt_lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        self._outputs = generators[0] if len(generators) == 1 else _merged(generators)
        self._place = place
        self._first: asyncio.Task[Indexed] | None = None

    async def prime(self, within_s: float) -> None:
        """Wait for the first output, so that a refusal comes before the response has begun.

        A request that the engine has queued may wait long for its turn: after `within_s` seconds (a multiple of it
        while the request is not queued yet) this returns without an output.
        """
        self._first = asyncio.create_task(self._next())
        try:
            while not (await asyncio.wait({self._first}, timeout=within_s))[0]:
                if self._place is None or not self._place.is_reserved:
                    return
            self._first.result()
        except BaseException:
            await self.aclose()
            raise

    async def _next(self) -> Indexed:
        return await anext(self._outputs)

    async def final(self) -> list[RequestOutput]:
        """The last output of each prompt, in the order of the prompts."""
        async with aclosing(self):
            last = {index: output async for index, output in self}
        return [last[index] for index in sorted(last)]

    def offer_to(self, taker: Taker) -> None:
        """From now on `taker` is asked first, whenever the reader waits and nothing is kept for it."""
        self._taker = taker

    def _offer(self, output: RequestOutput) -> bool:
        if self._taker is None or _ends_any(output):
            return False
        return self._taker(0, output)

    def __aiter__(self) -> AsyncIterator[Indexed]:
        return self

    async def __anext__(self) -> Indexed:
        if self._first is None:
            return await anext(self._outputs)
        output = await self._first
        self._first = None
        return output

    async def aclose(self) -> None:
        if self._first is not None:  # a generator that runs cannot be closed
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._outputs.aclose()


async def _gathered(
    index: int, outputs: AsyncGenerator[RequestOutput, None], interval: int
) -> AsyncGenerator[Indexed, None]:
    """One engine request, with outputs gathered up to `interval` tokens; its first token never waits."""
    gathered: RequestOutput | None = None
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            if _ends_any(output):
                _raise_failure(output)
                _settle_timeout(output, is_first=is_first)
            if gathered is None:
                gathered = output
            else:
                gathered.add(output)
            if is_first or interval <= 1 or gathered.finished or _num_tokens(gathered) >= interval:
                yield index, gathered
                gathered, is_first = None, False


def _ends_any(output: RequestOutput) -> bool:
    # No generator, which costs more than the question: it is asked of every token.
    for completion in output.outputs:  # noqa: SIM110
        if completion.finish_reason is not None:
            return True
    return False


def _num_tokens(output: RequestOutput) -> int:
    return max(len(completion.token_ids) for completion in output.outputs)


def _raise_failure(output: RequestOutput) -> None:
    """Raise ValidationError if the core refuses the request or its constraint cannot be enforced any further, and
    EngineError if it failed otherwise or was aborted.
    """
    for completion in output.outputs:
        if completion.finish_reason in ("error", "abort"):
            how = "failed" if completion.finish_reason == "error" else "was aborted"
            reason = completion.stop_reason if isinstance(completion.stop_reason, str) else ""
            if completion.refused:
                raise ValidationError(reason)
            if reason.startswith(FAULT):
                raise ValidationError(reason, param=PARAM)
            why = f": {reason.partition(FOREIGN_WORDS)[0]}" if reason else ""
            raise EngineError(f"the request {how} in the engine before it was complete{why}")


def _settle_timeout(output: RequestOutput, *, is_first: bool) -> None:
    """A text that time cut short ends for a reason that clients know.

    Raises:
        DeadlineError: there is no text.
    """
    late = [completion for completion in output.outputs if completion.finish_reason == "timeout"]
    if late and is_first and not _num_tokens(output):
        raise DeadlineError("the request's time was over before anything was generated")
    for completion in late:
        completion.finish_reason, completion.stop_reason = "length", "timeout"


async def _merged(generators: list[AsyncGenerator[Indexed, None]]) -> AsyncGenerator[Indexed, None]:
    """Outputs of all generators as they come; the first error of any ends all."""
    queue: asyncio.Queue[Indexed | BaseException | None] = asyncio.Queue(maxsize=len(generators))
    pumps = [asyncio.create_task(_pump(outputs, queue)) for outputs in generators]
    num_running = len(pumps)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    outputs: AsyncGenerator[Indexed, None],
    queue: asyncio.Queue[Indexed | BaseException | None],
) -> None:
    try:
        async with aclosing(outputs):
            async for item in outputs:
                await queue.put(item)
    except Exception as error:  # handed to the consumer, who raises it
        await queue.put(error)
    else:
        await queue.put(None)
