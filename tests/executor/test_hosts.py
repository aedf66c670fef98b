# SPDX-License-Identifier: Apache-2.0
"""Two hosts, each a tree of processes with a directory and a checkpoint of its own, share the ranks of one engine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams, joining
from quire.config import EngineConfig, ParallelConfig
from quire.engine.startup import prepare
from quire.errors import ConfigError, EngineError, StartupError
from quire.executor.ranks.gate import RankAcceptor, RankHello
from quire.executor.ranks.gate import join as join_at
from quire.kernels.cpu import library
from quire.kernels.cpu.instruction_sets import arithmetic
from tests.end_to_end.server import QUIRE, Server, children_of, free_port, has_ended

LIMITS = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 12}
needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())
PROMPTS = [[3, 1, 4, 1, 5] * 5, [2, 7, 1, 8], [99] * 30]
PARAMS = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1)


def parallel(node_rank: int = 0, port: int = 0, **args: Any) -> ParallelConfig:
    sizes = {"tensor_parallel_size": 4, "nnodes": 2} | args
    return ParallelConfig(node_rank=node_rank, master_port=port or free_port(), **sizes)


def join(own: ParallelConfig, rank: int, join_s: float) -> socket.socket:
    return join_at((own.master_addr, own.master_port), RankHello.create(own, rank), join_s)


def said(llm: LLM) -> Any:
    return [
        (list(one.token_ids), one.logprobs)
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for one in output.outputs
    ]


def options(port: int) -> dict[str, Any]:
    return {"tensor_parallel_size": 2, "nnodes": 2, "master_port": port, "device": "cpu", "cpu_threads": 1}


@contextmanager
def second_host(
    model: Path, base: Path, port: int, *more: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A host with a copy of the checkpoint, that joins whoever listens at this port; it says what is wrong."""
    own = Path(shutil.copytree(model, base / "elsewhere" / "checkpoint", dirs_exist_ok=True))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (LIMITS | options(port)).items()]
    command = [*QUIRE, "serve", str(own), "--headless", "--node-rank=1", "--tp-invariant", *flags, *more]
    environment = os.environ | {"TMPDIR": str(base / "elsewhere")} | environment
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    yield process
    process.kill()
    process.communicate()


def wait_for_end(pids: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while alive := [pid for pid in pids if not has_ended(pid)]:
        assert time.monotonic() < until, f"{alive} live on"
        time.sleep(0.05)


def test_two_hosts_have_the_bits_of_one_until_one_is_killed(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    model, port = tiny_model("llama"), free_port()
    alone = said(LLM(str(model), tp_invariant=True, device="cpu", **LIMITS))
    with second_host(model, tmp_path, port) as host:
        llm = LLM(str(model), tp_invariant=True, **LIMITS | options(port))
        assert said(llm) == alone
        with pytest.raises(
            StartupError, match=f"cannot join at 127.0.0.1:{port}: .*--master-addr and --master-port must"
        ):
            LLM(str(model), tp_invariant=True, **LIMITS | options(port))
        processes = children_of(host.pid)
        host.kill()
        started = time.monotonic()
        with pytest.raises(EngineError, match="rank 1 is lost"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert time.monotonic() - started < 10
        wait_for_end(processes, 10)
        llm.llm_engine.shutdown()
    assert not list((tmp_path / "elsewhere").glob("quire-*"))


@pytest.mark.more
@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}]
)
def test_hosts_of_two_ranks_each_have_the_bits_of_one(
    sizes: dict[str, int], tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """Those of a host add up in memory, and what crosses hosts does so by gloo."""
    model, port = tiny_model("llama"), free_port()
    alone = said(LLM(str(model), tp_invariant=True, device="cpu", **LIMITS))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    with second_host(model, tmp_path, port, *flags):
        llm = LLM(str(model), tp_invariant=True, **LIMITS | options(port) | sizes)
        assert said(llm) == alone
        llm.llm_engine.shutdown()


@pytest.mark.more
def test_rank_stopped_on_another_host_is_named_within_seconds(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    model, port = tiny_model("llama"), free_port()
    with second_host(model, tmp_path, port) as host:
        llm = LLM(str(model), tp_invariant=True, **LIMITS | options(port))
        (rank,) = children_of(host.pid)
        os.kill(rank, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EngineError, match="rank 1 is lost"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert time.monotonic() - began < 10
        wait_for_end([rank, host.pid], 10)
        llm.llm_engine.shutdown()


@pytest.mark.more
def test_a_server_takes_its_hosts_with_it_and_a_host_its_server(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    model = tiny_model("llama")
    for victim in (0, 1):
        port, flags = free_port(), []
        for name, value in (LIMITS | options(port)).items():
            flags += [f"--{name.replace('_', '-')}", str(value)]
        server = Server(str(model), "--tp-invariant", *flags, log=tmp_path / "log", TMPDIR=str(tmp_path))
        with ExitStack() as stack:
            stack.callback(server.process.kill)
            host = stack.enter_context(second_host(model, tmp_path, port))
            server.wait_ready()
            core = server.core_pid()
            assert core is not None
            processes = [core, *children_of(core), *children_of(host.pid)]
            body = {"prompt": [1, 2, 3], "max_tokens": 60, "ignore_eos": True, "n": 20, "stream": True}
            with ThreadPoolExecutor(1) as pool:
                stream = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=30)
                time.sleep(0.5)
                os.kill(host.pid if victim else server.process.pid, signal.SIGKILL)
                if victim:
                    assert '"error"' in stream.result().text
                else:
                    assert isinstance(stream.exception(), httpx.TransportError)
            wait_for_end([*processes, *([server.process.pid] if victim else [host.pid])], 10)


@pytest.mark.more
def test_differing_host_gets_the_difference(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    model, port = tiny_model("llama"), free_port()
    words = "all ranks must have the same --max-num-seqs, but rank 0's differs from that of 1"
    with second_host(model, tmp_path, port, "--max-num-seqs=4"), pytest.raises(StartupError, match=words):
        LLM(str(model), tp_invariant=True, **LIMITS | options(port))


@pytest.mark.more
@needs_kernels
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"QUIRE_CPU_ISA": "portable"}, "portable on ranks 1"),
        ({"QUIRE_KERNELS": "reference"}, "torch on ranks 1"),
    ],
)
def test_a_host_that_computes_otherwise_is_refused(
    environment: dict[str, str], words: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    model, port = tiny_model("llama"), free_port()
    words = f"the same instruction set: {arithmetic()} on ranks 0, {words}; set QUIRE_CPU_ISA"
    with second_host(model, tmp_path, port, **environment), pytest.raises(StartupError, match=words):
        LLM(str(model), tp_invariant=True, **LIMITS | options(port))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"tensor_parallel_size": 8},
            "the same number of ranks, which is 8 here and 4 on the first host",
        ),
        ({"nnodes": 4}, "the same --nnodes, which is 4 here and 2 on the first host"),
        ({"node_rank": 0}, "there is no rank 2 on a host 0 of 2"),
    ],
)
def test_host_of_another_shape_is_refused_and_the_right_admitted(other: dict[str, int], words: str) -> None:
    with gate() as (port, inside):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: quire\r\n\r\n")
            with pytest.raises(StartupError, match=f"refuses this host: .*{words}"):
                join(parallel(port=port, **{"node_rank": 1} | other), 2, join_s=30)
        ways = [join(parallel(1, port), rank, join_s=30) for rank in (2, 3)]
        found = inside.result()
        assert sorted(found) == [2, 3]
        found[2].sendall(b"!")
        assert ways[0].recv(1) == b"!"
        for way in (*ways, *found.values()):
            way.close()


def test_slow_strangers_delay_no_host() -> None:
    with gate() as (port, inside), ExitStack() as stack:
        for said in (b"", b"\0\0\0\x10", b"\0"):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(said)
        ways = [join(parallel(1, port), rank, join_s=30) for rank in (2, 3)]
        for way in (*ways, *inside.result(joining.HELLO_S - 1).values()):
            way.close()


def test_trickling_connection_is_closed_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "HELLO_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
        with here, there:
            hello = pool.submit(joining.receive_hello, here, RankHello)
            there.sendall(b"\0\0\xff\xff")
            for _ in range(joining.MAX_HELLO_BYTES // 2):  # far from all that is announced
                if wait([hello], timeout=0.01).done:
                    break
                there.sendall(b"\0")
            assert hello.result(0) is None


def test_a_host_comes_once_but_for_one_that_has_gone() -> None:
    with gate() as (port, inside):
        first = join(parallel(1, port), 2, join_s=30)
        with pytest.raises(StartupError, match="a host with --node-rank 1 has joined before"):
            join(parallel(1, port), 2, join_s=30)
        first.close()
        again = [join(parallel(1, port), rank, join_s=30) for rank in (2, 3)]
        for way in (*again, *inside.result().values()):
            way.close()


def test_hosts_that_wait_in_vain_name_the_missing_ones() -> None:
    words = r"host 1, 2, 3 of 4 has not joined within 0.1 s; start there"
    with (
        closing(RankAcceptor.of_hosts(parallel(nnodes=4))) as entrance,
        pytest.raises(StartupError, match=words),
    ):
        entrance.accept_ranks(0.1)
    with pytest.raises(StartupError, match=r"host 1 has waited 0.1 s for the first host, at 127.0.0.1:\d+: "):
        join(parallel(1), 2, join_s=0.1)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            {"nnodes": 2},
            "it to divide the ranks, of which --tensor-parallel-size and --pipeline-parallel-size make 1",
        ),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "--headless on all hosts but number 0"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "--node-rank of 0 to 1, not 2"),
        ({"node_rank": 1}, "--node-rank of 0 to 0, not 1"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "null"},
            "--distributed-executor-backend mp, not null",
        ),
    ],
)
def test_options_unfit_for_several_hosts_are_refused(
    args: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    config = EngineConfig.from_args(model=str(tiny_model("llama")), device="cpu", **args)
    with pytest.raises(ConfigError, match=f"--nnodes is {args.get('nnodes', 1)}, which requires {words}"):
        prepare(config, "offline")


@contextmanager
def gate() -> Iterator[tuple[int, Any]]:
    """The port of a first host, and what comes of letting the others in."""
    first = parallel()
    with closing(RankAcceptor.of_hosts(first)) as entrance, ThreadPoolExecutor(1) as pool:
        yield first.master_port, pool.submit(entrance.accept_ranks, 60.0)
