# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/parallelism.md that want several processes or hosts, run together, all of them on this host.

Those that have Ray place ranks are not run here, nor is pip: tests/executor/test_ray.py starts what they start.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.server import QUIRE, Server, free_port
from tests.fixtures.ray_cluster import Cluster, with_ray
from tests.fixtures.ray_cluster import cluster as cluster

PAGE = Path(__file__).parents[2] / "docs/parallelism.md"
LIMITS = [
    "--max-model-len=64",
    "--max-num-seqs=3",
    "--device=cpu",
    "--cpu-threads=1",
    "--num-gpu-blocks-override=12",
]
KUBERNETES, RAY = "command: [sh, -c]", "pip install 'quire-llm[ray]'"
BY_RAY = "--data-parallel-backend ray"


def blocks() -> list[str]:
    """Those of no language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for language, block in found if not language]


def commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


def holding(*words: str) -> list[list[str]]:
    """The commands of the one block that has all of these words."""
    (block,) = [block for block in blocks() if all(word in block for word in words)]
    return commands(block)


def adapted(command: list[str], model: Path, *more: str) -> list[str]:
    """The options behind `quire serve`, for what the tests have."""
    assert command[:2] == ["quire", "serve"]
    words = [str(model) if word == "path/to/model" else word for word in command[2:]]
    return [*(word.replace("10.0.0.1", "127.0.0.1") for word in words), *LIMITS, *more]


@contextmanager
def host(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """One without a server."""
    process = subprocess.Popen([*QUIRE, "serve", *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def answers(server: Server, num_engines: int = 1) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.json()["usage"]["completion_tokens"] == 4
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert len(set(re.findall(r'engine="(\d+)"', metrics))) == num_engines


def test_no_block_is_left_out() -> None:
    """Whoever writes another one says here who runs it."""
    firsts = [block.splitlines()[0] for block in blocks()]
    wanted = [
        "--tensor-parallel-size 2 --enable-expert-parallel",
        "--nnodes 2 --master-addr 10.0.0.1",
        KUBERNETES,
        RAY,
        "--data-parallel-size-local 2 --data-parallel-address 10.0.0.1",
        BY_RAY,
        "--data-parallel-hybrid-lb --data-parallel-size-local 2 --data-parallel-start-rank 2",
    ]
    assert [one for one, end in zip(firsts, wanted, strict=True) if not one.endswith(end)] == []


@pytest.mark.more
@pytest.mark.parametrize("number", [0, 1])
def test_experts(number: int, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    arguments = adapted(holding("--enable-expert-parallel")[number], tiny_model("qwen3moe"))
    server = Server(*arguments, log=tmp_path / "log").wait_ready()
    try:
        answers(server, 1 + number)
        assert server.stop() == 0, server.log.read_text()
    finally:
        server.process.kill()


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "port", "num_engines"),
    [("--nnodes 2", "--master-port", 1), ("--data-parallel-address", "--data-parallel-rpc-port", 4)],
)
def test_two_hosts(
    words: str, port: str, num_engines: int, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    first, second = holding(words, "10.0.0.1", "--headless")
    at = f"{port}={free_port()}"
    with ExitStack() as stack:
        stack.enter_context(host(adapted(second, tiny_model("llama"), at)))
        server = Server(*adapted(first, tiny_model("llama"), at), log=tmp_path / "log")
        stack.callback(server.process.kill)
        answers(server.wait_ready(), num_engines)
        assert server.stop() == 0, server.log.read_text()


@pytest.mark.more
@with_ray
def test_replicas_where_ray_has_room(
    cluster: Cluster, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    ((address, *command),) = holding(BY_RAY)
    assert address.startswith("RAY_ADDRESS="), "which names the cluster of these tests"
    server = Server(*adapted(command, tiny_model("llama")), log=tmp_path / "log").wait_ready()
    try:
        answers(server, 4)
        assert server.stop() == 0, server.log.read_text()
    finally:
        server.process.kill()


@pytest.mark.more
def test_replicas_behind_a_load_balancer_of_yours(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    for number, command in enumerate(holding("--data-parallel-hybrid-lb")):
        arguments = [str(tiny_model("llama")), *adapted(command, tiny_model("llama"))]
        server = Server(*arguments, log=tmp_path / "log").wait_ready()
        try:
            answers(server, 2 - number)
            assert server.stop() == 0, server.log.read_text()
        finally:
            server.process.kill()


@pytest.mark.parametrize(("pod", "headless"), [(0, False), (1, True)])
def test_pod_starts_the_same_as_two_hosts(pod: int, headless: bool, tmp_path: Path) -> None:
    (block,) = [block for block in blocks() if block.startswith(KUBERNETES)]
    script = " ".join(block.partition("- >\n")[2].split())
    (tmp_path / "quire").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "quire").chmod(0o755)
    told = os.environ | {"HOSTNAME": f"mine-{pod}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(["sh", "-c", script], env=told, capture_output=True, text=True, check=True).stdout
    assert said.split()[:2] == ["serve", "/models/mine"]
    assert f"--nnodes 2 --node-rank {pod} " in said
    assert ("--headless" in said) == headless
