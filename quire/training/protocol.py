# SPDX-License-Identifier: Apache-2.0
"""Bodies and replies of the training routes: vLLM's, SGLang's and TRL's."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field

from quire.entrypoints.openai.protocol.requests import RequestModel

Version = str | None


class InitWeightTransfer(RequestModel):
    """`init_info`: `{"backend": "tcp", "address": "host:port"}`, an address that the operator allows."""

    init_info: dict[str, Any]


class StartWeightUpdate(RequestModel):
    """`mode`: fate of requests in flight; a paused engine has those that its pause has left."""

    mode: Literal["abort", "wait", "keep", "mixed"] = "keep"
    is_checkpoint_format: Literal[True] = True


class UpdateWeights(RequestModel):
    """`update_info`: `path`, or `names`, `dtype_names` and `shapes` with a `segment` or from the connected trainer."""

    update_info: dict[str, Any] | list[dict[str, Any]]
    update_id: str | None = None


class FinishWeightUpdate(RequestModel):
    weight_version: Version = None
    update_id: str | None = None


class AbortWeightUpdate(RequestModel):
    update_id: str | None = None


class UpdateWeightVersion(RequestModel):
    new_version: str


class WeightChecker(RequestModel):
    """`compare` takes the `checksums` of an earlier reply as `baseline`."""

    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None


class CollectiveRPC(RequestModel):
    """Call of a method of the class that the operator names with --worker-extension-cls."""

    method: str = Field(min_length=1, max_length=256)
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = Field(None, gt=0.0, le=86400.0)


class UpdateWeightsFromDisk(RequestModel):
    """SGLang's: the weights of a directory on the server's machine.

    `flush_cache` false: requests in flight keep what the old weights have computed.
    """

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Version = None


class PauseGeneration(RequestModel):
    """SGLang's: `retract` computes kept requests again, `in_place` keeps what they have computed."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Nothing(RequestModel):
    """Empty body."""


class MemoryOccupation(RequestModel):
    """SGLang's: `tags` of "weights" and "kv_cache"; None: both."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


class InitCommunicator(RequestModel):
    """TRL's, with "tcp" as the backend: TRL's own group is NCCL's, which needs a GPU."""

    host: str
    port: int = Field(ge=1, lt=2**16)
    world_size: int | None = None
    client_device_uuid: str | None = None
    backend: str = "nccl"


class NamedParam(RequestModel):
    name: str
    dtype: str
    shape: list[int]


class NamedParams(RequestModel):
    params: list[NamedParam]


class Status(msgspec.Struct):
    status: str


class UpdateStarted(msgspec.Struct):
    update_id: str
    status: str = "started"


class PausedEngine(msgspec.Struct):
    is_paused: bool


class WeightInfo(msgspec.Struct):
    weight_version: str


class WorldSize(msgspec.Struct):
    world_size: int


class Checked(msgspec.Struct):
    """Reply of /weight_checker: checksums, or whether they match a baseline and the names that do not."""

    checksums: dict[str, str] | None = None
    match: bool | None = None
    mismatches: list[str] | None = None


class RPCResults(msgspec.Struct):
    """Result of each worker: text, unless the method returns None, a list or an object."""

    results: list[Any]


class UpdateSuccess(msgspec.Struct):
    """SGLang's reply."""

    message: str
    success: bool = True
    num_paused_requests: int = 0


class UpdateMessage(msgspec.Struct):
    """TRL's reply."""

    message: str
