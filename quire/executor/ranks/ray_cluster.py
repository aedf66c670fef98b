# SPDX-License-Identifier: Apache-2.0
"""Ray driver process: shared code for an engine's ranks and a server's replicas.

Ray brings threads, signal handlers and servers, none of which belong into a core or a server. It finds
hosts with room and starts one actor on each; the actors' processes connect to the engine themselves.

Invariant: when the socket is closed, actors, placement group and a local Ray cluster end, with all their files.

The engine and the driver exchange msgspec frames, as with ranks.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from quire import private_directories
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError, StartupError
from quire.executor.ranks.handles import CallFailed
from quire.executor.ranks.rank_processes import LOOPBACK
from quire.executor.ranks.wire import RankWire
from quire.logging_setup import configure_logging
from quire.processes import GROUP_SIGNALS, start_python, why_silent
from quire.version import install_command


class PlacementRequest(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Request to place what this configuration (`EngineConfig.encoded`) needs."""

    config: bytes
    directory: str  # Directory of a local Ray cluster.
    patience_s: float  # Seconds to wait for room.


class Placed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Placement of all ranks or replicas."""

    address: str  # Of the engine's host, as all hosts reach it.
    hosts: list[str]  # Host of each rank or replica, in order; ranks of one host are consecutive.


class StartRanks(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Request to start all ranks, with the engine's join address and key."""

    address: str
    port: int
    key: str


class StartReplica(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Request to start a replica, for the first time or again, with the server's join address."""

    replica: int
    address: str
    port: int


class Lost(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End of an actor with its rank, or replica, of this number."""

    number: int
    said: str


FromRay = Placed | Lost | CallFailed


ADDRESS = "RAY_ADDRESS"  # Ray's own variable for the cluster to join.
PLACE_S = 60.0  # A full cluster may get room.
START_S = 120.0  # Ray takes half a minute to start on a busy machine.
CLOSE_TIMEOUT_S = 20.0  # A local Ray cluster has a dozen processes to end.
POLL_S = 0.02


def check_installed(option: str) -> None:
    """Raise ConfigError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{option} needs Ray, which is not installed: {install_command('ray')}")


class RayProcess:
    """Handle to the Ray driver process, which ends all that it has started when its socket is closed.

    Args:
        module: what it runs; see `ray_cluster.run`.

    Attributes:
        directory: a private one, removed with it.

    Raises:
        OSError: the machine refuses a process, a socket or a directory.
    """

    def __init__(self, module: str, config: EngineConfig) -> None:
        self._decoder = msgspec.msgpack.Decoder(FromRay)
        self.directory = str(private_directories.make("ray-"))
        ours, theirs = socket.socketpair()
        self._wire = RankWire(ours)
        with theirs:
            program = ["-m", module, str(theirs.fileno())]
            try:
                # A new session, so that the terminal's signals do not reach it.
                self._process = start_python(program, pass_fds=[theirs.fileno()], start_new_session=True)
            except OSError:
                self._wire.close()
                private_directories.remove(Path(self.directory))
                raise
        self.send(PlacementRequest(config.encoded(), self.directory, PLACE_S))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: PlacementRequest | StartRanks | StartReplica) -> None:
        """Send without blocking; raises OSError if the process has ended."""
        self._wire.post(msgspec.msgpack.encode(message))

    def placed(self) -> Placed:
        """Wait for the placement, the first message.

        Raises:
            StartupError: Ray is missing, or there is no room; has the reason.
        """
        try:
            if not select.select([self._wire], [], [], PLACE_S + START_S)[0]:
                raise StartupError(f"Ray has not started within {START_S:g} s")
            placed = self._decode(self._wire.recv())
        except EOFError as error:
            raise StartupError("Ray's process has ended; see its messages above") from error
        assert isinstance(placed, Placed)
        return placed

    def losses(self, seconds: float) -> Iterator[Lost]:
        """Yield the losses reported within `seconds`.

        Raises:
            EOFError: the process has ended. QuireError: it has failed; has the reason.
        """
        if not select.select([self._wire], [], [], seconds)[0]:
            return
        for frame in self._wire.frames():
            lost = self._decode(frame)
            assert isinstance(lost, Lost)
            yield lost

    def close(self) -> None:
        """End the process with all that it has started; may be called twice."""
        self._wire.close()
        if self._process.returncode is None:
            until = time.monotonic() + CLOSE_TIMEOUT_S
            while why_silent(self._process.pid) is None and time.monotonic() < until:
                time.sleep(POLL_S)
            # Some of Ray's processes survive the kill. Until it is waited for, the process group id stays valid.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        private_directories.remove(Path(self.directory))

    def _decode(self, frame: bytes) -> FromRay:
        message: FromRay = self._decoder.decode(frame)
        if isinstance(message, CallFailed):
            raise message.error(0)
        return message


CLUSTER_POLL_S = 0.5
JOIN_S = 5.0
NAMESPACE = "quire"
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}
_LOCAL_CLUSTER_SETTINGS = {
    "RAY_AUTH_MODE": "token",  # its ports are reachable from the network
    "RAY_memory_monitor_refresh_ms": "0",  # the engine counts memory itself
}
_OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; quire stores nothing there.

Bundle = Mapping[str, float]  # Ray resource -> amount.


def run(serve: Callable[[PlacementRequest, RankWire], None]) -> int:
    """Serve the peer of the socket FD, the program's argument; returns the exit code."""
    configure_logging()
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    wire = RankWire(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(msgspec.msgpack.decode(wire.recv(), type=PlacementRequest), wire)
    except EOFError:
        return 0
    except QuireError as error:
        send_message(wire, CallFailed.from_error(error))
        return 1
    return 0


def send_message(wire: RankWire, message: FromRay) -> None:
    """Send a message; raises EOFError if the engine is gone."""
    try:
        wire.send(msgspec.msgpack.encode(message))
    except OSError as error:
        raise EOFError("the engine is gone") from error


@contextmanager
def joined(wanted: PlacementRequest, wire: RankWire, num_cpus: float) -> Iterator[RayCluster]:
    """Join the cluster of `RAY_ADDRESS`, or start a local one with `num_cpus` CPUs.

    Raises:
        StartupError: it is unreachable, or does not start.
    """
    address = os.environ.get(ADDRESS, "")
    os.environ.update(_SETTINGS)
    options: dict[str, Any] = {"namespace": NAMESPACE, "configure_logging": False, "logging_level": "warning"}
    if address == "local":
        address = ""
    if address:
        _check_there(address)
        options |= {"address": address}
    else:
        os.environ.update(_LOCAL_CLUSTER_SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
        options |= {"address": "local", "num_cpus": num_cpus, "num_gpus": 0, "include_dashboard": False}
        # Ray's directory is world-readable; its parent here is private.
        options |= {"_temp_dir": f"{wanted.directory}/ray", "object_store_memory": _OBJECT_STORE_BYTES}
    import ray

    try:
        try:
            ray.init(**options)
        except Exception as error:  # various classes of Ray's
            what = (
                f"cannot be joined at {ADDRESS}={address}"
                if address
                else f"does not start in {wanted.directory}"
            )
            raise StartupError(f"Ray {what}: {_first_line(error)}") from error
        util: Any = ray.util
        yield RayCluster(
            ray, util.get_node_ip_address() if address else LOOPBACK, wire, patience_s=wanted.patience_s
        )
    finally:
        ray.shutdown()
        shutil.rmtree(wanted.directory, ignore_errors=True)


def _check_there(address: str) -> None:
    """Raise StartupError if nothing listens there, for which Ray would wait for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise StartupError(f"{ADDRESS} is {address}; the engine joins a cluster by HOST:PORT, or by auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S).close()
    except OSError as error:
        raise StartupError(f"Ray cannot be joined at {ADDRESS}={address}: {error}") from error


class RayCluster:
    """Ray cluster, with the placement group and actors of an engine.

    Every call raises EOFError once the engine is gone.

    Args:
        ray: the package, connected.
        address: of this host, as others reach it.
        wire: to the engine.
        patience_s: seconds to wait for room.
    """

    def __init__(self, ray: Any, address: str, wire: RankWire, patience_s: float) -> None:
        self.address = address
        self._ray, self._wire, self._patience_s = ray, wire, patience_s
        self._group: Any = None
        self._bundles: Sequence[Bundle] = ()
        self._runs: dict[Any, tuple[int, Any]] = {}

    def own_bundle(self, num_cpus: float) -> Bundle:
        """Return a bundle with CPUs of this host, as many as are available; empty if none."""
        own = self._ray.get_runtime_context().get_node_id()
        (resources,) = (node["Resources"] for node in self._ray.nodes() if node["NodeID"] == own)
        num_cpus = min(num_cpus, resources.get("CPU", 0.0))
        mark = next(name for name in resources if name.startswith("node:") and "internal" not in name)
        return {"CPU": num_cpus, mark: 0.001} if num_cpus else {}

    def place(self, bundles: Sequence[Bundle], strategy: str, wanted: str) -> None:
        """Create a placement group for bundles by one of Ray's strategies.

        Args:
            wanted: description for messages.

        Raises:
            StartupError: there is no room; says what there is.
        """
        self._bundles = bundles
        self._group = self._ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
        until = time.monotonic() + self._patience_s
        while not self._group.wait(CLUSTER_POLL_S):
            self._check_wanted()
            if time.monotonic() > until:
                raise StartupError(
                    f"Ray has found no room for {wanted} within {self._patience_s:g} s: {self._room()}; use fewer "
                    "of them, fewer --cpu-threads or more hosts"
                )

    def hosts(self) -> list[str]:
        """Return the host of each bundle, as far as known at present."""
        found = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [found.get(index, "") for index in range(len(self._bundles))]

    def start(self, kind: type, name: str, bundle: int, number: int, args: tuple[Any, ...]) -> None:
        """Start an actor in a bundle and call its `run`; it is identified by `number`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": self._bundles[bundle]["CPU"], "scheduling_strategy": strategy}
        actor = self._ray.remote(kind).options(name=name, max_restarts=0, **options).remote()
        self._runs[actor.run.remote(*args)] = number, actor

    def ended(self) -> list[tuple[int, str]]:
        """Return (number, reason) of actors that end within CLUSTER_POLL_S."""
        self._check_wanted()
        if not self._runs:
            time.sleep(CLUSTER_POLL_S)
            return []
        ended = self._ray.wait(list(self._runs), timeout=CLUSTER_POLL_S)[0]
        return [(self._runs.pop(run)[0], self._end_of(run)) for run in ended]

    def _end_of(self, run: Any) -> str:
        try:
            how: str = self._ray.get(run)
        except self._ray.exceptions.RayTaskError as error:
            return _first_line(error.cause)
        except self._ray.exceptions.RayError as error:
            return f"its actor has ended: {_first_line(error)}"
        return how

    def _room(self) -> str:
        sizes = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        free = self._ray.available_resources().get("CPU", 0)
        return f"its hosts have {' + '.join(f'{size:g}' for size in sizes)} CPUs, of which {free:g} are free"

    def _check_wanted(self) -> None:
        poll = select.poll()
        poll.register(self._wire.fileno(), select.POLLRDHUP)
        if poll.poll(0):
            raise EOFError("the engine is gone")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
