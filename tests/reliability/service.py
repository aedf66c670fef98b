# SPDX-License-Identifier: Apache-2.0
"""A real `quire serve` with all features, and the invariants that hold after every fault."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.end_to_end.server import ADMIN as ADMIN
from tests.end_to_end.server import Server, children_of, wait_until

HEALTHY_WITHIN_S = 60.0
SETTLED_WITHIN_S = 60.0
POOLED_THREADS = 24
"""Threads of pools, which are made when they are first needed and stay."""
SPARE_FILES = 2
"""Connections of this process that are being closed when descriptors are counted."""
FILES_PER_HELPER = 4
SPARE_TASKS = 2
"""Of a connection that is being closed when they are counted."""
CANARY: dict[str, Any] = {
    "prompt": "The capital of France is",
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 1,
    "return_token_ids": True,
    "cache_salt": "canary",
}


@dataclass(frozen=True)
class Usage:
    """Resources that a process holds."""

    num_files: int
    num_threads: int
    num_children: int

    def exceeds(self, before: Usage, num_helpers: int) -> bool:
        """More than before, but for so many processes that help and stay, with their files."""
        return (
            self.num_files > before.num_files + SPARE_FILES + num_helpers * FILES_PER_HELPER
            or self.num_threads > before.num_threads + POOLED_THREADS
            or self.num_children > before.num_children + num_helpers
        )


def usage(pid: int) -> Usage:
    process = Path(f"/proc/{pid}")
    return Usage(
        num_files=len(list((process / "fd").iterdir())),
        num_threads=len(list((process / "task").iterdir())),
        num_children=len(children_of(pid)),
    )


def rss_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


POOLED_CANARY: dict[str, Any] = {"input": ["The capital of France is", "Paris"], "cache_salt": "canary"}


class Service:
    """A server with an admin key, perhaps of a model that pools, and its clients, who bring `key`, needed or not."""

    def __init__(self, *args: str, log: Path, key: str = "", pools: bool = False, **options: str) -> None:
        self._pools = pools
        self.process = Server(*args, "--admin-api-key", "admin", log=log, **options)
        self.process.wait_ready()
        self.client = httpx.Client(
            base_url=self.process.url,
            timeout=60,
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"x-api-key": key} if key else {},
        )
        self.baseline = Baseline(self)

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, **fields})

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, **fields})

    def canary(self) -> Any:
        """Return the result of one greedy request, or one embedding, to the last bit."""
        if self._pools:
            return [one["embedding"] for one in self.post("/v1/embeddings", POOLED_CANARY).json()["data"]]
        choice = self.post("/v1/completions", CANARY).json()["choices"][0]
        return choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def metrics(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def num_tasks(self) -> int:
        """Return the number of tasks in the server's event loop."""
        return int(self.client.get("/v1/integrity", headers=ADMIN).json()["num_tasks"])

    def held(self) -> dict[str, float]:
        """Return the resources that requests hold, from the server's integrity check; empty if they hold nothing."""
        counts = self.process.held()
        counts["server_load"] = self.client.get("/load").json()["server_load"]
        return {name: count for name, count in counts.items() if count}

    def stop(self) -> int:
        self.client.close()
        return self.process.stop()


class Baseline:
    """State of a server before a test acts on it.

    Args:
        num_helpers: processes that it may start when they are first needed, and keep, such as those that check
            constraints.
    """

    def __init__(self, service: Service, num_helpers: int = 0) -> None:
        self._service = service
        self._num_helpers = num_helpers
        self.canary = service.canary()
        service.chat()  # of a model that pools, a path that is none
        core_pid = service.process.core_pid()
        assert core_pid is not None
        self.core_pid = core_pid
        self._num_tasks = service.num_tasks()
        self._of_server = usage(service.pid)
        self._of_core = usage(core_pid)
        self._log_length = 0

    def check(self, *, may_have_new_core: bool = False, tracebacks: int = 0) -> None:
        """Assert that the server is as it was: the invariants of docs/reliability.md."""
        service = self._service
        assert service.process.process.poll() is None, service.process.log.read_text()
        wait_until(lambda: service.process.health() == 200, HEALTHY_WITHIN_S, "the server is not healthy")
        wait_until(
            lambda: not service.held(), SETTLED_WITHIN_S, lambda: f"something is held: {service.held()}"
        )
        wait_until(
            lambda: service.num_tasks() <= self._num_tasks + SPARE_TASKS, SETTLED_WITHIN_S, "tasks are left"
        )
        assert service.canary() == self.canary
        core_pid = service.process.core_pid()
        assert core_pid is not None
        if may_have_new_core:
            self.core_pid = core_pid
        assert core_pid == self.core_pid, "the core was replaced"
        for pid, before in ((service.pid, self._of_server), (core_pid, self._of_core)):
            wait_until(
                lambda pid=pid, before=before: not usage(pid).exceeds(before, self._num_helpers),
                SETTLED_WITHIN_S,
                lambda pid=pid, before=before: f"{usage(pid)}, before {before}",
            )
        assert self._new_log().count("Traceback (most recent call last)") == tracebacks, self._last_log

    def _new_log(self) -> str:
        whole = self._service.process.log.read_text()
        self._last_log, self._log_length = whole[self._log_length :], len(whole)
        return self._last_log


@contextlib.contextmanager
def serving(folder: Path, *args: str, **options: Any) -> Iterator[Service]:
    """A server of one's own, killed at the end if it still runs; its log is `folder`/log.

    `options`: see `Service` and `Server`.
    """
    service = Service(*args, log=folder / "log", **options)
    try:
        yield service
    finally:
        service.client.close()
        if service.process.process.poll() is None:
            service.process.process.kill()
        service.process.process.wait()
