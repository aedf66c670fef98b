# SPDX-License-Identifier: Apache-2.0
"""Frames between processes: any bytes decode to a message or an error, and no message ends a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import (
    NO_MESSAGE,
    AbortRequests,
    AddRequest,
    CoreMessage,
    CoreReady,
    CoreRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    Fork,
    Shutdown,
    UtilityCall,
    UtilityResult,
)
from quire.engine.startup import prepare
from quire.sampling_params import SamplingParams
from quire.scheduler.output import RequestUpdate, SchedulerStats
from tests.fixtures.folded import folded

SETTINGS = settings(
    derandomize=True, deadline=None, max_examples=300, suppress_health_check=list(HealthCheck), database=None
)
encode = msgspec.msgpack.Encoder().encode
REQUESTS: list[Any] = [
    AddRequest(
        EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=3, seed=1), 0.0), [Fork("b", 2, [4])]
    ),
    AddRequest(
        EngineCoreRequest("c", [5], SamplingParams(logit_bias={1: 2.0}, stop_token_ids=[3]), 1.0, [7], 3)
    ),
    AbortRequests(["a", "x"]),
    UtilityCall(1, "stats"),
    Shutdown(),
]
MESSAGES: list[Any] = [
    CoreReady(10, 16, 1000, 64, 0.5),
    EngineCoreOutputs([RequestUpdate("a", [1, 2], "stop", 3)], SchedulerStats(num_running=1), 2.0),
    UtilityResult(1, {"a": [1]}, None),
]


@st.composite
def damaged(draw: st.DrawFn, frames: list[bytes]) -> bytes:
    """A frame with some bytes changed, cut out or put in."""
    frame = bytearray(draw(st.sampled_from(frames)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(frame)))
        length = draw(st.integers(0, 8))
        frame[place : place + length] = draw(st.binary(max_size=8))
    return bytes(frame)


def decoded(kind: Any, frame: bytes) -> Any:
    """None for what is no message; any other error than that fails the test."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except NO_MESSAGE:
        return None


@pytest.mark.item(51, 58)
@SETTINGS
@given(frame=st.binary(max_size=200) | damaged([encode(one) for one in (*REQUESTS, *MESSAGES)]))
@example(frame=b"\x81\xa4type\xa3\x00\x00\x80")
@example(frame=encode(UtilityCall(1, "stats"))[:-1] + b"\x91" * 5000)
@example(frame=b"\xdd\xff\xff\xff\xff")
@example(frame=b"\xc6\xff\xff\xff\xff")
def test_any_bytes_are_a_message_or_an_error(frame: bytes) -> None:
    for kind in (CoreRequest, CoreMessage):
        message = decoded(kind, frame)
        if message is not None:
            assert decoded(kind, encode(message)) == message or "nan" in repr(message)


@pytest.mark.item(51, 58)
@folded("message", [*REQUESTS, *MESSAGES], ids=lambda message: type(message).__name__)
def test_no_message_survives_its_truncation(message: Any) -> None:
    frame = encode(message)
    kind = CoreRequest if message in REQUESTS else CoreMessage
    assert decoded(kind, frame) == message
    assert {decoded(kind, frame[:length]) for length in range(len(frame))} == {None}


@contextmanager
def idle_core() -> Iterator[EngineCore]:
    config = EngineConfig.from_args(
        distributed_executor_backend="null", max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=20
    )
    core = EngineCore(prepare(config, "server"))
    yield core
    core.shutdown()


odd_ints = st.sampled_from([0, 1, -1, 5, 2**31, -(2**63), 2**63 - 1])
odd_requests = st.builds(
    EngineCoreRequest,
    request_id=st.sampled_from(["", "a", "b"]),
    prompt_token_ids=st.lists(odd_ints, max_size=5) | st.lists(st.just(3), min_size=60, max_size=70),
    sampling_params=st.builds(
        SamplingParams,
        max_tokens=st.sampled_from([1, 2, 5, 2**31]),
        seed=st.just(1),
        stop_token_ids=st.lists(st.integers(0, 9), max_size=2),
        min_tokens=st.sampled_from([0, 1]),
    ),
    arrival_time=st.sampled_from([0.0, -1.0, 1e300]),
    eos_token_ids=st.lists(odd_ints, max_size=2),
    priority=odd_ints,
    cache_salt=st.sampled_from([None, "", "x"]),
    tenant=st.sampled_from(["", "t"]),
    fork_of=st.sampled_from([None, "", "a", "unknown"]),
    output_token_ids=st.lists(st.integers(0, 9), max_size=3),
)
names = st.lists(st.sampled_from(["", "a", "b", "zz"]), max_size=3)
odd_messages = (
    st.builds(AddRequest, odd_requests)
    | st.builds(AddRequest, odd_requests, st.lists(st.builds(Fork, st.sampled_from(["", "a", "c"])), max_size=2))
    | st.builds(AbortRequests, names, st.sampled_from(["abort", "x"]))
    | st.builds(UtilityCall, odd_ints, st.sampled_from(["stats", "explain", "nothing", "__class__"]),
                st.lists(st.sampled_from(["a", 1, None]), max_size=2))
)  # fmt: skip


@pytest.mark.item(51, 58)
@settings(SETTINGS, max_examples=60)
@given(messages=st.lists(odd_messages, max_size=12))
def test_decodable_frame_ends_its_request_only(messages: list[Any]) -> None:
    """Any field with any value of its type; the core is asked as over the wire."""
    with idle_core() as core:
        for message in messages:
            core.handle(decoded(CoreRequest, encode(message)))
            if core.has_work():
                core.step()
        core.handle(AbortRequests(["", "a", "b", "c"]))
        for _ in range(20):
            if core.has_work():
                core.step()
        core.scheduler.check_integrity()
        assert not core.scheduler.has_unfinished_requests()
