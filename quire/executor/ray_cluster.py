"""What processes that know Ray have in common: one for an engine's ranks, one for a server's replicas.

Ray brings threads, signal handlers and servers, and none of that into a core or a server. What it is for is to find
hosts with room, and to start there one actor for each; what actors start speaks to the engine itself.

Invariant: when the other end of the socket is closed, actors, placement group and a Ray of our own end, with all that
it has written.
"""

from __future__ import annotations

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
from typing import Any

import msgspec

from quire.errors import QuireError, StartupError
from quire.executor.messages import Failed
from quire.executor.ray_messages import FromRay, Wanted
from quire.executor.ray_process import ADDRESS
from quire.executor.starter import LOOPBACK
from quire.executor.wire import Wire
from quire.logging_setup import configure_logging
from quire.processes import PARENTS_SIGNALS

LOOK_S = 0.5
JOIN_S = 5.0
NAMESPACE = "quire"
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}
_SETTINGS_OF_OUR_OWN = {
    "RAY_AUTH_MODE": "token",  # its ports are open to the network
    "RAY_memory_monitor_refresh_ms": "0",  # the engine counts memory itself
}
_OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes; nothing of ours lies there."""

Bundle = Mapping[str, float]
"""What one place has: so much of each of Ray's resources."""


def run(serve: Callable[[Wanted, Wire], None]) -> int:
    """Serve whoever has the other end of the socket FD, the program's argument; returns the exit code."""
    configure_logging()
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(msgspec.msgpack.decode(wire.recv(), type=Wanted), wire)
    except EOFError:
        return 0
    except QuireError as error:
        tell(wire, Failed.of(error))
        return 1
    return 0


def tell(wire: Wire, message: FromRay) -> None:
    """Raises EOFError: nobody hears it."""
    try:
        wire.send(msgspec.msgpack.encode(message))
    except OSError as error:
        raise EOFError("the engine is gone") from error


@contextmanager
def joined(wanted: Wanted, wire: Wire, num_cpus: float) -> Iterator[Cluster]:
    """The cluster that `RAY_ADDRESS` names, or one of our own with so many CPUs.

    Raises:
        StartupError: it is not there, or does not start.
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
        os.environ.update(_SETTINGS_OF_OUR_OWN, RAY_AUTH_TOKEN=secrets.token_hex(32))
        options |= {"address": "local", "num_cpus": num_cpus, "num_gpus": 0, "include_dashboard": False}
        # Ray lets everybody into its directory; into that one they cannot go.
        options |= {"_temp_dir": f"{wanted.directory}/ray", "object_store_memory": _OBJECT_STORE_BYTES}
    import ray

    try:
        try:
            ray.init(**options)
        except Exception as error:  # of many kinds, all Ray's
            what = (
                f"cannot be joined at {ADDRESS}={address}"
                if address
                else f"does not start in {wanted.directory}"
            )
            raise StartupError(f"Ray {what}: {_first_line(error)}") from error
        util: Any = ray.util
        yield Cluster(
            ray, util.get_node_ip_address() if address else LOOPBACK, wire, patience_s=wanted.patience_s
        )
    finally:
        ray.shutdown()
        shutil.rmtree(wanted.directory, ignore_errors=True)


def _check_there(address: str) -> None:
    """Raises StartupError: there is nobody, whom Ray would wait for for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise StartupError(f"{ADDRESS} is {address}; the engine joins a cluster by HOST:PORT, or by auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S).close()
    except OSError as error:
        raise StartupError(f"Ray cannot be joined at {ADDRESS}={address}: {error}") from error


class Cluster:
    """Hosts that Ray knows, and what it has placed and started there for an engine.

    Every call raises EOFError once the engine is gone.

    Args:
        ray: the package, which has joined.
        address: of this host, as others reach it.
        wire: to the engine.
        patience_s: how long to wait for room.
    """

    def __init__(self, ray: Any, address: str, wire: Wire, patience_s: float) -> None:
        self.address = address
        self._ray, self._wire, self._patience_s = ray, wire, patience_s
        self._group: Any = None
        self._bundles: Sequence[Bundle] = ()
        self._runs: dict[Any, tuple[int, Any]] = {}

    def own_bundle(self, num_cpus: float) -> Bundle:
        """So many CPUs of this host, or as many as Ray may give there; none if that is nothing."""
        own = self._ray.get_runtime_context().get_node_id()
        (resources,) = (node["Resources"] for node in self._ray.nodes() if node["NodeID"] == own)
        num_cpus = min(num_cpus, resources.get("CPU", 0.0))
        mark = next(name for name in resources if name.startswith("node:") and "internal" not in name)
        return {"CPU": num_cpus, mark: 0.001} if num_cpus else {}

    def place(self, bundles: Sequence[Bundle], strategy: str, wanted: str) -> None:
        """Find room for bundles, by one of Ray's strategies.

        Args:
            wanted: what for, in front of a message.

        Raises:
            StartupError: there is no room; the message says what there is.
        """
        self._bundles = bundles
        self._group = self._ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
        until = time.monotonic() + self._patience_s
        while not self._group.wait(LOOK_S):
            self._check_wanted()
            if time.monotonic() > until:
                raise StartupError(
                    f"Ray has found no room for {wanted} within {self._patience_s:g} s: {self._room()}; fewer of them "
                    "or --cpu-threads, or more hosts"
                )

    def hosts(self) -> list[str]:
        """The host of each bundle, as far as there is one at the moment."""
        found = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [found.get(index, "") for index in range(len(self._bundles))]

    def start(self, kind: type, name: str, bundle: int, number: int, told: tuple[Any, ...]) -> None:
        """Have an actor of a class, in one of the places, `run` what it is told; it is known by `number`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": self._bundles[bundle]["CPU"], "scheduling_strategy": strategy}
        actor = self._ray.remote(kind).options(name=name, max_restarts=0, **options).remote()
        self._runs[actor.run.remote(*told)] = number, actor

    def ended(self) -> list[tuple[int, str]]:
        """Numbers of actors that have ended within a moment, and why."""
        self._check_wanted()
        if not self._runs:
            time.sleep(LOOK_S)
            return []
        ended = self._ray.wait(list(self._runs), timeout=LOOK_S)[0]
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
