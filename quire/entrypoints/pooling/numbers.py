"""Numbers as replies have them, and how many of them one reply may have.

Invariant: neither making nor writing them holds the event loop up: many are made beside it, in pieces, and others have
the interpreter in between.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from quire.config.pooling import PoolingSpec
from quire.engine.prompt_forms import TokenizedPrompt
from quire.entrypoints.openai.json_response import json_response
from quire.errors import ValidationError
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams

T = TypeVar("T")
INLINE_NUMBERS = 1 << 14
"""Fewer are written on the event loop (some milliseconds), more in a thread, so many at once."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="quire-numbers")
"""Few, since they share the interpreter."""


def check_numbers(
    spec: PoolingSpec, params: PoolingParams, prompts: Sequence[TokenizedPrompt], limit: int
) -> None:
    """Before anything is computed: raises ValidationError if more than `limit` numbers would be made of the prompts."""
    count = sum(spec.num_numbers(params, prompt.token_ids) for prompt in prompts)
    if count > limit:
        raise ValidationError(
            f"the prompt makes {count} numbers ({spec.task_of(params)}); at most {limit} are allowed "
            "(--max-pooled-numbers)",
            param="prompt",
        )


async def beside_numbers(pooled: Sequence[PoolingRequestOutput[PoolingOutput]], make: Callable[[], T]) -> T:
    """Run what makes something of all these numbers, so that the event loop hardly waits."""
    if sum(one.outputs.data.size for one in pooled) <= INLINE_NUMBERS:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, make)


async def reply_of(
    pooled: Sequence[PoolingRequestOutput[PoolingOutput]], make: Callable[[], msgspec.Struct]
) -> Response:
    """JSON of what `make` makes of what was pooled."""
    return await beside_numbers(pooled, lambda: json_response(make()))


def encoded(data: NDArray[np.float32], encoding_format: str) -> msgspec.Raw:
    """Numbers as a reply has them: JSON, or base64 of little-endian float32 ones."""
    if encoding_format == "base64":
        return msgspec.Raw(msgspec.json.encode(base64.b64encode(data.astype("<f4").tobytes()).decode()))
    if data.size <= INLINE_NUMBERS:
        return msgspec.Raw(msgspec.json.encode(data.tolist()))
    rows = max(1, INLINE_NUMBERS * len(data) // data.size)
    pieces = [
        msgspec.json.encode(data[start : start + rows].tolist())[1:-1] for start in range(0, len(data), rows)
    ]
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
