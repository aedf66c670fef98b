# SPDX-License-Identifier: Apache-2.0
"""Tests of faults around and inside a running server: processes that die, hang or meet a limit of the machine."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from tests.reliability.service import Service, serving, usage, wait_until
from tests.reliability.test_streams import events, joined, stream

STREAM = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
PLUGIN = '''
import os, time
from pathlib import Path
from quire.executor.uniproc import UniprocExecutor

def error():
    raise RuntimeError("as ordered")

def memory():
    raise MemoryError

FAULTS = {
    "error": error,
    "memory": memory,
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(1000),
}

class Faulty(UniprocExecutor):
    """Does once what the file says, in the step after it was written."""

    def submit(self, plan):
        orders = Path(os.environ["ORDERS"])
        if plan.scheduled and orders.exists():
            order = orders.read_text()
            orders.unlink()
            FAULTS[order]()
        super().submit(plan)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with an installed package that offers the executor `faulty`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "faulty_package.py").write_text(PLUGIN)
    info = folder / "faulty_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.executors]\nfaulty = faulty_package:Faulty\n")
    return folder


@contextmanager
def mortal(tmp_path: Path, *args: str, **options: str) -> Iterator[Service]:
    """A server whose temporary folder is `tmp_path`/tmp, in which nothing of ours may be left when it has ended."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    with serving(tmp_path, *args, TMPDIR=str(folder), **options) as service:
        yield service
    wait_until(lambda: not list(folder.iterdir()), 300, lambda: f"left: {[*folder.iterdir()]}")


@contextmanager
def streaming(service: Service, num_streams: int = 20) -> Iterator[Callable[[], list[Any]]]:
    """Streams and whole replies under way, all begun; what is given waits for their results."""
    bodies = [{**STREAM, "prompt": [5 + index, 7], "seed": index} for index in range(num_streams)]
    begun = threading.Semaphore(0)

    def one(index: int) -> Any:
        body = bodies[index]
        if index % 5 == 4:
            begun.release()
            reply = service.post("/v1/completions", body)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["text"]
        with service.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()
            first = next(lines)
            begun.release()
            reply.iter_lines = lambda: iter([first, *lines])  # type: ignore[method-assign]
            *chunks, done = events(reply)
        assert done == "[DONE]"
        failed = [chunk for chunk in chunks if "error" in chunk]
        return failed or joined("/v1/completions", chunks)[0]["text"]

    with ThreadPoolExecutor(num_streams) as pool:
        futures: list[Future[Any]] = [pool.submit(one, index) for index in range(num_streams)]
        for _ in range(num_streams):
            assert begun.acquire(timeout=60)
        yield lambda: [future.result(120) for future in futures]


def expected(service: Service, num_streams: int = 20) -> list[Any]:
    """Return the results of those streams without a fault."""
    with streaming(service, num_streams) as results:
        return results()


def core_pid(service: Service) -> int:
    pid = service.process.core_pid()
    assert pid is not None
    return pid


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.more
@pytest.mark.item(43, 44)
def test_a_core_that_is_stopped_or_killed_is_a_pause(tmp_path: Path) -> None:
    with mortal(tmp_path, "--core-heartbeat-timeout", "8", "--no-enable-prefix-caching") as service:
        wanted = expected(service)
        with streaming(service) as results:  # stopped for a while, and it goes on itself
            stopped = core_pid(service)
            os.kill(stopped, signal.SIGSTOP)
            late = service.complete(timeout=0.3)
            assert late.status_code == 504, "deadlines are kept while the core says nothing"
            wait_until(lambda: service.process.health() == 503, 300, "a core that stands still is not ready")
            assert service.process.health("/livez") == 503
            os.kill(stopped, signal.SIGCONT)
            assert results() == wanted
        service.baseline.check()
        with streaming(service) as results:  # stopped for good
            os.kill(core_pid(service), signal.SIGSTOP)
            assert results() == wanted
        service.baseline.check(may_have_new_core=True)
        with streaming(service) as results:
            os.kill(core_pid(service), signal.SIGKILL)
            refused = service.complete()
            assert refused.status_code in (200, 503)
            assert results() == wanted
        service.baseline.check(may_have_new_core=True)
        assert service.stop() == 0


@pytest.mark.more
@pytest.mark.item(43)
def test_the_fourth_death_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    with mortal(tmp_path) as service:
        for number in range(4):
            os.kill(core_pid(service), signal.SIGKILL)
            if number < 3:
                wait_until(lambda: service.process.health() == 503, 300, "nobody noticed")
                wait_until(lambda: service.process.health() == 200, 300, "it did not come back")
        assert service.process.process.wait(300) == 1
        assert "4th death in 10 minutes" in service.process.log.read_text()


@pytest.mark.more
@pytest.mark.item(46)
def test_stopped_server_continues_and_killed_one_leaves_nothing(tmp_path: Path) -> None:
    with mortal(tmp_path) as service:
        core = core_pid(service)
        wanted = expected(service)
        with streaming(service) as results:
            os.kill(service.pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(service.pid, signal.SIGCONT)
            assert results() == wanted
        service.baseline.check()
        with streaming(service) as results:
            os.kill(service.pid, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                results()
        wait_until(lambda: not is_alive(core), 300, "the core lives on")


@pytest.mark.more
@pytest.mark.item(47)
@pytest.mark.parametrize("orders", [("error", "memory"), ("abort", "exit"), ("hang",)], ids=" ".join)
def test_a_step_that_fails_is_a_pause(orders: tuple[str, ...], tmp_path: Path, site: Path) -> None:
    paper, draft = tmp_path / "orders", tmp_path / "draft"
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])
    args = (
        "--distributed-executor-backend",
        "faulty",
        "--core-heartbeat-timeout",
        "3",
        "--no-enable-prefix-caching",
    )
    with mortal(tmp_path, *args, ORDERS=str(paper), PYTHONPATH=path) as service:
        wanted = expected(service, 10)
        for order in orders:
            with streaming(service, 10) as results:
                draft.write_text(order)
                draft.rename(paper)  # whole at once: a step may look at any time
                assert results() == wanted
            assert not paper.exists(), "the order was carried out"
            raised = order in ("error", "memory")
            service.baseline.check(may_have_new_core=True, tracebacks=int(raised))
        assert service.stop() == 0


@pytest.mark.more
@pytest.mark.item(48)
def test_sigterm_lets_streams_finish_and_a_second_ends_them(tmp_path: Path) -> None:
    with mortal(tmp_path, "--shutdown-timeout", "60") as service:
        wanted = expected(service)
        with streaming(service) as results:
            os.kill(service.pid, signal.SIGTERM)
            wait_until(lambda: service.process.health("/readyz") == 503, 300, "it still takes requests")
            refused = service.complete()
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert "retry-after" in refused.headers
            assert results() == wanted
        assert service.process.process.wait(300) == 0
    again = tmp_path / "again"
    again.mkdir()
    with mortal(again, "--shutdown-timeout", "60") as service:
        body = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(stream, service, "/v1/completions", {**body, "n": 8}) for _ in range(4)]
            wait_until(lambda: service.held().get("num_running") == 32, 300, "they do not run")
            for _ in range(2):
                os.kill(service.pid, signal.SIGTERM)
                time.sleep(0.1)
            for one in streams:
                *_, last, done = one.result(30)
                assert "error" in last
                assert done == "[DONE]"
        assert service.process.process.wait(300) == 0


@pytest.mark.more
@pytest.mark.item(51)
def test_garbage_on_the_internal_sockets_is_dropped(tmp_path: Path) -> None:
    with mortal(tmp_path) as service:
        (private,) = (tmp_path / "tmp").glob("quire-*")
        assert private.stat().st_mode & 0o777 == 0o700
        rng = random.Random(1)
        for name, told in (("requests", "of a front end"), ("out.0", "of a core")):
            with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
                sender.linger = 1000
                sender.connect(f"ipc://{private / name}")
                frames = [rng.randbytes(rng.randrange(200)) for _ in range(200)]
                frames += [bytes(64 * 2**20), b"\xc1"]
                frames.append(b"\x81\xa4type\xa3\x00\x00\x80")  # no UTF-8
                for frame in frames:
                    sender.send(frame)
            for _ in range(50):  # what speaks another protocol, or stops in the middle of a word
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(str(private / name))
                    stranger.sendall(rng.randbytes(rng.randrange(1, 500)))
            assert service.complete().status_code == 200
            service.baseline.check()
            assert f"is not a message {told}" in service.process.log.read_text()
        assert service.stop() == 0


@pytest.mark.more
@pytest.mark.item(52)
def test_a_core_that_gets_no_memory_is_replaced_or_goes_on(tmp_path: Path) -> None:
    """An address space without room for more: the step that needs some fails, and its requests go on."""
    with mortal(tmp_path, "--no-enable-prefix-caching") as service:
        prompt = list(range(5, 1900))
        body = {"max_tokens": 8, "temperature": 0, "logprobs": 20, "prompt_logprobs": 20, "n": 8}
        wanted = service.complete(prompt, **body).json()["choices"]
        os.kill(core_pid(service), signal.SIGKILL)
        wait_until(
            lambda: service.process.core_pid() not in (None, service.baseline.core_pid), 30, "no new core"
        )
        service.process.wait_ready()
        pid = core_pid(service)
        num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        reply = service.complete(prompt, **body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == wanted
        log = service.process.log.read_text()
        service.baseline.check(may_have_new_core=True, tracebacks=log.count("Traceback"))


@pytest.mark.more
@pytest.mark.item(35, 53)
def test_without_file_descriptors_the_server_refuses_and_goes_on(tmp_path: Path) -> None:
    with (
        mortal(tmp_path, "--read-timeout", "3", sh='ulimit -n 80; exec "$@"') as service,
        ExitStack() as stack,
    ):
        for _ in range(150):
            try:
                client = socket.create_connection(("127.0.0.1", service.process.port), timeout=5)
            except OSError:
                break
            stack.callback(client.close)
        assert usage(service.pid).num_files <= 80
        wait_until(lambda: service.process.health() == 200, 300, "silent connections keep their places")
        assert service.complete().status_code == 200
        stack.close()
        service.baseline.check()
        assert service.stop() == 0


NULL = ("--distributed-executor-backend", "null")


@pytest.mark.item(53)
@pytest.mark.parametrize(
    "shell",
    [
        pytest.param('exec "$@" 1>&- 2>&-', marks=pytest.mark.more),
        pytest.param('exec "$@" 0<&- 1>&- 2>&-', marks=pytest.mark.more),
        'exec "$@" >/dev/full 2>&1',
        pytest.param('ulimit -f 2000; head -c 1024000 /dev/zero; exec "$@"', marks=pytest.mark.more),
    ],
)
def test_a_log_that_cannot_be_written_costs_nothing(shell: str, tmp_path: Path) -> None:
    with serving(tmp_path, *NULL, sh=shell) as service:
        for _ in range(100):
            assert service.client.get("/version?" + "x" * 100).status_code == 200
        assert service.complete(temperature=0.001).status_code == 200
        service.baseline.check()
        assert service.stop() == 0
