"""What the front end is told of a request.

Invariant: nothing is told twice, whatever is computed twice: a request remembers what it has reported.
"""

from __future__ import annotations

from quire.scheduler.output import ModelRunnerOutput, RequestUpdate, TokenLogprobs
from quire.scheduler.request import Request
from quire.scheduler.step import Chunk


def last_update(request: Request, error: str | None = None) -> RequestUpdate:
    """The report on a request that was ended from outside, or by an error."""
    update = _update(request, [])
    update.error = error
    return update


def update_of(
    chunk: Chunk, output: ModelRunnerOutput, new_token_ids: list[int], stop_reason: int | None
) -> RequestUpdate | None:
    """The report on a request's share of a step, which has given it these tokens; None if there is nothing to tell."""
    request_id = chunk.request.request_id
    prompt_logprobs = _unreported(chunk, output.prompt_logprobs.get(request_id))
    if not (new_token_ids or prompt_logprobs or request_id in output.pooled):
        return None
    logprobs = output.logprobs.get(request_id)
    update = _update(
        chunk.request,
        new_token_ids,
        stop_reason,
        None if logprobs is None else logprobs[: len(new_token_ids)],
        prompt_logprobs,
    )
    if chunk.num_drafts:
        update.num_draft_tokens = chunk.num_drafts
        update.num_accepted_tokens = min(output.num_accepted(request_id), len(new_token_ids))
    if output.pooled:
        update.pooled = output.pooled.get(request_id)
    return update


def _update(
    request: Request,
    new_token_ids: list[int],
    stop_reason: int | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
) -> RequestUpdate:
    """A request's history goes with its first and its last report only."""
    update = RequestUpdate(
        request.request_id, new_token_ids, request.finish_reason, stop_reason, logprobs, prompt_logprobs
    )
    if not request.reported or request.is_finished:
        update.num_cached_tokens = request.num_cached_tokens
        update.queued_ts, update.scheduled_ts = request.queued_ts, request.scheduled_ts
        update.num_preemptions = request.num_preemptions
        request.reported = True
    return update


def _unreported(chunk: Chunk, logprobs: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    """Prompt logprobs of a chunk, less those reported before a preemption made it be computed again."""
    if logprobs is None:
        return None
    request = chunk.request
    unreported = logprobs[max(request.num_prompt_logprobs - chunk.start, 0) :]
    request.num_prompt_logprobs += len(unreported)
    return unreported or None
