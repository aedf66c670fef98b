# SPDX-License-Identifier: Apache-2.0
"""An engine with `AsyncLLM`'s interface that recites a text: for fast tests of the protocol.

Prompts and parameters go through the real input processor, so refusals are the real ones.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from quire.adapters import LoRARequest
from quire.beam_search.requests import search_request
from quire.config import EngineConfig, ModelArch
from quire.engine.input_processor import InputProcessor
from quire.engine.output_stream import Offer
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.queue_limits import QueueReservation, WaitingSequences
from quire.engine.tokenizer_cache import TokenizerContext
from quire.errors import (
    EngineDeadError,
    MemoryShortError,
    NotFoundError,
    QuireError,
    UnavailableError,
    ValidationError,
)
from quire.metrics.stats import IterationStats, StatLogger
from quire.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput, RequestStateStats
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.scheduler.explain import Explanation, WaitShare
from quire.scheduler.output import SchedulerStats

SPECIAL = {"<|im_start|>": 256, "<|im_end|>": 257}
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools: answer with <tool_call>\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.content == 'boom' %}{{ raise_exception('no booms here') }}{% endif %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if shout %}{{ 'SHOUT' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


class FakeTokenizer:
    """One token per byte, and two special tokens."""

    vocab_size = num_ids = 258
    bos_token = None
    bos_token_id = None
    named_tokens: ClassVar[dict[str, str]] = {}
    eos_token = "<|im_end|>"
    eos_token_id = 257
    special_tokens = frozenset(SPECIAL)
    file = None
    is_bytewise = begins_bytewise = True

    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        self.chat_templates = {} if chat_template is None else {"default": chat_template}

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def has_text(self, ids: list[int]) -> bool:
        return any(i < 256 for i in ids)

    def min_num_tokens(self, text: str) -> int:
        return 0

    def id_of(self, token: str) -> int | None:
        return SPECIAL.get(token)

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        if not allow_special:
            return list(text.encode())
        ids: list[int] = []
        while text:
            literal = next((literal for literal in SPECIAL if text.startswith(literal)), None)
            ids += list(text[0].encode()) if literal is None else [SPECIAL[literal]]
            text = text[len(literal or text[0]) :]
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        chunks = [b"" if i > 255 and skip_special_tokens else self.token_bytes(i) for i in ids]
        return b"".join(chunks).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        names = {token_id: literal for literal, token_id in SPECIAL.items()}
        return bytes([token_id]) if token_id < 256 else names[token_id].encode()

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def texts_of_all(self) -> list[str]:
        return [self.token_text(token_id) for token_id in range(self.num_ids)]

    def cached(self, name: str, make: Callable[[Any], Any]) -> Any:
        return make(self)


class FakeEngine:
    """Recites `reply(prompt, index)`, a token (byte) per step; the knobs below make it misbehave."""

    def __init__(self, tokenizer: FakeTokenizer | None = None, **engine_args: Any) -> None:
        arch = ModelArch(
            "Fake", "fake", FakeTokenizer.vocab_size, 8, 8, 1, 1, 1, 8, 4096, eos_token_ids=(257,)
        )
        args = {"model": "fake-model", "max_model_len": 4096, "max_num_batched_tokens": 4096, **engine_args}
        config = EngineConfig.from_args(**args)
        self.config = dataclasses.replace(config, model_arch=arch)
        self.tokenizer = None if config.model.skip_tokenizer_init else tokenizer or FakeTokenizer()
        self.input_processor = InputProcessor(self.config, self.tokenizer)  # type: ignore[arg-type]
        self.reply: Callable[[str, int], str] = lambda prompt, index: f"Reply {index}!"
        self.is_ready = True
        self.is_sleeping = self.refuses_requests = False
        self.weight_version = "default"
        self.loading: Any = None
        self.dead_error: QuireError | None = None
        self.died = asyncio.Event()
        self.hold_after: int | None = None
        self.die_after: int | None = None
        self.fail_after: int | None = None
        self.refusal: str | None = None
        self.num_cached_tokens = 0
        self.drafts = (0, 0)
        """How many tokens were guessed, and how many of them were right."""
        self.mean_logprob: Callable[[int], float] = lambda index: -1.0
        self.running: set[str] = set()
        self.closed: list[str] = []
        self.aborted: list[str] = []
        self.seen: list[tuple[Any, SamplingParams]] = []
        self.adapters: list[LoRARequest | None] = []
        self.loras: list[LoRARequest] = []
        self.tenants: list[str] = []
        self.timeouts: list[float | None] = []
        self.trace_headers: list[Mapping[str, str] | None] = []
        self.replicas: list[int | None] = []
        self.late_after: int | None = None
        self.is_full = False
        self.is_short_of_memory = self.is_crowded = self.stalls = False
        self.waiting = WaitingSequences()
        self.stat_loggers: list[StatLogger] = []
        self.was_shut_down = False

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    async def get_tokenizer_context(self, adapter: LoRARequest | None) -> TokenizerContext:
        return self.input_processor.tokenizers.of(adapter)

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        self.stat_loggers.append(stat_logger)

    async def wait_ready(self) -> None:
        while not self.is_ready:
            await asyncio.sleep(0.005)
            await self.check_health()

    async def check_health(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Takes what is in a directory whose name does not begin with "bad"."""
        if lora_request.lora_path.rpartition("/")[2].startswith("bad"):
            raise ValidationError(f"adapter {lora_request.lora_name!r}: adapter_config.json: no such file")
        await asyncio.sleep(0)
        self.loras.append(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.loras = [one for one in self.loras if one.lora_int_id != lora_id]
        return True

    async def check_integrity(self) -> list[SchedulerStats]:
        return [SchedulerStats(num_running=len(self.running))]

    async def shutdown(self) -> None:
        self.was_shut_down = True

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """For the admin only: the server itself aborts by closing the generator."""
        self.aborted += request_ids

    def labels(self) -> list[str]:
        return sorted(self.running)

    async def explain(self, request_id: str) -> list[Explanation]:
        if request_id not in self.running and request_id not in self.closed:
            raise NotFoundError("unknown")
        status = "running" if request_id in self.running else "finished_stopped"
        share = WaitShare("next_step", 5, "for the running step to end")
        return [Explanation(f"{request_id}-a", status, 5, [share])]

    @contextmanager
    def reserve(self, num_sequences: int = 1) -> Iterator[QueueReservation]:
        if self.is_full:
            raise UnavailableError("the queue is full: 7 sequences wait", retry_after=3)
        place = QueueReservation(self.waiting, num_sequences)
        try:
            yield place
        finally:
            place.release()

    def crowding(self) -> str | None:
        return "the queue is nearly full" if self.is_crowded else None

    def check_memory(self) -> None:
        if self.is_short_of_memory:
            raise MemoryShortError("memory is short: 1 MiB are left")

    def num_unfinished_requests(self) -> int:
        return len(self.running)

    def die(self) -> None:
        self.dead_error = EngineDeadError("killed in /home/someone at 0x7f00")
        self.died.set()

    async def check_constraint(self, params: SamplingParams) -> None:
        self.input_processor.constraints.validated(params)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        offer: Offer | None = None,
        place: QueueReservation | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.check_health()
        tokenized = self.input_processor.tokenize(prompt, adapter=lora_request)
        if isinstance(sampling_params, BeamSearchParams):
            sampling_params = self._recited(tokenized, sampling_params)
        sampling_params = self.input_processor.constraints.validated(sampling_params)
        children = self.input_processor.process(
            request_id,
            tokenized,
            sampling_params,
            priority=priority,
            tenant=tenant,
            adapter_request=lora_request,
        )
        if place is not None:
            place.join(sampling_params.n, 0)
        self.adapters.append(lora_request)
        self.tenants.append(tenant)
        self.timeouts.append(timeout_s)
        self.trace_headers.append(trace_headers)
        self.replicas.append(data_parallel_rank)
        self.seen.append((prompt, sampling_params))
        text = self.tokenizer.decode(tokenized.token_ids, skip_special_tokens=False) if self.tokenizer else ""
        sequences = [
            _Sequence(index, child.sampling_params, self.reply(text, index), self.mean_logprob(index))
            for index, child in enumerate(children)
        ]
        self.running.add(request_id)
        try:
            async for completions in self._steps(sequences, sampling_params):
                finished = all(sequence.finish_reason for sequence in sequences)
                output = RequestOutput(
                    request_id=request_id,
                    prompt=tokenized.text,
                    prompt_token_ids=tokenized.token_ids,
                    outputs=completions,
                    finished=finished,
                    prompt_logprobs=_prompt_logprobs(tokenized.token_ids, sampling_params),
                    num_cached_tokens=self.num_cached_tokens,
                    metrics=_timeline(max(sequence.num_tokens for sequence in sequences), *self.drafts),
                )
                if offer is None or finished or not offer(output):
                    yield output
        finally:
            self.running.discard(request_id)
            self.closed.append(request_id)

    def _recited(self, prompt: TokenizedPrompt, params: BeamSearchParams) -> SamplingParams:
        """Check a beam search and return the sampling parameters of the recited answer that replaces it."""
        _, params = search_request(self.input_processor, "search", prompt, params)
        kind = RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            n=params.n, max_tokens=params.max_tokens, logprobs=params.logprobs, output_kind=kind
        )

    async def _steps(
        self, sequences: list[_Sequence], params: SamplingParams
    ) -> AsyncGenerator[list[CompletionOutput], None]:
        num_steps, delta = 0, params.output_kind is RequestOutputKind.DELTA
        if self.late_after == 0:
            for sequence in sequences:
                sequence.finish_reason = "timeout"
            yield [sequence.news() for sequence in sequences]
            return
        while active := [sequence for sequence in sequences if sequence.finish_reason is None]:
            await self._maybe_misbehave(num_steps)
            num_steps += 1
            for sequence in active:
                sequence.step()
                if self.fail_after is not None and num_steps > self.fail_after:
                    sequence.finish_reason = "error"
                if self.refusal is not None:
                    sequence.finish_reason, sequence.refusal = "error", self.refusal
                if num_steps == self.late_after:
                    sequence.finish_reason = "timeout"
            self._tell_loggers(len(active))
            if delta:
                yield [sequence.news() for sequence in active]
        if not delta:
            yield [sequence.news() for sequence in sequences]

    async def _maybe_misbehave(self, num_steps: int) -> None:
        await asyncio.sleep(0)
        if self.die_after is not None and num_steps >= self.die_after:
            self.die()
        await self.check_health()
        if self.hold_after is not None and num_steps >= self.hold_after:
            await self.died.wait()
            await self.check_health()

    def _tell_loggers(self, num_running: int) -> None:
        for stat_logger in self.stat_loggers:
            stat_logger.record(
                IterationStats(num_generation_tokens=num_running), SchedulerStats(num_running=num_running), 0
            )


class _Sequence:
    def __init__(self, index: int, params: SamplingParams, text: str, mean_logprob: float) -> None:
        self.index, self.params, self.mean_logprob = index, params, mean_logprob
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self.refusal: str | None = None
        for stop in params.stop:
            if stop in text:
                text, self.stop_reason = text[: text.index(stop)], stop
        self.pending = list(text.encode())
        self.finish_reason: str | None = None
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text, self.token_ids, self.logprobs = "", list[int](), list[PositionLogprobs]()

    def step(self) -> None:
        token_id = self.pending.pop(0) if self.pending else 257
        self.token_ids.append(token_id)
        self.num_tokens += 1
        listed = self.params.logprob_token_ids or ()
        self.logprobs.append(_position(token_id, self.params.logprobs or 0, listed))
        if token_id < 256 and self.params.detokenize:
            self.text += self.decoder.decode(bytes([token_id]))
        if token_id == 257:
            self.finish_reason = "stop"
        elif self.num_tokens == self.params.max_tokens:
            self.finish_reason = "length"

    def news(self) -> CompletionOutput:
        output = CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            cumulative_logprob=self.mean_logprob * self.num_tokens if self.params.wants_logprobs else None,
            logprobs=self.logprobs if self.params.wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason if self.finish_reason == "stop" else self.refusal,
            refused=self.refusal is not None,
        )
        self.text, self.token_ids, self.logprobs = "", [], []
        return output


def _timeline(num_steps: int, num_drafts: int, num_accepted: int) -> RequestStateStats:
    """Half a second of waiting, one of prefill, then a quarter per token."""
    return RequestStateStats(
        arrival_time=10.0,
        queued_ts=10.0,
        scheduled_ts=10.5,
        first_token_ts=11.5,
        last_token_ts=11.5 + 0.25 * (num_steps - 1),
        num_draft_tokens=num_drafts,
        num_accepted_tokens=num_accepted,
    )


def _position(token_id: int, num_top: int, listed: Iterable[int] = ()) -> PositionLogprobs:
    """The chosen token is second; the most likely one has minus infinity in no place, the third has."""
    tokenizer = FakeTokenizer()

    def shown(other: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.token_text(other), tokenizer.token_bytes(other))

    position = {token_id: shown(token_id, -1.0, 2)}
    ranked = {1: ((token_id + 1) % 256, -0.5), 2: (token_id, -1.0), 3: ((token_id + 2) % 256, float("-inf"))}
    for rank, (other, logprob) in list(ranked.items())[:num_top]:
        position.setdefault(other, shown(other, logprob, rank))
    for other in listed:
        position.setdefault(other, shown(other, -3.0, 9))
    return position


def _prompt_logprobs(ids: list[int], params: SamplingParams) -> list[PositionLogprobs | None] | None:
    if params.prompt_logprobs is None:
        return None
    return [None, *(_position(token_id, params.prompt_logprobs) for token_id in ids[1:])]
