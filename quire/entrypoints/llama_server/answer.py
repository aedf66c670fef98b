# SPDX-License-Identifier: Apache-2.0
"""Replies of /completion and /infill, whole or as events.

Invariant: contents and tokens of a stream's events concatenate to those of the whole reply; the last event of each
prompt has the whole reply's other fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from quire.engine.queue_limits import QueueReservation
from quire.entrypoints.llama_server.protocol import (
    GeneratingRequest,
    LlamaCompletion,
    LlamaTimings,
    OneToken,
    TokenChoice,
)
from quire.entrypoints.openai.completions import CompletionAnswer
from quire.entrypoints.openai.errors import frame_of
from quire.entrypoints.openai.generation import Outputs, UsageMeter
from quire.entrypoints.openai.logprobs import floored, text_or_id
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.openai.streaming import COMMENT, StreamFormat, frame
from quire.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput, RequestStateStats
from quire.sampling_params import SamplingParams

FORMAT = StreamFormat("text/event-stream", frame_of, ping=COMMENT)  # no [DONE]
SETTINGS = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "n_probs": "logprobs"}
SAME_SETTINGS = (
    "seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n", "presence_penalty", "frequency_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau",
    "mirostat_eta", "ignore_eos",
)  # fmt: skip


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters under llama-server's names; -1 is its word for no limit and a random seed."""
    settings = {name: getattr(params, name) for name in SAME_SETTINGS}
    settings |= {name: getattr(params, own) for name, own in SETTINGS.items()}
    settings["seed"] = -1 if params.seed is None else params.seed
    settings["n_predict"] = -1 if params.max_tokens is None else params.max_tokens
    return {**settings, "n_probs": params.logprobs or 0, "stop": list(params.stop)}


@dataclass
class AnswerProgress:
    """Counts of one prompt's answer so far."""

    num_tokens: int = 0
    has_new_line: bool = False
    meter: UsageMeter = field(default_factory=UsageMeter)


class LlamaAnswer:
    """`AnswerWriter` over a completion's; with `is_silent` the prompt is computed, and no token shown."""

    def __init__(
        self, server: ServerState, body: GeneratingRequest, inner: CompletionAnswer, *, is_silent: bool
    ) -> None:
        self._server = server
        self._body = body
        self._inner = inner
        self._is_silent = is_silent
        self._progress: dict[int, AnswerProgress] = {}

    @property
    def num_sequences(self) -> int:
        return self._inner.num_sequences

    async def start(self, place: QueueReservation) -> Outputs:
        return await self._inner.start(place)

    def whole(self, outputs: list[RequestOutput]) -> LlamaCompletion | list[LlamaCompletion]:
        """Return the reply, or a list of one for each prompt."""
        replies = []
        for index, output in enumerate(outputs):
            completion = self._counted(index, output)
            replies.append(self._ended(index, output, completion, completion.text, completion.token_ids))
        return replies[0] if len(replies) == 1 else replies

    def frames(self, prompt_lengths: list[int]) -> LlamaAnswer:
        return self

    def encode(self, index: int, output: RequestOutput) -> bytes:
        """Return the events of one output: its new text, and the end."""
        completion = self._counted(index, output)
        part = b""
        if completion.text or (completion.token_ids and (self._body.return_tokens or self._body.n_probs)):
            tokens = self._shown_ids(completion.token_ids)
            fields = self._part(index, output, completion, completion.text, tokens)
            if not self._body.timings_per_token:
                fields["timings"] = UNSET
            part = frame(LlamaCompletion(**fields))
        if completion.finish_reason is None:
            return part
        completion.logprobs = None  # they were in the parts
        return part + frame(self._ended(index, output, completion, "", []))

    def closing(self) -> bytes:
        return b""

    def _counted(self, index: int, output: RequestOutput) -> CompletionOutput:
        """Count an output's new tokens, and return its only completion."""
        (completion,) = output.outputs
        if self._is_silent:
            reason = completion.finish_reason and "length"
            completion = CompletionOutput(0, "", [], logprobs=[], finish_reason=reason)
        progress = self._progress.setdefault(index, AnswerProgress())
        progress.num_tokens += len(completion.token_ids)
        progress.has_new_line |= "\n" in completion.text
        progress.meter.add_prompt(index, output)
        progress.meter.add_completion(index, completion)
        return completion

    def _shown_ids(self, token_ids: list[int]) -> list[int]:
        return token_ids if self._body.return_tokens else []

    def _part(
        self, index: int, output: RequestOutput, completion: CompletionOutput, text: str, tokens: list[int]
    ) -> dict[str, Any]:
        num_tokens, num_cached = self._progress[index].num_tokens, output.num_cached_tokens
        num_prompt = len(output.prompt_token_ids)
        shows = bool(self._body.n_probs) and completion.logprobs is not None
        return {
            "index": index,
            "content": text,
            "tokens": tokens,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": num_prompt,
            "timings": timings_of(output.metrics, num_prompt - num_cached, num_cached, num_tokens),
            "completion_probabilities": [
                self._chosen(position) for position in completion.logprobs or () if position is not None
            ]
            if shows
            else UNSET,
        }

    def _ended(
        self, index: int, output: RequestOutput, completion: CompletionOutput, text: str, token_ids: list[int]
    ) -> LlamaCompletion:
        progress, notes = self._progress[index], self._body.notes
        fields = self._part(index, output, completion, text, self._shown_ids(token_ids))
        params = self._inner.params
        settings = settings_of(params) if isinstance(params, SamplingParams) else {}
        num_all = fields["tokens_evaluated"] + fields["tokens_predicted"]
        word = completion.stop_reason if isinstance(completion.stop_reason, str) else ""
        is_stopped = completion.finish_reason == "stop"
        return LlamaCompletion(
            **{**fields, "stop": True},
            model=self._inner.model,
            prompt=self._inner.prompt_text(output),
            generation_settings=settings | ({"n_predict": 0} if self._is_silent else {}),
            has_new_line=progress.has_new_line,
            truncated=num_all >= self._server.engine.config.model.max_model_len,
            stop_type=("word" if word else "eos") if is_stopped else "limit",
            stopping_word=word if is_stopped else "",
            tokens_cached=output.num_cached_tokens,
            usage=progress.meter.usage(),
            ignored=notes.ignored or UNSET,
            adjusted=notes.adjusted or UNSET,
        )

    def _chosen(self, position: PositionLogprobs) -> TokenChoice:
        token_id, chosen = next(iter(position.items()))
        ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
        top = [one for one in ranked if (one[1].rank or 0) <= self._body.n_probs]
        others = [OneToken(**_token(*one)) for one in top]
        return TokenChoice(**_token(token_id, chosen), top_logprobs=others)


def _token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "id": token_id,
        "token": text_or_id(token_id, logprob.decoded_token),
        "bytes": list(logprob.token_bytes or b""),
        "logprob": floored(logprob.logprob),
    }


def timings_of(
    times: RequestStateStats, num_prompt: int, num_cached: int, num_predicted: int
) -> LlamaTimings:
    """Return llama-server's timings; unknown times are 0, and so are rates without a time."""
    started = times.scheduled_ts or times.arrival_time
    first = times.first_token_ts or started
    prompt_s, predicted_s = max(0.0, first - started), max(0.0, times.last_token_ts - first)
    return LlamaTimings(
        cache_n=num_cached,
        prompt_n=num_prompt,
        prompt_ms=round(prompt_s * 1e3, 3),
        prompt_per_token_ms=_ratio(prompt_s * 1e3, num_prompt),
        prompt_per_second=_ratio(num_prompt, prompt_s),
        predicted_n=num_predicted,
        predicted_ms=round(predicted_s * 1e3, 3),
        predicted_per_token_ms=_ratio(predicted_s * 1e3, num_predicted),
        predicted_per_second=_ratio(num_predicted, predicted_s),
        draft_n=times.num_draft_tokens or UNSET,
        draft_n_accepted=times.num_accepted_tokens if times.num_draft_tokens else UNSET,
    )


def _ratio(number: float, by: float) -> float:
    return round(number / by, 3) if by else 0.0
