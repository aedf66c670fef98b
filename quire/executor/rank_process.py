"""A rank as a process of its own: `python -m quire.executor.rank_process DIRECTORY RANK ADDRESS FD`.

Invariant: one thread reads what the executor says on the socket FD and does it, in its order; the executor never waits
for it to read. When the other end of the socket is closed, or that of the pipe at its standard input, by which it knows
its parent, the process ends, whatever it is doing.
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

import msgspec

from quire import private_directories
from quire.config import EngineConfig
from quire.executor.agreement import check_ranks_agree
from quire.executor.messages import Call, Failed, FromRank, Returned, Step, Stepped, ToRank
from quire.executor.own_device import take_own_device
from quire.executor.places import JOIN_S, Place, meet, with_replicas
from quire.executor.rank_processes import CONFIG
from quire.executor.ray_actor import watch_actor
from quire.executor.wire import SPIN_S, Wire
from quire.kv_cache.plain import decode_kv_config, encode_specs
from quire.logging_setup import configure_logging
from quire.lora_request import LoRARequest
from quire.plugins import load_general_plugins
from quire.processes import PARENTS_SIGNALS, settle_garbage
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.vocabulary import Vocabulary
from quire.worker.devices import make_device
from quire.worker.worker import Worker

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long a rank whose parent is gone may take to end in its own way."""


class RankProcess:
    """One worker, and the ways to the executor and to the other ranks."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        wire: Wire,
        *,
        address: str,
        directory: Path,
    ) -> None:
        """`address` is this host's, as all ranks reach it, `directory` one that its ranks have in common."""
        self._config, self._rank, self._size = config, rank, config.parallel.num_ranks
        self._wire, self._address, self._directory = wire, address, directory
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToRank)
        self._place = Place()
        self._worker: Worker | None = None
        self._store: Any = None

    def run(self, *parents: int) -> int:
        """Until the executor is gone, or whoever has the other ends of these pipes, or a step fails: the exit code."""
        fds = (self._wire.fileno(), *parents)
        threading.Thread(target=self._watch, args=fds, name="quire-rank-watch", daemon=True).start()
        try:
            while self._obey(self._decoder.decode(self._wire.recv(SPIN_S))):
                pass
            return 1
        except EOFError:
            return 0
        finally:
            private_directories.remove(self._directory)
            self._place.close()
            if self._worker is not None:
                self._worker.shutdown()

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "load comes first"
        return self._worker

    def open_store(self) -> tuple[str, int] | None:
        """Where the ranks of several hosts meet, if that is here."""
        if self._rank:
            return None
        from quire.distributed.gloo import serve_store

        self._store = serve_store(self._address)
        return self._address, self._store.port

    def load(self, place: tuple[str, int] | None) -> None:
        """Build the model, with the other ranks; `place` is where those of several hosts meet."""
        load_general_plugins()
        take_own_device(self._config, self._rank)
        if self._size > 1:
            self._place = self._meet(place)
        if self._config.parallel.shares_experts:
            self._place = with_replicas(self._place, self._rank, self._config)
        device = make_device(self._config.device.device)
        self._worker = Worker(self._config, device, self._place.shard, self._place.stage)
        self._worker.load()

    def _meet(self, place: tuple[str, int] | None) -> Place:
        from quire.distributed.gloo import file_store, tcp_store  # which one rank does not need

        device = self._config.device.device
        if place is None:
            store = file_store(self._directory / "ranks", self._size)
        else:
            store = tcp_store(*place, self._rank, serves=False, join_s=JOIN_S)
        found = meet(self._rank, self._config.parallel, store, self._address, device)
        check_ranks_agree(found.world, self._config)
        return found

    def _obey(self, message: Step | Call) -> bool:
        """Whether to go on."""
        if isinstance(message, Call):
            self._answer(message)
            return True
        try:
            result = self.worker.submit(message.plan)
            output = result() if self._place.stage.is_last else None
        except Exception as error:  # the last boundary of the process: log, tell, end
            logger.exception("rank %d: step %d failed", self._rank, message.plan.step_id)
            self._send(Failed.of(error))
            return False
        if output is not None and self._place.has_results:
            self._send(Stepped(output))
        return True

    def _answer(self, call: Call) -> None:
        try:
            result = CALLS[call.method](self, *call.args)
        except Exception as error:  # whoever called hears of it
            self._fail(call, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._answer_late(call, done))
        else:
            self._send(Returned(call.number, result))

    def _answer_late(self, call: Call, done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            self._send(Returned(call.number, None))
        else:
            self._fail(call, error)

    def _fail(self, call: Call, error: BaseException) -> None:
        logger.info("rank %d: %s failed", self._rank, call.method, exc_info=error)
        self._send(Failed.of(error, call.number))

    def _send(self, message: FromRank) -> None:
        try:
            self._wire.send(self._encoder.encode(message))
        except OSError:
            logger.info("rank %d: nobody hears it any more", self._rank)

    def _watch(self, *fds: int) -> None:
        """Until the other end of one of these is closed; nobody needs this rank then."""
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
    "use_vocabulary": lambda rank, plain: _use_vocabulary(rank.worker, plain),
    "prepare_grammar": lambda rank, plain: rank.worker.grammars.prepare(
        msgspec.convert(plain, StructuredOutputsParams)
    ),
    "prepare_adapter": lambda rank, plain: rank.worker.adapters.prepare(msgspec.convert(plain, LoRARequest)),
    "drop_adapter": lambda rank, key: rank.worker.adapters.drop(key),
}
"""What an executor may ask of a rank, from plain data to plain data, or to a future without a result."""


def _initialize_kv_cache(worker: Worker, plain: dict[str, Any]) -> None:
    worker.initialize_kv_cache(decode_kv_config(plain))
    settle_garbage()


def _use_vocabulary(worker: Worker, plain: dict[str, Any]) -> None:
    vocabulary = msgspec.convert(plain, Vocabulary)
    worker.grammars.use_vocabulary(lambda: vocabulary)


def main() -> int:
    configure_logging()
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    directory, rank, address, fd = sys.argv[1:]
    config = EngineConfig.decoded((Path(directory) / CONFIG).read_bytes())
    configure_logging(config.observability.log_level, config.observability.log_format)
    if config.parallel.distributed_executor_backend == "ray":
        watch_actor()
    wire = Wire(socket.socket(fileno=int(fd)))
    process = RankProcess(config, int(rank), wire, address=address, directory=Path(directory))
    return process.run(sys.stdin.fileno())


if __name__ == "__main__":
    sys.exit(main())
