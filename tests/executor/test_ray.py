"""Ranks that a real Ray places say what one process says, and leave nothing behind however they end.

`make test-more` installs Ray, which is too large for `make install`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, EngineError, ModelLoadError, StartupError
from quire.executor.ray_cluster import NAMESPACE, actor_name
from quire.executor.ray_executor import RayStarter
from tests.end_to_end.server import children_of, free_port, has_ended
from tests.executor.test_multiproc import PARAMS, executor_of, numbers, run, said, started
from tests.fixtures.wide_llama import write_wide_llama

with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed; make test-more does"
)
CASES: dict[str, dict[str, Any]] = {
    "shares": {"tensor_parallel_size": 2, "tp_invariant": True},
    "stages, int8": {"pipeline_parallel_size": 2, "quantization": "int8", "async_scheduling": True},
    "shares of stages": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "tp_invariant": True,
    },
    "shares of stages, int8": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "tp_invariant": True,
        "quantization": "int8",
    },
}
OF_RANKS = ("tensor_parallel_size", "pipeline_parallel_size")


def ray(model: Path, **args: Any) -> LLMEngine:
    return started(model, **{"distributed_executor_backend": "ray"} | args)


def process_of(engine: LLMEngine) -> int:
    """The process that knows Ray."""
    starter = executor_of(engine)._starter
    assert isinstance(starter, RayStarter)
    assert starter._process is not None
    return starter._process.pid


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "not within time"
        time.sleep(0.05)


def below(pid: int) -> list[int]:
    """All processes that one has started, and those that they have."""
    return [found for child in children_of(pid) for found in (child, *below(child))]


def ranks_below(pid: int) -> dict[int, tuple[int, int]]:
    """The process of each rank, and that of its actor."""
    found = {}
    for actor in below(pid):
        for child in children_of(actor):
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if "quire.executor.rank_process" in words:
                found[int(words[words.index("quire.executor.rank_process") + 2])] = child, actor
    return found


class Cluster:
    """Two hosts of two processors, as Ray sees it, to which RAY_ADDRESS points."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}"]
        self._log = (directory / "log").open("wb")
        self.hosts = [self._host(*head)]
        wait_for(lambda: self.num_hosts() == 1, 120)
        self.hosts.append(self._host(f"--address={self.address}"))
        wait_for(lambda: self.num_hosts() == 2, 120)

    def _host(self, *args: str) -> subprocess.Popen[bytes]:
        size = ["--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *size, *args]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)

    def num_hosts(self) -> int:
        return int(self.ask("print(sum(node['Alive'] for node in ray.nodes()))", default="0"))

    def ask(self, program: str, default: str | None = None) -> str:
        """What a program prints that has joined."""
        start = f"import ray; ray.init({self.address!r}, namespace={NAMESPACE!r}, configure_logging=False); "
        ran = subprocess.run([sys.executable, "-c", start + program], capture_output=True, text=True)
        assert default is not None or not ran.returncode, ran.stderr
        return ran.stdout if not ran.returncode else str(default)

    def ranks(self) -> dict[int, tuple[int, int]]:
        return {rank: pids for host in self.hosts for rank, pids in ranks_below(host.pid).items()}

    def end(self) -> None:
        for host in reversed(self.hosts):
            host.terminate()
            host.wait(60)
        self._log.close()


@pytest.fixture(scope="module")
def wide(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_llama(tiny_model("llama"), tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    directory = Path(tempfile.mkdtemp(prefix="quire-test-ray-", dir="/tmp"))  # a socket's path must be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "t" * 64)
        cluster = Cluster(directory)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.end()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.more
@with_ray
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_ray_have_the_bits_of_one_process(case: str, cluster: Cluster, wide: Path) -> None:
    options = CASES[case]
    one = started(wide, **{name: options[name] for name in options if name not in OF_RANKS})
    alone = run(one)
    one.shutdown()
    engine = ray(wide, **options)
    hosts = executor_of(engine)._starter._hosts  # type: ignore[attr-defined]
    assert len(set(hosts)) == len(hosts) // 2
    for _ in range(2):
        outputs = run(engine)
        assert said(outputs) == said(alone)
        assert numbers(outputs) == numbers(alone)
    engine.shutdown()
    wait_for(lambda: not cluster.ranks())


@pytest.mark.more
@with_ray
@pytest.mark.parametrize(
    "how",
    ["ray.kill", "kill -9 of the actor", "stop of the actor", "kill -9 of the rank", "stop of the rank"],
)
def test_a_rank_that_ends_is_named_and_all_end(
    how: str, cluster: Cluster, tiny_model: Callable[[str], Path]
) -> None:
    engine = ray(tiny_model("llama"), **CASES["shares of stages"])
    starter = executor_of(engine)._starter
    engine.add_request("last", [1, 2, 3], PARAMS[0])
    engine.step()
    rank, actor = cluster.ranks()[2]
    if how == "ray.kill":
        cluster.ask(f"ray.kill(ray.get_actor({actor_name(process_of(engine), 2)!r}))")
    else:
        os.kill(actor if "actor" in how else rank, signal.SIGSTOP if "stop" in how else signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"rank 2 is lost; it says: (its actor|killed by signal 9|process \d+ is stopped)"
    ):
        run_for_ever(engine)  # a rank whose actor is stopped computes for a while yet
    assert time.monotonic() - began < 10
    engine.shutdown()
    wait_for(lambda: not cluster.ranks())
    assert not Path(starter._directory).exists()  # type: ignore[attr-defined]


def run_for_ever(engine: LLMEngine) -> NoReturn:
    while True:
        run(engine)


@pytest.mark.more
@with_ray
def test_too_little_room_is_said_with_numbers(
    cluster: Cluster, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.executor.ray_executor.PLACE_S", 0.5)
    words = (
        r"no room for 2 ranks of 3 CPUs each within 0.5 s: its hosts have 2 \+ 2 CPUs, of which 4 are free"
    )
    with pytest.raises(StartupError, match=words):
        ray(tiny_model("llama"), tensor_parallel_size=2, cpu_threads=3)
    assert int(float(cluster.ask("print(ray.available_resources()['CPU'])"))) == 4


@pytest.mark.more
@with_ray
def test_what_a_rank_of_ray_cannot_load_is_a_startup_error_of_the_same_words(
    cluster: Cluster, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("rwkv7"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        ray(tmp_path, tensor_parallel_size=2)
    wait_for(lambda: not cluster.ranks())


PROGRAM = """
import sys, time
from pathlib import Path
from tests.executor.test_ray import process_of, ray, run, said
if __name__ == "__main__":
    engine = ray(Path(sys.argv[1]), tensor_parallel_size=2)
    print(process_of(engine), engine._clients[0]._core.executor._starter._directory, flush=True)
    sys.stdin.readline()
    engine.shutdown()
"""


@pytest.mark.more
@with_ray
def test_nothing_outlives_a_ray_of_our_own_that_is_killed(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = ray(tiny_model("llama"), tensor_parallel_size=2)
    pid = process_of(engine)
    pids, ranks = below(pid), ranks_below(pid).values()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(has_ended(rank) for rank, _ in ranks))
    with pytest.raises(EngineError, match=r"rank . is lost; it says: Ray's process has ended"):
        run(engine)
    engine.shutdown()
    wait_for(lambda: all(map(has_ended, pids)))


@pytest.mark.more
@with_ray
@pytest.mark.parametrize("ends", ["orderly", "killed"])
def test_a_ray_of_our_own_is_guarded_and_goes_with_the_engine(
    ends: str, tiny_model: Callable[[str], Path]
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_model("llama"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    pid, directory = process.stdout.readline().split()
    pids = [int(pid), *below(int(pid))]
    assert set(ranks_below(int(pid))) == {0, 1}
    assert Path(directory).stat().st_mode & 0o777 == 0o700
    (address,) = {
        word.split("=")[1] for pid in pids for word in words_of(pid) if word.startswith("--gcs-address=")
    }
    stranger = f"import ray; ray.init({address!r}, configure_logging=False)"
    refused = subprocess.run(
        [sys.executable, "-c", stranger], capture_output=True, text=True, env=environment
    )
    assert refused.returncode
    assert "token" in refused.stderr.lower()
    if ends == "killed":
        process.kill()
    process.communicate("\n")
    wait_for(lambda: all(map(has_ended, pids)), 20)
    assert not Path(directory).exists()


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_without_ray_it_is_said_what_to_install(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install 'quire\[ray\]'"):
        ray(tiny_model("llama"))


@pytest.mark.more
@with_ray
@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "ray://127.0.0.1:10001",
            "RAY_ADDRESS is ray://127.0.0.1:10001; the engine joins a cluster by HOST:PORT",
        ),
        ("127.0.0.1:1", "Ray cannot be joined at RAY_ADDRESS=127.0.0.1:1: "),
    ],
)
def test_an_address_without_a_cluster_is_named(
    address: str, words: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(StartupError, match=words):
        ray(tiny_model("llama"))
