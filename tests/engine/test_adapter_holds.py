# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapters that the worker loads and unloads, for any order of requests."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.config.model import LoRAConfig
from quire.engine.messages import EngineCoreRequest
from quire.errors import ValidationError
from quire.lora.holds import AdapterHolds
from quire.sampling_params import SamplingParams
from quire.scheduler.output import RequestUpdate

A, B, C = (LoRARequest(name, number, "path") for number, name in enumerate("abc", 1))


class Worker:
    """Reads adapters when it is told to, and knows what it has."""

    def __init__(self) -> None:
        self.reading: dict[str, Future[None]] = {}
        self.kept: set[str] = set()

    def prepare_adapter(self, request: LoRARequest) -> Future[None]:
        assert request.key not in self.kept
        self.reading[request.key] = Future()
        return self.reading[request.key]

    def drop_adapter(self, key: str) -> None:
        self.kept.remove(key)

    def read(self, request: LoRARequest, failure: Exception | None = None) -> None:
        future = self.reading.pop(request.key)
        self.kept.add(request.key)  # one that a rank cannot read others may have read
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)


class Requests:
    """Unfinished requests, by the adapters that they have."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {}
        self.released: list[str] = []

    def adapted(self) -> dict[str, list[str]]:
        return self.of

    def release(self, key: str, now: float) -> None:
        self.released.append(key)

    def finish_requests(self, ids: list[str], reason: str, now: float) -> list[RequestUpdate]:
        self.of = {key: own for key, own in self.of.items() if own != ids}
        return [RequestUpdate(name, [], finish_reason=reason) for name in ids]


def message_with(adapter: LoRARequest) -> EngineCoreRequest:
    return EngineCoreRequest("one", [1], SamplingParams(), 0.0, adapter_request=adapter)


class Setting:
    def __init__(self, **config: Any) -> None:
        self.worker, self.requests = Worker(), Requests()
        config = {"enable_lora": True, "max_cpu_loras": 2} | config
        self.holds = AdapterHolds(
            EngineConfig(lora=LoRAConfig(**config)), self.worker, self.requests, lambda: 0.0
        )  # type: ignore[arg-type]

    def add(self, name: str, adapter: LoRARequest) -> list[str]:
        """The keys that a new request is held for."""
        keys = [str(hold.key) for hold in self.holds.holds_for(message_with(adapter))]
        self.requests.of.setdefault(adapter.key, []).append(name)
        return keys


def test_requests_are_held_until_their_adapter_is_there() -> None:
    setting = Setting()
    assert setting.add("one", A) == setting.add("two", A) == ["adapter 1:a"]
    assert not setting.holds.has_work
    assert setting.holds.patience_s is not None
    setting.worker.read(A)
    assert setting.holds.has_work
    assert setting.holds.advance() == []
    assert setting.requests.released == ["adapter 1:a"]
    assert setting.add("three", A) == []
    assert setting.holds.patience_s is None


def test_an_adapter_makes_room_when_no_request_has_it() -> None:
    setting = Setting()
    for name, adapter in (("one", A), ("two", B), ("three", C)):
        setting.add(name, adapter)
    assert list(setting.worker.reading) == [A.key, B.key]
    setting.worker.read(A)
    setting.worker.read(B)
    setting.holds.advance()
    assert not setting.holds.has_work, "both are in use"
    del setting.requests.of[B.key]
    assert setting.holds.has_work
    setting.holds.advance()
    assert (setting.worker.kept, list(setting.worker.reading)) == ({A.key}, [C.key])
    assert setting.add("four", B) == ["adapter 2:b"]


def test_the_one_used_longest_ago_makes_room() -> None:
    setting = Setting()
    for name, adapter in (("one", A), ("two", B)):
        setting.add(name, adapter)
        setting.worker.read(adapter)
        setting.holds.advance()
    setting.add("three", A)
    setting.requests.of.clear()
    setting.add("four", C)
    assert setting.worker.kept == {A.key}


def test_unreadable_adapter_fails_its_requests_and_is_retryable() -> None:
    setting = Setting()
    setting.add("one", A)
    setting.add("two", A)
    setting.worker.read(A, ValidationError("it is no adapter"))
    ends = setting.holds.advance()
    assert [(end.request_id, end.finish_reason, end.error) for end in ends] == [
        ("one", "error", "it is no adapter"),
        ("two", "error", "it is no adapter"),
    ]
    assert setting.add("three", A) == ["adapter 1:a"]
    assert list(setting.worker.reading) == [A.key]


def test_a_name_and_number_stand_for_one_path() -> None:
    setting = Setting()
    setting.add("one", A)
    with pytest.raises(ValidationError, match="'a' with number 1 exists already, with another path"):
        setting.holds.holds_for(message_with(LoRARequest("a", 1, "elsewhere")))
    with pytest.raises(ValidationError, match="--enable-lora"):
        Setting(enable_lora=False).holds.holds_for(message_with(A))


def test_an_adapter_can_be_read_before_a_request_wants_it() -> None:
    setting = Setting()
    added, again = setting.holds.add(A), setting.holds.add(msgspec.to_builtins(A))
    assert not added.done()
    assert list(setting.worker.reading) == [A.key]
    setting.worker.read(A)
    setting.holds.advance()
    assert added.result(0) is again.result(0) is setting.holds.add(A).result(0) is True
    assert (setting.add("one", A), setting.holds.numbers()) == ([], [1])


def test_load_of_an_unreadable_adapter_returns_the_reason() -> None:
    setting = Setting()
    added = setting.holds.add(A)
    setting.worker.read(A, ValidationError("it is no adapter"))
    assert setting.holds.advance() == []
    with pytest.raises(ValidationError, match="it is no adapter"):
        added.result(0)
    assert setting.holds.numbers() == []


def test_an_adapter_that_is_removed_waits_for_its_users() -> None:
    setting = Setting()
    setting.add("one", A)
    removed = setting.holds.remove(1)
    assert not setting.holds.has_work, "it is being read"
    setting.worker.read(A)
    setting.holds.advance()
    assert (removed.done(), setting.worker.kept) == (False, {A.key})
    del setting.requests.of[A.key]
    assert setting.holds.has_work
    setting.holds.advance()
    assert (removed.result(0), setting.worker.kept, setting.holds.has_work) == (True, set(), False)
    assert setting.holds.remove(1).result(0) is False
    assert setting.add("two", A) == ["adapter 1:a"]


def test_removal_of_an_unreadable_adapter_succeeds() -> None:
    setting = Setting()
    setting.holds.add(A)
    removed = setting.holds.remove(1)
    setting.worker.read(A, ValidationError("it is no adapter"))
    setting.holds.advance()
    assert removed.result(0)
    assert not setting.holds.has_work
