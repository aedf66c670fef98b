"""When a request has generated enough; a pure function of its tokens and parameters.

Stop strings are the front end's business: only it sees text.
"""

from __future__ import annotations

from quire.sampling_extras import RepetitionDetectionParams
from quire.scheduler.request import Request

Stop = tuple[str, int | None]
"""Finish reason and stop reason."""


def check_stop(request: Request, max_model_len: int) -> Stop | None:
    """The reasons if the last token ends the request, else None.

    An end token wins over a length limit that is reached with it, and that over a repetition. The stop reason is the id
    of a stop token, and None for all others.
    """
    params, num_output_tokens = request.sampling_params, request.num_output_tokens
    if num_output_tokens and num_output_tokens >= params.min_tokens:
        last = request.token_ids[-1]
        if not params.ignore_eos and last in request.eos_token_ids:
            return "stop", None
        if last in params.stop_token_ids:
            return "stop", last
    if request.num_tokens >= max_model_len:
        return "length", None
    if params.max_tokens is not None and num_output_tokens >= params.max_tokens:
        return "length", None
    repetition = params.repetition_detection
    if repetition is not None and num_output_tokens >= params.min_tokens and _repeats(request, repetition):
        return "repetition", None
    return None


def _repeats(request: Request, detection: RepetitionDetectionParams) -> bool:
    """Whether the output ends in one pattern so many times over.

    The longest stretch that is looked at is copied, and compared with itself shifted by each pattern size.
    """
    longest = detection.max_pattern_size * detection.min_count
    tail = request.token_ids[max(request.num_prompt_tokens, request.num_tokens - longest) :]
    last = len(tail) - 1
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        start = len(tail) - size * detection.min_count
        if start < 0:
            return False
        if tail[last - size] == tail[last] and tail[start + size :] == tail[start:-size]:
            return True
    return False
