"""The messages between a front end and its engine core.

Invariant: msgspec structs, encoded with msgpack on the wire and never with pickle; the same objects are passed
by reference when the core runs in the same process. `WIRE_VERSION` changes with any field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.engine.cache_news import CacheNews
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.output import RequestUpdate, SchedulerStats
from quire.scheduler.request import Request

WIRE_VERSION = 12


class EngineCoreRequest(msgspec.Struct, omit_defaults=True, frozen=True):
    """One sequence to generate, or to pool; text, `n` and stop strings never reach the core.

    `arrival_time` is seconds on the monotonic clock, which the processes of one machine share. `fork_of` names an
    earlier request with the same prompt, which need then be computed only once. `output_token_ids` were generated
    by a core that is gone; generation goes on after them.
    One of `num_beams` is kept when it ends, and `fork_of` may name such a one, with which it shares all but its last
    token; it is the `beam`th of those that take their turn together. `AbortRequests` of a kept one says that no more
    forks of it come.
    Its tokens are computed with the adapter of `lora_request`.
    With `pooling_params` nothing is generated, whatever `sampling_params` say: the one update has what is pooled.
    At `second_text_start` the second of two texts begins, in a model that tells the tokens of one from the other's.
    What is pooled is made of the tokens behind the first `instruction_length`.
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
    output_token_ids: list[int] = []
    pooling_params: PoolingParams | None = None
    num_beams: int = 0
    beam: int = 0
    second_text_start: int | None = None
    instruction_length: int | None = None
    lora_request: LoRARequest | None = None


class Fork(msgspec.Struct, array_like=True, frozen=True):
    """A further completion of a prompt: all in which it differs from the first; it is a fork of that if of no other."""

    request_id: str
    seed: int | None = None
    output_token_ids: list[int] = []
    fork_of: str = ""


class AddRequest(msgspec.Struct, tag="add", omit_defaults=True, frozen=True):
    """Generate `n` completions of one prompt, which crosses the wire once."""

    request: EngineCoreRequest
    forks: list[Fork] = []

    def requests(self) -> list[EngineCoreRequest]:
        """One request per completion; all share the list of the prompt's ids."""
        return [
            self.request,
            *(forked(self.request, fork, index) for index, fork in enumerate(self.forks, 1)),
        ]


def forked(first: EngineCoreRequest, fork: Fork, index: int) -> EngineCoreRequest:
    """A completion after the first, which alone reports logprobs of the prompt."""
    return msgspec.structs.replace(
        first,
        request_id=fork.request_id,
        sampling_params=first.sampling_params.settled(seed=fork.seed, prompt_logprobs=None),
        fork_of=fork.fork_of or first.request_id,
        output_token_ids=fork.output_token_ids,
        beam=index if first.num_beams else 0,
    )


def add_message(requests: Sequence[EngineCoreRequest]) -> AddRequest:
    """The message for these completions of one prompt, of which the later ones are forks of the first."""
    first, *others = requests
    if first.sampling_params.stop or first.sampling_params.bad_words:
        without_text = first.sampling_params.settled(stop=(), bad_words=())
        first = msgspec.structs.replace(first, sampling_params=without_text)
    return AddRequest(first, [_fork(one, first) for one in others])


def _fork(one: EngineCoreRequest, first: EngineCoreRequest) -> Fork:
    fork_of = "" if one.fork_of in (None, first.request_id) else one.fork_of
    return Fork(one.request_id, one.sampling_params.seed, one.output_token_ids, fork_of or "")


def request_of(message: EngineCoreRequest) -> Request:
    """The request that a message asks for."""
    return Request(**msgspec.structs.asdict(message))


def message_of(request: Request) -> EngineCoreRequest:
    """The message that would ask for a request which has not run yet."""
    return EngineCoreRequest(**{name: getattr(request, name) for name in EngineCoreRequest.__struct_fields__})


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    """End these requests for this reason; unknown and finished ids are ignored."""

    request_ids: list[str]
    reason: str = "abort"


class UtilityCall(msgspec.Struct, tag="call", frozen=True):
    """Call a utility of the core (see `EngineCore.utilities`); a `UtilityResult` answers."""

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the core now; requests still running are dropped."""


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """The first word of a front end that did not start the core: tell it things, too; a `CoreReady` answers."""

    front_end: int


class Detach(msgspec.Struct, tag="detach", frozen=True):
    """A front end is gone for ever: end what it has asked for, and take no more of it."""

    front_end: int


class StepBegun(msgspec.Struct, tag="begun", frozen=True):
    """From a replica that shares experts with this one: take part in its step of this number."""

    number: int


CoreRequest = AddRequest | AbortRequests | UtilityCall | Shutdown | Attach | Detach | StepBegun
"""What a front end may send, or another replica."""
NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no message."""


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
    """All updates of one step, in the order of the plan.

    `spent` are, by tenant, prompt tokens that were computed for requests whose front end has ended them before they had
    a token. `cache` is what happened to the prefix cache, for whoever chooses among cores.
    """

    updates: list[RequestUpdate]
    stats: SchedulerStats | None = None
    timestamp: float = 0.0
    spent: dict[str, int] = {}
    cache: CacheNews | None = None


class UtilityResult(msgspec.Struct, tag="result", frozen=True):
    """Answer to a `UtilityCall`: a result or an error sentence; `refused`: the caller's error, not the core's."""

    call_id: int
    result: Any = None
    error: str | None = None
    refused: bool = False


CoreMessage = CoreReady | CoreFailed | EngineCoreOutputs | UtilityResult
"""What a core may send."""
