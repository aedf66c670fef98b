"""What is refused before it is queued.

Invariant: a request that passes can be run to its end by an engine that has nothing else to do, so no queued
request waits for something that can never happen.
"""

from __future__ import annotations

from quire.errors import ValidationError
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.request import Request


def check_admissible(request: Request, max_model_len: int, kv: KVCacheManager) -> None:
    """Check a request against the model's context and the size of the KV cache.

    Raises:
        ValidationError: with the request's numbers and the limit.
    """
    if not 0 < request.num_prompt_tokens < max_model_len:
        raise ValidationError(
            f"the prompt has {request.num_prompt_tokens} tokens; it must have at least 1 and leave room for "
            f"one more in the model's context of {max_model_len}",
            param="prompt",
        )
    num_tokens = request.max_num_tokens(max_model_len)
    needed = kv.max_blocks(num_tokens - 1)  # the last token is never computed
    if needed > kv.num_usable_blocks:
        raise ValidationError(
            f"the request may grow to {num_tokens} tokens ({request.num_prompt_tokens} of prompt), which "
            f"take {needed} KV cache blocks of {kv.block_size} tokens; the cache has {kv.num_usable_blocks}",
            param="max_tokens",
        )
