# SPDX-License-Identifier: Apache-2.0
"""Replicas on other hosts: the same answers on any host and after the loss of one; strangers are refused."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config import EngineConfig
from quire.engine.client import ProcessClient
from quire.engine.core_progress import ProgressFile
from quire.engine.messages import AddRequest, CoreReady, EngineCoreOutputs, EngineCoreRequest
from quire.engine.replicas.remote_replicas import RemoteReplicas
from quire.engine.replicas.replica_host import ReplicaAgent
from quire.engine.replicas.replica_wire import (
    Alive,
    ReplicaCoreLost,
    ReplicaHello,
    ReplicaWire,
    arithmetic_of,
    facts_of,
    received_from,
    sent_to,
)
from quire.engine.startup import prepare
from quire.errors import ConfigError, EngineDeadError, StartupError
from quire.joining import connect_to_first_host, introduce
from quire.sampling_params import SamplingParams
from quire.scheduler.output import RequestUpdate
from tests.end_to_end.server import free_port
from tests.engine.slow_schedulers import Slow
from tests.engine.test_progress import plan
from tests.engine.test_replica_processes import all_up, check_verbs, disturbing
from tests.engine.test_restart import expected, run_all, started
from tests.fixtures.quick import quick

SLOW = f"{Slow.__module__}:{Slow.__name__}"


def args_of(port: int, **args: Any) -> dict[str, Any]:
    parts = {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_rpc_port": port}
    return parts | {"enable_prefix_caching": False} | args


def config_of(model: Path, port: int, **args: Any) -> EngineConfig:
    fixed = {"distributed_executor_backend": "null", "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return EngineConfig.from_args(model=str(model), **fixed | args_of(port, **args))


class OtherHost:
    """A host with replica 1, as a thread."""

    def __init__(self, model: Path, port: int) -> None:
        config = prepare(config_of(model, port, data_parallel_start_rank=1, scheduler_cls=SLOW), "headless")
        self.host = ReplicaAgent(config, facts_of(config))
        self.thread = threading.Thread(target=self.host.run)
        self.thread.start()

    def kill_core(self) -> None:
        relay = self.host._relay
        assert relay is not None
        assert isinstance(relay._client, ProcessClient)
        relay._client.process.kill()

    def go(self) -> None:
        self.host.stop()
        self.thread.join(300)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("comes_back", quick([False, True], (False,)))
async def test_lost_host_fails_no_request_and_may_rejoin(comes_back: bool, null_model_dir: Path) -> None:
    """Nor does its core, which it starts again."""
    stop, results = await expected(null_model_dir, enable_prefix_caching=False)
    port = free_port()
    other = OtherHost(null_model_dir, port)
    engine = await started(null_model_dir, **args_of(port))

    try:
        if comes_back:
            assert await run_all(engine, stop, disturbing(engine, other.kill_core)) == results
            assert engine.is_ready
            await all_up(engine)
        gone = disturbing(engine, lambda: threading.Thread(target=other.go).start())
        assert await run_all(engine, stop, gone) == results
        assert engine.is_ready
        other.thread.join(300)
        if not comes_back:
            return
        other = OtherHost(null_model_dir, port)
        await all_up(engine)
        assert await run_all(engine, stop, disturbing(engine, lambda: None)) == results
        await check_verbs(engine)
        await engine.shutdown()
        other.thread.join(300)
        assert not other.thread.is_alive(), "the server has said that this is the end"
    finally:
        await engine.shutdown()
        other.go()


@contextmanager
def open_guests(config: EngineConfig) -> Iterator[RemoteReplicas]:
    guests = RemoteReplicas(config)
    try:
        guests.open(config.parallel.join_place)
        yield guests
    finally:
        guests.close()


def join(config: EngineConfig, hello: ReplicaHello) -> socket.socket:
    return introduce(reached(config), hello, config.parallel.join_place)


def reached(config: EngineConfig) -> socket.socket:
    way = connect_to_first_host(config.parallel.join_place, "replica 1", 5.0)
    assert way is not None
    return way


def test_a_host_that_waits_for_its_server_can_be_stopped(null_model_dir: Path) -> None:
    OtherHost(null_model_dir, free_port()).go()


def test_wrong_host_is_refused_with_a_reason_right_one_admitted(
    null_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = prepare(config_of(null_model_dir, free_port()), "server")
    other = prepare(
        config_of(null_model_dir, free_port(), max_num_seqs=8, data_parallel_start_rank=1), "headless"
    )
    right = ReplicaHello(1, time.monotonic(), facts_of(config))
    wrong = {
        "the same --max-num-seqs$": replace_facts(right, facts_of(other)),
        "the same checkpoint$": replace_facts(right, right.facts | {"checkpoint": b"another"}),
        "there is no replica 0 to come from another host, but 1": msgspec.structs.replace(right, replica=0),
        "its version of quire is 0.0": msgspec.structs.replace(right, version="0.0"),
    }
    with open_guests(config) as guests:
        client = guests.client(1)
        with pytest.raises(StartupError, match="--data-parallel-address and --data-parallel-rpc-port"):
            RemoteReplicas(config).open(config.parallel.join_place)
        for stranger in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
            with reached(config) as way, suppress(OSError):  # it is left before all of it is read
                way.sendall(stranger)
                way.shutdown(socket.SHUT_WR)
                while way.recv(4096):
                    pass
        for words, hello in wrong.items():
            with pytest.raises(StartupError, match=words):
                join(config, hello)
        assert caplog.text.count("the peer is not a quire replica") == 2
        assert client.stalls
        with reached(config), join(config, right) as way:  # while somebody else says nothing
            with pytest.raises(StartupError, match="replica 1 has joined before"):
                join(config, right)
            way.sendall(b"\0\0\0\1x")  # a frame that is no message
            with pytest.raises(EngineDeadError, match=r"replica 1 .* a frame of 1 bytes is not a message"):
                client.receive()
        join(config, right).close()
        client = guests.client(1)
        with pytest.raises(
            EngineDeadError, match="replica 1 of another host is gone: the connection was closed"
        ):
            client.receive()
        client = guests.client(1, join_s=0.1)
        with pytest.raises(
            StartupError, match=r"replica 1 has not joined within 0.1 s; start there, .*--headless"
        ):
            client.receive()


def test_host_with_another_instruction_set_may_join_with_a_log(
    null_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = prepare(config_of(null_model_dir, free_port(), device="cpu"), "server")
    own = arithmetic_of(config)
    hello = ReplicaHello(1, time.monotonic(), facts_of(config), arithmetic=own)
    with open_guests(config) as guests:
        for one, warnings in (hello, 0), (msgspec.structs.replace(hello, arithmetic="abacus"), 1):
            join(config, one).close()
            while (joined := guests.next(1)) is None:
                pass
            joined.wire.release()
            guests.left(1)
            words = f"replica 1 computes with abacus and this host with {own}: the same request may get other tokens"
            assert caplog.text.count(words) == warnings


def test_host_reports_of_its_core_count_as_local(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A host's reports reach the server: its core stalls, the requests in work when it died, and silence."""
    config = prepare(config_of(null_model_dir, free_port()), "server")
    hello = ReplicaHello(1, time.monotonic(), facts_of(config))
    progress = ProgressFile.create(tmp_path / "progress", 2)
    progress.begin(plan(["0.1-0"], []))
    with open_guests(config) as guests:
        client, wire = guests.client(1), ReplicaWire(join(config, hello))
        for message in (Alive(stalls=True), EngineCoreOutputs([])):
            wire.send(message)
        assert client.receive() == [EngineCoreOutputs([], timestamp=pytest.approx(0.0, abs=5.0))]
        assert client.stalls
        wire.send(ReplicaCoreLost("it was killed", sorted(progress.digests())))
        with pytest.raises(EngineDeadError, match=r"replica 1 .* is gone: it was killed"):
            client.receive()
        assert client.in_work(["0.0-0", "0.1-0"]) == {"0.1-0"}
        wire.release()
        monkeypatch.setattr("quire.engine.replicas.remote_replicas.SILENCE_S", 0.3)
        client, wire = guests.client(1), ReplicaWire(join(config, hello))
        with pytest.raises(EngineDeadError, match=r"is gone: its host has been silent for 0\.3 s"):
            client.receive()
        wire.release()


@pytest.mark.more
def test_host_waits_for_a_server_that_vanished(null_model_dir: Path) -> None:
    port = free_port()
    config = prepare(config_of(null_model_dir, port, scheduler_cls=SLOW), "server")
    other = OtherHost(null_model_dir, port)
    for is_last in (False, True):
        with open_guests(config) as guests:
            client = guests.client(1)
            (ready,) = client.receive()
            assert isinstance(ready, CoreReady)
            if is_last:
                client.close()
                assert client.receive() == []
            else:
                assert client._joined is not None
                client._joined.wire.release()
    other.thread.join(300)
    assert not other.thread.is_alive()


def replace_facts(hello: ReplicaHello, facts: dict[str, bytes]) -> ReplicaHello:
    return msgspec.structs.replace(hello, facts=facts)


def test_each_host_counts_time_by_its_own_clock() -> None:
    add = AddRequest(EngineCoreRequest("r", [1], SamplingParams(), arrival_time=100.0))
    sent = sent_to(add, ahead_s=40.0)
    assert isinstance(sent, AddRequest)
    assert sent.request.arrival_time == 60.0
    updates = [RequestUpdate("r", [2], queued_ts=60.5, scheduled_ts=61.0), RequestUpdate("s", [3])]
    heard = received_from(EngineCoreOutputs(updates, timestamp=62.0), ahead_s=40.0)
    assert isinstance(heard, EngineCoreOutputs)
    assert heard.timestamp == 102.0
    assert [(one.queued_ts, one.scheduled_ts) for one in heard.updates] == [(100.5, 101.0), (0.0, 0.0)]


@pytest.mark.parametrize(
    ("args", "usage", "words"),
    [
        (
            {"data_parallel_start_rank": 1},
            "server",
            "replicas 1 to 1 of 2 .* require --headless on all hosts but",
        ),
        (
            {"data_parallel_size_local": None},
            "headless",
            "replicas 0 to 1 of 2 .* require --headless on all hosts but",
        ),
        ({}, "headless", "replicas 0 to 0 of 2 .* require --headless on all hosts but"),
        ({}, "offline", r"is 1 of 2: LLM\(\.\.\.\) has replicas of its own host only"),
    ],
)
def test_host_of_the_server_is_checked(
    args: dict[str, Any], usage: Any, words: str, null_model_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(config_of(null_model_dir, 1, **args), usage)
