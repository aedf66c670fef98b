# SPDX-License-Identifier: Apache-2.0
"""Executor of a program that a launcher such as torchrun starts once per rank.

Invariant: every rank has a scheduler of its own, and all plan the same, because plans depend only on common state:
the program, the configuration and the cache size, but no clock. Ranks compare their plans before each step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from quire.adapters import AdapterRequest, adapter_error
from quire.config import EngineConfig
from quire.distributed.gloo import Gloo, Heartbeats, local_address_towards, tcp_store
from quire.distributed.group import ALONE, Group, different_ranks
from quire.errors import ConfigError, EngineError
from quire.executor.rank_placement import memory_per_rank, num_ranks_sharing_memory, rank_config
from quire.executor.ranks.places import JOIN_S, check_ranks_agree, with_fast_transport
from quire.executor.uniproc import UniprocExecutor, select_own_device
from quire.kv_cache.spec import KVMemory, SwapCosts
from quire.layers.shard import Shard
from quire.media import EncodeProgress, MediaItem
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_outputs_params import StructuredOutputsParams

STEP_TIMEOUT_S = 600.0  # A rank's program may do something else between two steps.


@dataclass(frozen=True)
class LauncherEnvironment:
    """Launcher's environment: rank numbers and meeting address."""

    rank: int
    size: int
    local_size: int  # Ranks of this host.
    address: str
    port: int
    store_is_there: bool  # The launcher serves a store at that address; else rank 0 does.

    @staticmethod
    def read(environment: Mapping[str, str]) -> LauncherEnvironment:
        """Read torchrun's variables, which other launchers use as well.

        Raises:
            ConfigError: names the variables that are missing or invalid.
        """
        wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in wanted if not environment.get(name)]
        if missing:
            raise ConfigError(
                "--distributed-executor-backend external_launcher requires a launcher, such as torchrun, that sets "
                f"{', '.join(wanted)}; missing: {', '.join(missing)}"
            )
        size = _number(environment, "WORLD_SIZE", 1, 1 << 16)
        return LauncherEnvironment(
            rank=_number(environment, "RANK", 0, size - 1),
            size=size,
            local_size=_number({"LOCAL_WORLD_SIZE": str(size), **environment}, "LOCAL_WORLD_SIZE", 1, size),
            address=environment["MASTER_ADDR"],
            port=_number(environment, "MASTER_PORT", 1, 65535),
            store_is_there=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


class ExternalLauncherExecutor(UniprocExecutor):
    """Worker of one rank, in the engine's process; the others are in other processes of the same program.

    Raises:
        StartupError: not all ranks join, or they disagree on the model or configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._launch = LauncherEnvironment.read(os.environ)
        self._plans: Group = ALONE
        group = self._join(config)
        super().__init__(rank_config(config, self._launch.local_size), Shard.of_group(group))
        self._group = group

    def kv_memory(self) -> KVMemory:
        """Return the same memory on all ranks; otherwise their caches, and so their plans, would differ."""
        own = super().kv_memory()
        costs, default = own.swap_costs, -1 if own.default_bytes is None else own.default_bytes
        numbers = [own.free_bytes, default, costs.copied_bytes_per_s, costs.computed_tokens_per_s]
        found = [
            KVMemory(
                int(free), own.reason, None if default < 0 else int(default), SwapCosts(copied, computed)
            )
            for free, default, copied, computed in (
                part.tolist() for part in self._plans.all_gather(torch.tensor(numbers, dtype=torch.float64))
            )
        ]
        return memory_per_rank(
            found, [num_ranks_sharing_memory(self.config, self._launch.local_size)] * len(found)
        )

    def prepare_grammar(self, params: StructuredOutputsParams) -> Future[None]:
        """Compile synchronously: background completion times would differ between ranks."""
        done = super().prepare_grammar(params)
        wait([done])
        return done

    def prepare_adapter(self, request: AdapterRequest) -> Future[None]:
        """Load synchronously; an adapter that fails on one rank fails on all, so that plans are equal."""
        done = super().prepare_adapter(request)
        wait([done])
        failed = self._queue.start(partial(self._ranks_where, done.exception() is not None))()
        if not failed or done.exception() is not None:
            return done
        elsewhere: Future[None] = Future()
        problem = f"rank {failed[0]} cannot use it; see its log"
        elsewhere.set_exception(adapter_error(f"adapter {request.name!r}: {problem}"))
        return elsewhere

    def encode_media(self, items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        """Encode until all ranks are done; one that fails on one rank fails on all, so that plans are equal."""
        own = super().encode_media(items, math.inf)
        failed = dict(own.failed)
        for item in items:
            ranks = self._queue.start(partial(self._ranks_where, item.digest in own.failed))()
            if ranks and item.digest not in failed:
                failed[item.digest] = f"rank {ranks[0]} cannot encode it; see its log"
        done = [digest for digest in own.done if digest not in failed]
        return EncodeProgress(done, failed, {digest: own.num_bytes[digest] for digest in done})

    def shutdown(self) -> None:
        super().shutdown()
        self._group.close()

    def _execute(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        (others,) = different_ranks(self._plans, [msgspec.msgpack.encode(plan)])
        if others:
            raise EngineError(
                f"ranks {', '.join(map(str, others))} planned a different step than rank 0: the program must add "
                "the same requests in the same order on every rank"
            )
        return super()._execute(plan)

    def _ranks_where(self, own: bool) -> list[int]:
        """Return the ranks with a true value."""
        said = self._plans.all_gather(torch.tensor([own]))
        return [rank for rank, other in enumerate(said) if other.item()]

    def _join(self, config: EngineConfig) -> Group:
        launch, size = self._launch, config.parallel.tensor_parallel_size
        if launch.size != size:
            raise ConfigError(
                f"the launcher has started {launch.size} ranks (WORLD_SIZE), and --tensor-parallel-size is {size}"
            )
        if size == 1:
            return ALONE
        is_one_host, device = launch.local_size == size, config.device.device
        if device != "cpu" and not is_one_host:
            raise ConfigError(
                f"--device is {device}, which requires all ranks on one host; LOCAL_WORLD_SIZE is "
                f"{launch.local_size} of {size}"
            )
        select_own_device(config, launch.rank)
        serves = launch.rank == 0 and not launch.store_is_there
        store = tcp_store(launch.address, launch.port, launch.rank, serves=serves, join_s=JOIN_S)
        self._plans = Gloo(
            launch.rank,
            size,
            store,
            address="127.0.0.1" if is_one_host else local_address_towards(launch.address, launch.port),
            join_s=JOIN_S,
            answer_s=STEP_TIMEOUT_S,
            beats=None if is_one_host else Heartbeats(launch.rank, launch.address, launch.port),
        )
        check_ranks_agree(self._plans, config)
        return with_fast_transport(self._plans, store, device, able=is_one_host)


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environment[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"{name} must be an integer of {least} to {most}, got {text!r}")
    return int(text)
