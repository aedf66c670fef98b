# SPDX-License-Identifier: Apache-2.0
"""Several API processes in front of one core: one server for clients, whichever process answers or dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import CORE, Server, has_ended
from tests.end_to_end.test_faults import BODIES, events, serving, whole

MEMBER = "quire.entrypoints.openai.processes.worker_process"
NUM_PROCESSES = 3
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "seed": 3}
LONG |= {"stream_options": {"include_usage": True}}
ENDLESS = LONG | {"max_tokens": 1900}
NUM_STREAMS = 2 * NUM_PROCESSES
GONE_WITHIN_S = 60.0
ADMIN = {"authorization": "Bearer admin"}


@contextmanager
def several(tmp_path: Path, *args: str) -> Iterator[Server]:
    """A server all of whose processes take connections."""
    with serving(tmp_path, "--api-server-count", str(NUM_PROCESSES), *args) as server:
        wait_until(lambda: num_starts(server) == NUM_PROCESSES - 1)
        yield server
        if server.process.poll() is None:
            assert server.stop() == 0


def num_starts(server: Server) -> int:
    """Return the number of API processes started so far, the first not counted."""
    return server.log.read_text().count("is ready (pid")


def all_are_ready(server: Server) -> bool:
    """Each connection is the next process's."""
    return all(server.health() == 200 for _ in range(NUM_PROCESSES))


def wait_until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Streams:
    """Streams on connections of their own, all of which have begun."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor, body: dict[str, Any] = LONG) -> None:
        begun = threading.Barrier(NUM_STREAMS + 1)

        def on_event(number: int) -> None:
            if number == 2:
                begun.wait(60)

        self.tasks: list[Future[list[Any]]] = [
            pool.submit(events, server, body, on_event) for _ in range(NUM_STREAMS)
        ]
        begun.wait(60)

    def results(self) -> list[Any]:
        """Return the content of each whole stream, or None for one that broke or ended with an error."""
        return [
            None if task.exception() or is_cut(task.result()) else whole(task.result()) for task in self.tasks
        ]


def is_cut(received: list[Any]) -> bool:
    return "error" in received[-2]


def metric(server: Server, name: str) -> float:
    """The sum over labels, as a connection of its own shows it."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0] == f"quire:{name}"]
    assert found
    return sum(found)


@pytest.mark.more
def test_answers_of_any_process_are_those_of_one(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with serving(tmp_path / "one", "--no-enable-prefix-caching") as alone:
        expected = [whole(events(alone, body)) for body in BODIES]
        assert alone.stop() == 0
    with (
        several(tmp_path, "--no-enable-prefix-caching", "--admin-api-key", "admin") as server,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        for body, wanted in zip(BODIES, expected, strict=True):
            assert [whole(events(server, body)) for _ in range(NUM_PROCESSES)] == [wanted] * NUM_PROCESSES
        num_requests = sum(body["n"] for body in BODIES) * NUM_PROCESSES
        seen = {metric(server, "request_success_total") for _ in range(NUM_PROCESSES)}
        assert seen == {num_requests}, "the sum over all processes, whichever is asked"
        assert metric(server, "generation_tokens_total") == num_requests * BODIES[0]["max_tokens"]
        for pid in server.children(MEMBER):
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        check_controls(server, pool)


def check_controls(server: Server, pool: ThreadPoolExecutor) -> None:
    """All requests are seen, and ended, from each process."""
    streams = Streams(server, pool, ENDLESS)
    for _ in range(NUM_PROCESSES):  # each a connection, which is the next process's
        assert httpx.get(f"{server.url}/load").json() == {"server_load": NUM_STREAMS}
        listed = httpx.get(f"{server.url}/v1/requests", headers=ADMIN).json()
        assert listed["num_requests"] == len(listed["data"]) == NUM_STREAMS
        name = listed["data"][-1]["request_id"].rpartition("-")[0].rpartition("-")[0]
        explained = httpx.get(f"{server.url}/v1/requests/{name}/explain").json()
        assert len(explained["sequences"]) == 1
        assert httpx.post(f"{server.url}/reset_prefix_cache", headers=ADMIN).status_code == 409
    assert metric(server, "num_requests_running") == NUM_STREAMS
    one = httpx.post(f"{server.url}/abort_requests", json={"request_ids": [name]}, headers=ADMIN)
    assert one.json() == {"num_aborted": 1}
    rest = httpx.post(f"{server.url}/abort_requests", json={}, headers=ADMIN)
    assert rest.json() == {"num_aborted": NUM_STREAMS - 1}
    assert all(is_cut(task.result()) for task in streams.tasks)
    wait_until(lambda: metric(server, "num_requests_running") == 0)


@pytest.mark.item(50)
def test_the_death_of_one_process_costs_its_streams_alone(tmp_path: Path) -> None:
    with several(tmp_path) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        wanted = whole(events(server, LONG))
        before = server.children(MEMBER)
        counted = metric(server, "http_requests_total")
        streams = Streams(server, pool)
        os.kill(before[0], signal.SIGKILL)
        results = streams.results()
        assert results.count(None) == NUM_STREAMS // NUM_PROCESSES
        others = [result for result in results if result is not None]
        assert [result[0] for result in others] == [wanted[0]] * len(others)
        assert metric(server, "http_requests_total") > counted, "no counter goes back"
        wait_until(lambda: metric(server, "num_requests_running") == 0)
        wait_until(lambda: num_starts(server) == NUM_PROCESSES)
        assert len(set(server.children(MEMBER)) - set(before)) == 1
        assert Streams(server, pool).results().count(None) == 0
        assert server.stop() == 0


@pytest.mark.item(50)
@pytest.mark.more
def test_hung_process_is_replaced_and_only_its_streams_fail(tmp_path: Path) -> None:
    with several(tmp_path) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        wanted = whole(events(server, LONG))
        before = server.children(MEMBER)
        streams = Streams(server, pool)
        os.kill(before[0], signal.SIGSTOP)
        results = streams.results()  # also of those whose connections are closed for them
        assert results.count(None) == NUM_STREAMS // NUM_PROCESSES
        assert [one for one in results if one is not None] == [wanted] * (NUM_STREAMS - results.count(None))
        wait_until(lambda: num_starts(server) == NUM_PROCESSES)
        assert has_ended(before[0])
        assert before[1] in server.children(MEMBER)
        assert "made no progress for" in server.log.read_text()
        wait_until(lambda: metric(server, "num_requests_running") == 0)
        assert Streams(server, pool).results() == [wanted] * NUM_STREAMS


@pytest.mark.more
def test_nothing_outlives_the_first_process(tmp_path: Path) -> None:
    with several(tmp_path) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        children = server.children("quire.")
        assert len(children) == NUM_PROCESSES
        streams = Streams(server, pool)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: all(map(has_ended, children)), GONE_WITHIN_S)
        assert None in streams.results()


@pytest.mark.more
def test_stopped_process_does_not_outlive_the_first(tmp_path: Path) -> None:
    with several(tmp_path) as server:
        children = server.children("quire.")
        stopped = server.children(MEMBER)[0]
        os.kill(stopped, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: all(map(has_ended, children)), GONE_WITHIN_S)


@pytest.mark.more
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_killed_core_only_pauses_streams_of_all_processes(num_replicas: int, tmp_path: Path) -> None:
    args = "--no-enable-prefix-caching", "--data-parallel-size", str(num_replicas)
    with several(tmp_path, *args) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        wanted = whole(events(server, LONG))
        first = server.core_pid()
        assert first is not None
        streams = Streams(server, pool)
        os.kill(first, signal.SIGKILL)
        if num_replicas > 1:
            assert all_are_ready(server), "the other replica takes requests"
        assert streams.results() == [wanted] * NUM_STREAMS
        wait_until(lambda: metric(server, "engine_core_up") == num_replicas)
        assert first not in server.children(CORE)
        for _ in range(NUM_PROCESSES):
            assert server.health() == 200
            assert whole(events(server, LONG)) == wanted


@pytest.mark.more
def test_the_core_that_is_given_up_ends_all(tmp_path: Path) -> None:
    with several(tmp_path) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        pids = set[int]()
        streams = None
        while len(pids) < 4:
            wait_until(lambda: server.core_pid() not in (None, *pids) and all_are_ready(server))
            if len(pids) == 3:
                streams = Streams(server, pool)
            pid = server.core_pid()
            assert pid is not None
            pids.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert streams is not None
        assert server.process.wait(30) == 1
        assert all(is_cut(task.result()) for task in streams.tasks)
        assert "4th death in 10 minutes" in server.log.read_text()


@pytest.mark.parametrize(
    ("numbers", "ends_early"),
    [
        pytest.param([signal.SIGTERM], False, marks=pytest.mark.more),
        pytest.param([signal.SIGINT, signal.SIGINT], True, marks=pytest.mark.more),
        pytest.param([signal.SIGQUIT], True, marks=pytest.mark.more),
    ],
)
def test_a_signal_for_the_first_process_is_for_all(
    numbers: list[signal.Signals], ends_early: bool, tmp_path: Path
) -> None:
    with several(tmp_path) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = Streams(server, pool)
        for pid in server.children("quire."):  # as when a terminal sends it to the group
            os.kill(pid, numbers[0])
        for number in numbers:
            server.process.send_signal(number)
            time.sleep(0.1)
        if not ends_early:
            assert [server.health() for _ in range(NUM_PROCESSES)] == [503] * NUM_PROCESSES
        assert server.process.wait(30) == 0
        assert {is_cut(task.result()) for task in streams.tasks} == {ends_early}


@pytest.mark.more
def test_failed_start_is_reported_once(tmp_path: Path) -> None:
    args = ("--distributed-executor-backend", "null", "--num-gpu-blocks-override", "2")
    server = Server(*args, "--api-server-count", "3", log=tmp_path / "log")
    assert server.process.wait(60) == 1
    (reason,) = [line for line in server.log.read_text().splitlines() if line.startswith("error: ")]
    assert "KV cache blocks" in reason
    assert "Traceback" not in server.log.read_text()


@pytest.mark.item(54)
@pytest.mark.more
def test_all_processes_sleep_and_wake_as_one(tmp_path: Path) -> None:
    args = ("--no-enable-prefix-caching", "--admin-api-key", "admin")
    with several(tmp_path, *args) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        wanted = whole(events(server, LONG))
        streams = Streams(server, pool)
        assert control(server, "/sleep?level=2&mode=keep") == {"is_sleeping": True, "asleep": ALL}
        for _ in range(NUM_PROCESSES):
            assert state(server) == {"is_sleeping": True, "asleep": ALL}
            assert server.health() == 503
            assert complete(server).status_code == 503
        assert not any(task.done() for task in streams.tasks)
        refused = httpx.post(f"{server.url}/wake_up?tags=kv_cache", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "ConflictError")
        for _ in range(NUM_PROCESSES):  # whoever is asked
            control(server, "/wake_up?tags=weights")
            assert state(server)["asleep"] == ["kv_cache", "scheduling"]
        assert control(server, "/wake_up") == AWAKE
        assert streams.results() == [wanted] * NUM_STREAMS
        for _ in range(NUM_PROCESSES):
            assert state(server) == AWAKE
            assert whole(events(server, LONG)) == wanted


@pytest.mark.item(54)
@pytest.mark.more
def test_sleeping_engine_stays_asleep_after_any_process_death(tmp_path: Path) -> None:
    args = ("--no-enable-prefix-caching", "--admin-api-key", "admin")
    with several(tmp_path, *args) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        wanted = whole(events(server, LONG))
        streams = Streams(server, pool)
        control(server, "/sleep?level=1&mode=keep")
        core, member = server.core_pid(), server.children(MEMBER)[0]
        assert core is not None
        os.kill(core, signal.SIGKILL)
        os.kill(member, signal.SIGKILL)
        wait_until(lambda: num_starts(server) == NUM_PROCESSES)
        for _ in range(NUM_PROCESSES):
            assert state(server) == {"is_sleeping": True, "asleep": ALL}
            assert complete(server).status_code == 503
        assert metric(server, "num_requests_running") == 0
        assert control(server, "/wake_up") == AWAKE
        results = streams.results()
        assert results.count(None) == NUM_STREAMS // NUM_PROCESSES
        assert [one for one in results if one is not None] == [wanted] * (NUM_STREAMS - results.count(None))
        for _ in range(NUM_PROCESSES):
            assert whole(events(server, LONG)) == wanted


@pytest.mark.item(54)
@pytest.mark.more
def test_sleep_ends_or_awaits_the_requests_of_all_processes(tmp_path: Path) -> None:
    with (
        several(tmp_path, "--admin-api-key", "admin") as server,
        ThreadPoolExecutor(NUM_STREAMS + 1) as pool,
    ):
        streams = Streams(server, pool)
        control(server, "/sleep?mode=wait")
        assert all(task.done() for task in streams.tasks)
        assert None not in streams.results()
        control(server, "/wake_up")
        streams = Streams(server, pool, ENDLESS)
        waiting = pool.submit(httpx.post, f"{server.url}/sleep?mode=wait", headers=ADMIN)
        wait_until(lambda: [state(server)["is_sleeping"] for _ in range(NUM_PROCESSES)] == [True] * 3)
        control(server, "/wake_up")
        assert waiting.result().status_code == 409
        assert [state(server) for _ in range(NUM_PROCESSES)] == [AWAKE] * NUM_PROCESSES
        control(server, "/sleep?mode=abort")
        assert all(is_cut(task.result()) for task in streams.tasks)
        control(server, "/wake_up")
        assert Streams(server, pool).results().count(None) == 0


ALL = ["kv_cache", "scheduling", "weights"]
AWAKE = {"is_sleeping": False, "asleep": []}


def control(server: Server, path: str) -> Any:
    """Over a connection of its own, as all of these are."""
    response = httpx.post(f"{server.url}{path}", headers=ADMIN, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def state(server: Server) -> Any:
    return httpx.get(f"{server.url}/is_sleeping", headers=ADMIN).json()


def complete(server: Server) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 2}, timeout=60)


@pytest.mark.more
def test_limits_hold_in_total(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("ann: {keys: [k], max_concurrent: 4}\nbob: {keys: [b], requests_per_minute: 4}\n")
    with several(tmp_path, "--api-key-file", str(keys), "--max-connections", "9") as server:
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            url = f"{server.url}/v1/completions"

            def ask(key: str) -> int:
                body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
                return httpx.post(url, json=body, headers={"x-api-key": key}, timeout=60).status_code

            for key in ("k", "b"):
                codes = list(pool.map(ask, [key] * NUM_STREAMS))
                assert sorted(codes) == [200] * 4 + [429] * 2
        clients = [httpx.Client(base_url=server.url) for _ in range(10)]
        try:
            codes = [client.get("/health").status_code for client in clients]
        finally:
            for client in clients:
                client.close()
        assert codes == [200] * 9 + [503]
        wait_until(lambda: server.health() == 200)
