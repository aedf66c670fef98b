"""The process that knows Ray: `python -m quire.executor.ray_cluster FD`, which the engine core starts.

Ray brings threads, signal handlers and servers, and none of that into the core. What it is for is to find hosts with
room, and to start there one actor for each rank; the ranks speak to the core themselves, by sockets of ours.

Invariant: when the other end of the socket FD is closed, actors, placement group and a Ray of our own end, with all
that it has written.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.errors import QuireError, StartupError
from quire.executor.messages import Failed
from quire.executor.ray_host import RayHost
from quire.executor.ray_messages import Come, FromRay, Lost, Placed, Wanted
from quire.executor.starter import LOOPBACK
from quire.executor.wire import Wire
from quire.logging_setup import configure_logging
from quire.processes import PARENTS_SIGNALS

ADDRESS = "RAY_ADDRESS"
"""The variable by which all of Ray's tools know the cluster to join."""
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


def main() -> int:
    configure_logging()
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    try:
        _serve(wire)
    except EOFError:
        return 0
    except QuireError as error:
        _tell(wire, Failed.of(error))
        return 1
    return 0


def _serve(wire: Wire) -> None:
    """Until the engine is gone, which is an EOFError."""
    wanted = msgspec.msgpack.decode(wire.recv(), type=Wanted)
    config = EngineConfig.decoded(wanted.config)
    bundle, size = {"CPU": float(config.device.cpu_threads or 1)}, config.parallel.num_ranks
    with _ray(wanted.directory, bundle["CPU"] * size) as (ray, address):
        group, nodes = _placed(ray, [bundle] * size, wanted.patience_s, wire)
        order = sorted(range(size), key=lambda index: (nodes[index], index))
        hosts = [nodes[index] for index in order]
        _tell(wire, Placed(address, hosts))
        come = msgspec.msgpack.decode(wire.recv(), type=Come)
        runs = {}
        for rank, index in enumerate(order):
            actor = _actor(ray, rank, group, index, bundle)
            told = wanted.config, rank, hosts.count(hosts[rank]), come.address, come.port, come.key
            runs[actor.run.remote(*told)] = rank, actor
        _watch(ray, runs, wire)


@contextmanager
def _ray(directory: str, num_cpus: float) -> Iterator[tuple[Any, str]]:
    """Ray, joined or of our own, and this host's address there.

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
        options |= {"_temp_dir": f"{directory}/ray", "object_store_memory": _OBJECT_STORE_BYTES}
    import ray

    try:
        try:
            ray.init(**options)
        except Exception as error:  # of many kinds, all Ray's
            what = f"cannot be joined at {ADDRESS}={address}" if address else f"does not start in {directory}"
            raise StartupError(f"Ray {what}: {_first_line(error)}") from error
        util: Any = ray.util
        yield ray, util.get_node_ip_address() if address else LOOPBACK
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


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


def _placed(
    ray: Any, bundles: Sequence[Mapping[str, float]], patience_s: float, wire: Wire
) -> tuple[Any, list[str]]:
    """A placement group on as few hosts as possible, and the host of each bundle.

    Raises:
        StartupError: there is no room; the message says for what, and what there is.
    """
    group = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    until = time.monotonic() + patience_s
    while not group.wait(LOOK_S):
        _check_wanted(wire)
        if time.monotonic() > until:
            raise StartupError(
                f"Ray has found no room for {len(bundles)} ranks of {bundles[0]['CPU']:g} CPUs each within "
                f"{patience_s:g} s: {_room(ray)}; fewer ranks or --cpu-threads, or more hosts"
            )
    found = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return group, [found[index] for index in range(len(bundles))]


def _room(ray: Any) -> str:
    sizes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources().get("CPU", 0)
    return f"its hosts have {' + '.join(f'{size:g}' for size in sizes)} CPUs, of which {free:g} are free"


def actor_name(pid: int, rank: int) -> str:
    """What Ray calls the actor of a rank of an engine, by the process that knows Ray."""
    return f"{socket.gethostname()}.{pid}.rank{rank}"


def _actor(ray: Any, rank: int, group: Any, index: int, bundle: Mapping[str, float]) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    options = {"num_cpus": bundle["CPU"], "scheduling_strategy": strategy, "max_restarts": 0}
    options["name"] = actor_name(os.getpid(), rank)
    return ray.remote(RayHost).options(**options).remote()


def _watch(ray: Any, runs: dict[Any, tuple[int, Any]], wire: Wire) -> None:
    """Tell the engine which actors end, and why."""
    while True:
        _check_wanted(wire)
        if not runs:
            time.sleep(LOOK_S)
            continue
        for run in ray.wait(list(runs), timeout=LOOK_S)[0]:
            rank, _ = runs.pop(run)
            _tell(wire, Lost(rank, _end_of(ray, run)))


def _end_of(ray: Any, run: Any) -> str:
    try:
        how: str = ray.get(run)
    except ray.exceptions.RayTaskError as error:
        return _first_line(error.cause)
    except ray.exceptions.RayError as error:
        return f"its actor has ended: {_first_line(error)}"
    return how


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check_wanted(wire: Wire) -> None:
    """Raises EOFError: the engine is gone."""
    poll = select.poll()
    poll.register(wire.fileno(), select.POLLRDHUP)
    if poll.poll(0):
        raise EOFError("the engine is gone")


def _tell(wire: Wire, message: FromRay) -> None:
    try:
        wire.send(msgspec.msgpack.encode(message))
    except OSError as error:
        raise EOFError("the engine is gone") from error


if __name__ == "__main__":
    sys.exit(main())
