"""The messages between a front end and its engine core.

Invariant: msgspec structs, encoded with msgpack on the wire and never with pickle; the same objects are passed
by reference when the core runs in the same process. `WIRE_VERSION` changes with any field.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.sampling_params import SamplingParams
from quire.scheduler.output import RequestUpdate, SchedulerStats
from quire.scheduler.request import Request

WIRE_VERSION = 2


class EngineCoreRequest(msgspec.Struct, tag="add", frozen=True):
    """One sequence to generate; text, `n` and stop strings never reach the core.

    `arrival_time` is seconds on the monotonic clock, which the processes of one machine share. `fork_of` names an
    earlier request with the same prompt, which need then be computed only once.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    eos_token_ids: list[int] = []
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    fork_of: str | None = None


def request_of(message: EngineCoreRequest) -> Request:
    """The request that a message asks for."""
    return Request(**msgspec.structs.asdict(message))


def message_of(request: Request) -> EngineCoreRequest:
    """The message that would ask for a request which has not run yet."""
    return EngineCoreRequest(**{name: getattr(request, name) for name in EngineCoreRequest.__struct_fields__})


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    """Stop these requests; unknown and finished ids are ignored."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, tag="call", frozen=True):
    """Call a utility of the core (see `EngineCore.utilities`); a `UtilityResult` answers."""

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the core now; requests still running are dropped."""


CoreRequest = EngineCoreRequest | AbortRequests | UtilityCall | Shutdown
"""What a front end may send."""


class CoreReady(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded and the cache allocated; `max_model_len` is as configured unless it was fitted to memory."""

    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    max_model_len: int
    load_s: float
    wire_version: int = WIRE_VERSION


class CoreFailed(msgspec.Struct, tag="failed", frozen=True):
    """The core is about to end; `message` is for the operator."""

    message: str


class EngineCoreOutputs(msgspec.Struct, tag="outputs", frozen=True):
    """All updates of one step, in the order of the plan."""

    updates: list[RequestUpdate]
    stats: SchedulerStats | None = None
    timestamp: float = 0.0


class UtilityResult(msgspec.Struct, tag="result", frozen=True):
    """Answer to a `UtilityCall`: a result or an error sentence."""

    call_id: int
    result: Any = None
    error: str | None = None


CoreMessage = CoreReady | CoreFailed | EngineCoreOutputs | UtilityResult
"""What a core may send."""
