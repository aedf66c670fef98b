# SPDX-License-Identifier: Apache-2.0
"""Both transports of `CoreClient`: leftovers of a start, costs and reports of failures."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.config import EngineConfig
from quire.engine.client import CoreClient, InProcessClient, ProcessClient, make_client
from quire.engine.core_start import SPIN_COUNT, core_environment, openmp_spin_count
from quire.engine.messages import (
    AddRequest,
    CoreReady,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
    UtilityResult,
)
from quire.engine.startup import prepare
from quire.errors import EngineDeadError, StartupError
from quire.kv_cache.integrity import IntegrityError
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler


@pytest.fixture
def make_config(null_model_dir: Path) -> Callable[..., EngineConfig]:
    def make(**args: Any) -> EngineConfig:
        fixed = {"model": str(null_model_dir), "distributed_executor_backend": "null"}
        return prepare(EngineConfig.from_args(**fixed, **args), "offline")

    return make


def request(name: str, max_tokens: int = 4) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(EngineCoreRequest(name, [1, 2, 3], params, arrival_time=0.0))


def tokens_of(client: CoreClient, name: str) -> list[int]:
    """All that comes until the request has ended."""
    token_ids: list[int] = []
    while True:
        for message in client.receive():
            for update in message.updates if isinstance(message, EngineCoreOutputs) else []:
                token_ids += update.new_token_ids
                if update.request_id == name and update.finish_reason is not None:
                    return token_ids


def test_the_core_does_not_spin_for_long() -> None:
    assert core_environment({"PATH": "/bin"}) == {"PATH": "/bin", "GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_core_environment_keeps_the_users_values(chosen: dict[str, str]) -> None:
    assert core_environment(chosen) == chosen


@pytest.mark.parametrize("chosen", [None, "7"])
def test_the_users_environment_is_a_cores_only_while_one_is_made(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", chosen)
    before = dict(os.environ)
    with openmp_spin_count():
        assert os.environ["GOMP_SPINCOUNT"] == (chosen or str(SPIN_COUNT))
    assert dict(os.environ) == before


def test_an_engine_in_process_leaves_the_environment_alone(
    make_config: Callable[..., EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    client = InProcessClient(make_config())
    client.receive()
    client.close()
    assert dict(os.environ) == before


@pytest.mark.item(49)
def test_a_core_that_cannot_be_started_leaves_nothing(
    make_config: Callable[..., EngineConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    contexts: list[zmq.Context[Any]] = []
    make_context = zmq.Context
    monkeypatch.setattr(zmq, "Context", lambda: contexts.append(make_context()) or contexts[-1])

    def refuse(*args: Any, **kwargs: Any) -> None:
        assert list(tmp_path.iterdir())
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(StartupError, match="cannot be started: no more processes"):
        ProcessClient(make_config())
    assert not list(tmp_path.iterdir())
    assert [context.closed for context in contexts] == [True]


def test_temporary_folder_too_long_for_sockets_fails_the_start(
    make_config: Callable[..., EngineConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("x" * zmq.IPC_PATH_MAX_LEN)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(StartupError, match=f"TMPDIR is too long.* {zmq.IPC_PATH_MAX_LEN} bytes"):
        ProcessClient(make_config())
    assert not list(folder.iterdir())


@pytest.mark.item(51)
def test_a_core_of_another_version_is_refused(
    make_config: Callable[..., EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.engine import messages

    monkeypatch.setattr("quire.engine.client.WIRE_VERSION", 99)
    client = ProcessClient(make_config())
    try:
        with pytest.raises(StartupError, match=rf"version {messages.WIRE_VERSION} .*this process version 99"):
            client.receive()
    finally:
        client.close()


@pytest.mark.parametrize("in_process", [True, False])
def test_a_utility_call_that_fails_costs_only_itself(
    in_process: bool, make_config: Callable[..., EngineConfig]
) -> None:
    client = make_client(make_config(), in_process=in_process)
    try:
        client.receive()
        for call in (
            UtilityCall(1, "explain"),
            UtilityCall(2, "explain", [[]]),
            UtilityCall(3, "stats", [1]),
        ):
            client.send(call)
            (answer,) = client.receive()
            assert isinstance(answer, UtilityResult)
            assert (answer.call_id, answer.error) == (
                call.call_id,
                f"the utility {call.method!r} failed: TypeError; see the engine core's log for the traceback",
            )
        client.send(request("r"))
        assert len(tokens_of(client, "r")) == 4
    finally:
        client.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("failing", ["submit", "collect"])
def test_engine_with_a_failed_step_is_dead_and_reports_it(
    failing: str,
    async_scheduling: bool,
    make_config: Callable[..., EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = InProcessClient(make_config(async_scheduling=async_scheduling))
    (ready,) = client.receive()
    assert isinstance(ready, CoreReady)
    executor: Any = client._core.executor  # type: ignore[union-attr]

    def fail(*args: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(executor, failing, fail)
        client.send(request("r"))
        with pytest.raises(MemoryError):
            client.receive()
    for message in (None, request("s"), UtilityCall(1, "stats")):
        if message is not None:
            client.send(message)
        with pytest.raises(EngineDeadError, match=r"failed before \(MemoryError\)") as dead:
            client.receive()
        assert isinstance(dead.value.__cause__, MemoryError)
    client.close()


class BrokenScheduler(Scheduler):
    def check_integrity(self) -> None:
        raise IntegrityError("a block is lost", {"block": 7})


@pytest.mark.more
def test_server_core_checks_integrity_when_it_becomes_idle(
    make_config: Callable[..., EngineConfig],
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = ProcessClient(make_config(scheduler_cls="tests.engine.test_client:BrokenScheduler"))
    try:
        client.receive()
        client.send(request("r"))
        assert len(tokens_of(client, "r")) == 4
        with pytest.raises(EngineDeadError):
            tokens_of(client, "none is left")
    finally:
        client.close()
    log = capfd.readouterr().err
    assert "IntegrityError: a block is lost" in log
    assert "block: 7" in log, "the log has the state"


def test_dropped_client_blocks_no_garbage_collection(make_config: Callable[..., EngineConfig]) -> None:
    """As by a program, or a test, that fails: its traceback and the client hold each other until both are collected."""
    client = ProcessClient(make_config())
    process, client.traceback = client.process, client  # type: ignore[attr-defined]
    directory = client.address.directory
    try:
        del client
        collection = threading.Thread(target=gc.collect, daemon=True)
        collection.start()
        collection.join(30)
        assert not collection.is_alive()
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)
