"""When a request has generated enough; a pure function of its tokens and parameters.

Stop strings are the front end's business: only it sees text.
"""

from __future__ import annotations

from quire.scheduler.request import Request


def check_stop(request: Request, max_model_len: int) -> tuple[str, int | None] | None:
    """(finish reason, stop reason) if the last token ends the request, else None.

    An end token wins over a length limit that is reached with it. The stop reason is the id of a stop token,
    and None for end-of-sequence and for length.
    """
    params = request.sampling_params
    if request.num_output_tokens >= max(params.min_tokens, 1):
        last = request.token_ids[-1]
        if not params.ignore_eos and last in request.eos_token_ids:
            return "stop", None
        if last in params.stop_token_ids:
            return "stop", last
    if request.num_tokens >= request.max_num_tokens(max_model_len):
        return "length", None
    return None
