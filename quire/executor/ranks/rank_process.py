# SPDX-License-Identifier: Apache-2.0
"""Rank process: `python -m quire.executor.ranks.rank_process DIRECTORY RANK ADDRESS FD`.

Invariant: one thread receives the executor's messages on the socket FD and executes them in order; the executor never
blocks on it. When the socket, or the parent's pipe at standard input, is closed, the process ends, whatever it is
doing.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from quire.torch_import import hastened_import

with hastened_import():
    import msgspec

    from quire import private_directories
    from quire.adapters import AdapterRequest
    from quire.config import EngineConfig
    from quire.executor.ranks.handles import (
        CallFailed,
        CallReturned,
        FromRank,
        RankCall,
        Step,
        StepResult,
        ToRank,
    )
    from quire.executor.ranks.places import JOIN_S, RankGroups, check_ranks_agree, meet, with_replicas
    from quire.executor.ranks.rank_processes import CONFIG
    from quire.executor.ranks.ray_ranks import watch_actor
    from quire.executor.ranks.wire import SPIN_S, RankWire
    from quire.executor.uniproc import select_own_device
    from quire.kv_cache.spec import decode_kv_config, encode_specs
    from quire.logging_setup import configure_logging
    from quire.media import MediaItem
    from quire.plugins import load_general_plugins
    from quire.processes import GROUP_SIGNALS, freeze_garbage, leave
    from quire.structured_outputs_params import StructuredOutputsParams
    from quire.vocabulary import Vocabulary
    from quire.worker.devices import make_device
    from quire.worker.worker import Worker

logger = logging.getLogger(__name__)

GRACE_S = 2.0  # Time to end gracefully after the parent is lost.


class RankProcess:
    """One worker, with connections to the executor and to the other ranks."""

    def __init__(
        self, config: EngineConfig, rank: int, wire: RankWire, *, address: str, directory: Path
    ) -> None:
        """`address` is this host's, as all ranks reach it; `directory` is shared by its ranks."""
        self._config, self._rank, self._size = config, rank, config.parallel.num_ranks
        self._wire, self._address, self._directory = wire, address, directory
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToRank)
        self._groups = RankGroups()
        self._worker: Worker | None = None
        self._store: Any = None

    def run(self, *parents: int) -> int:
        """Serve until the socket or one of these pipes is closed, or a step fails; returns the exit code."""
        fds = (self._wire.fileno(), *parents)
        threading.Thread(target=self._watch, args=fds, name="quire-rank-watch", daemon=True).start()
        try:
            while self._execute(self._decoder.decode(self._wire.recv(SPIN_S))):
                pass
            return 1
        except EOFError:
            return 0
        finally:
            private_directories.remove(self._directory)
            self._groups.close()
            if self._worker is not None:
                self._worker.shutdown()

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "load comes first"
        return self._worker

    def open_store(self) -> tuple[str, int] | None:
        """Serve the store for ranks of several hosts on rank 0; returns its address."""
        if self._rank:
            return None
        from quire.distributed.gloo import serve_store

        self._store = serve_store(self._address)
        return self._address, self._store.port

    def load(self, place: tuple[str, int] | None) -> None:
        """Build the model, with the other ranks; `place` is the address of the multi-host store."""
        load_general_plugins()
        select_own_device(self._config, self._rank)
        if self._size > 1:
            self._groups = self._meet(place)
        if self._config.parallel.shares_experts:
            self._groups = with_replicas(self._groups, self._rank, self._config)
        device = make_device(self._config.device.device)
        self._worker = Worker(self._config, device, self._groups.shard, self._groups.stage)
        self._worker.load()

    def _meet(self, place: tuple[str, int] | None) -> RankGroups:
        from quire.distributed.gloo import file_store, tcp_store  # not needed for one rank

        device = self._config.device.device
        if place is None:
            store = file_store(self._directory / "ranks", self._size)
        else:
            store = tcp_store(*place, self._rank, serves=False, join_s=JOIN_S)
        found = meet(self._rank, self._config.parallel, store, self._address, device)
        check_ranks_agree(found.world, self._config)
        return found

    def _execute(self, message: Step | RankCall) -> bool:
        """Execute a message; False after a failed step."""
        if isinstance(message, RankCall):
            self._answer(message)
            return True
        try:
            result = self.worker.submit(message.plan)
            output = result() if self._groups.stage.is_last else None
        except Exception as error:  # last boundary of the process: log, report, end
            logger.exception("rank %d: step %d failed", self._rank, message.plan.step_id)
            self._send(CallFailed.from_error(error))
            return False
        if output is not None and self._groups.has_results:
            self._send(StepResult(output))
        return True

    def _answer(self, call: RankCall) -> None:
        try:
            result = CALLS[call.method](self, *call.args)
        except Exception as error:  # reported to the caller
            self._fail(call, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._answer_late(call, done))
        else:
            self._send(CallReturned(call.number, result))

    def _answer_late(self, call: RankCall, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self._send(CallReturned(call.number, msgspec.to_builtins(done.result())))
        else:
            self._fail(call, error)

    def _fail(self, call: RankCall, error: BaseException) -> None:
        logger.info("rank %d: %s failed", self._rank, call.method, exc_info=error)
        self._send(CallFailed.from_error(error, call.number))

    def _send(self, message: FromRank) -> None:
        try:
            self._wire.send(self._encoder.encode(message))
        except OSError:
            logger.info("rank %d: the executor is gone", self._rank)

    def _watch(self, *fds: int) -> None:
        """Thread body: end the process once one of these is closed."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLRDHUP)
        poll.poll()
        self._wire.shutdown()
        private_directories.remove(self._directory)
        time.sleep(GRACE_S)
        os._exit(1)


CALLS: dict[str, Callable[..., Any]] = {
    "open_store": RankProcess.open_store,
    "load": RankProcess.load,
    "kv_cache_specs": lambda rank: encode_specs(rank.worker.kv_cache_specs()),
    "kv_memory": lambda rank: msgspec.to_builtins(rank.worker.kv_memory()),
    "initialize_kv_cache": lambda rank, plain: _initialize_kv_cache(rank.worker, plain),
    "take_part": lambda rank: rank.worker.take_part(),
    "sleep": lambda rank, level: rank.worker.sleep(level),
    "wake_up": lambda rank, tag: rank.worker.wake_up(tag),
    "prepare_weights": lambda rank, model_dir: rank.worker.prepare_weights(model_dir),
    "commit_weights": lambda rank, keeps_cache: rank.worker.commit_weights(keeps_cache=keeps_cache),
    "drop_weights": lambda rank: rank.worker.drop_weights(),
    "call_worker": lambda rank, name, args: rank.worker.call(name, args),
    "use_vocabulary": lambda rank, plain: _use_vocabulary(rank.worker, plain),
    "prepare_grammar": lambda rank, plain: rank.worker.calls["prepare_grammar"](
        msgspec.convert(plain, StructuredOutputsParams)
    ),
    "prepare_adapter": lambda rank, plain: rank.worker.calls["prepare_adapter"](
        msgspec.convert(plain, AdapterRequest)
    ),
    "drop_adapter": lambda rank, key: rank.worker.calls["drop_adapter"](key),
    "encode_media": lambda rank, plain, budget_s: msgspec.to_builtins(
        rank.worker.encode_media(msgspec.convert(plain, list[MediaItem]), budget_s)
    ),
    "drop_media": lambda rank, digests: rank.worker.drop_media(digests),
    "open_row_store": lambda rank: msgspec.to_builtins(rank.worker.open_row_store()),
    "move_rows": lambda rank, action, rows, place: rank.worker.rows.start(action, rows, place),
}  # Executor calls: plain data to plain data, or to a future of it.


def _initialize_kv_cache(worker: Worker, plain: dict[str, Any]) -> None:
    worker.initialize_kv_cache(decode_kv_config(plain))
    freeze_garbage()


def _use_vocabulary(worker: Worker, plain: dict[str, Any]) -> None:
    vocabulary = msgspec.convert(plain, Vocabulary)
    worker.calls["use_vocabulary"](lambda: vocabulary)


def main() -> int:
    configure_logging()
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    directory, rank, address, fd = sys.argv[1:]
    config = EngineConfig.decoded((Path(directory) / CONFIG).read_bytes())
    configure_logging(config.observability.log_level, config.observability.log_format)
    if config.parallel.distributed_executor_backend == "ray":
        watch_actor()
    wire = RankWire(socket.socket(fileno=int(fd)))
    process = RankProcess(config, int(rank), wire, address=address, directory=Path(directory))
    return process.run(sys.stdin.fileno())


if __name__ == "__main__":
    leave(main())
