"""When a request has generated enough; a pure function of its tokens and parameters.

Stop strings are the front end's business: only it sees text.
"""

from __future__ import annotations

from quire.scheduler.request import Request

Stop = tuple[str, int | None]
"""Finish reason and stop reason."""


def check_stop(request: Request, max_model_len: int) -> Stop | None:
    """The reasons if the last token ends the request, else None.

    An end token wins over a length limit that is reached with it. The stop reason is the id of a stop token,
    and None for end-of-sequence and for length.
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
    return None
