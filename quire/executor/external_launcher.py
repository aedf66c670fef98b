"""The executor of a program that a launcher such as torchrun starts once for each rank.

Invariant: every rank has a scheduler of its own, and all plan the same, because all that plans depend on is the same:
the program, the configuration and the room in the cache, but no clock. Before each step they compare their plans.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from quire.config import EngineConfig
from quire.distributed.agreement import different_ranks
from quire.distributed.beats import Beats
from quire.distributed.gloo import Gloo, address_towards, tcp_store
from quire.distributed.group import ALONE, Group
from quire.errors import ConfigError, EngineError, ValidationError
from quire.executor.agreement import check_ranks_agree
from quire.executor.host_share import config_of_rank, memory_of_ranks, num_sharing
from quire.executor.own_device import take_own_device
from quire.executor.places import JOIN_S, shortened
from quire.executor.uniproc import UniprocExecutor
from quire.kv_cache.spec import KVMemory, SwapCosts
from quire.layers.shard import Shard
from quire.lora_request import LoRARequest
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_output.params import StructuredOutputsParams

PATIENCE_S = 600.0
"""Between two steps a rank's program may do something that the others do not."""


@dataclass(frozen=True)
class Launch:
    """What the launcher has told this process: who it is, and where all meet."""

    rank: int
    size: int
    local_size: int
    """Ranks of this host."""
    address: str
    port: int
    store_is_there: bool
    """Whether the launcher has a store at that address; else rank 0 has."""

    @staticmethod
    def read(environment: Mapping[str, str]) -> Launch:
        """By torchrun's names, which others use as well.

        Raises:
            ConfigError: names the variables that are missing, or the one that is no such number.
        """
        wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in wanted if not environment.get(name)]
        if missing:
            raise ConfigError(
                "--distributed-executor-backend external_launcher wants a launcher, such as torchrun, that sets "
                f"{', '.join(wanted)}; missing: {', '.join(missing)}"
            )
        size = _number(environment, "WORLD_SIZE", 1, 1 << 16)
        return Launch(
            rank=_number(environment, "RANK", 0, size - 1),
            size=size,
            local_size=_number({"LOCAL_WORLD_SIZE": str(size), **environment}, "LOCAL_WORLD_SIZE", 1, size),
            address=environment["MASTER_ADDR"],
            port=_number(environment, "MASTER_PORT", 1, 65535),
            store_is_there=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


class ExternalLauncherExecutor(UniprocExecutor):
    """The worker of one rank, in the engine's process; the others are in other processes of the same program.

    Raises:
        StartupError: not all ranks come, or they do not agree on what is to be computed.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._launch = Launch.read(os.environ)
        self._plans: Group = ALONE
        group = self._join(config)
        super().__init__(config_of_rank(config, self._launch.local_size), Shard.of_group(group))
        self._group = group

    def kv_memory(self) -> KVMemory:
        """The same on all ranks, or their caches and so their plans would differ."""
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
        return memory_of_ranks(found, [num_sharing(self.config, self._launch.local_size)] * len(found))

    def prepare_grammar(self, params: StructuredOutputsParams) -> Future[None]:
        """At once: when a thread would be done is not the same on all ranks."""
        done = super().prepare_grammar(params)
        wait([done])
        return done

    def prepare_adapter(self, request: LoRARequest) -> Future[None]:
        """As above; what a rank cannot use, none does, or they would plan differently."""
        done = super().prepare_adapter(request)
        wait([done])
        failed = self._lane.start(partial(self._who, done.exception() is not None))()
        if not failed or done.exception() is not None:
            return done
        elsewhere: Future[None] = Future()
        problem = f"rank {failed[0]} cannot use it; its log says why"
        elsewhere.set_exception(
            ValidationError(f"adapter {request.lora_name!r}: {problem}", param="lora_request")
        )
        return elsewhere

    def shutdown(self) -> None:
        super().shutdown()
        self._group.close()

    def _execute(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        (others,) = different_ranks(self._plans, [msgspec.msgpack.encode(plan)])
        if others:
            raise EngineError(
                f"ranks {', '.join(map(str, others))} have planned another step than rank 0: the program must give "
                "the same requests in the same order on every rank"
            )
        return super()._execute(plan)

    def _who(self, own: bool) -> list[int]:
        """The ranks that say yes; all are asked at once."""
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
                f"--device is {device}, which wants all ranks on one host; LOCAL_WORLD_SIZE is {launch.local_size} of "
                f"{size}"
            )
        take_own_device(config, launch.rank)
        serves = launch.rank == 0 and not launch.store_is_there
        store = tcp_store(launch.address, launch.port, launch.rank, serves=serves, join_s=JOIN_S)
        self._plans = Gloo(
            launch.rank,
            size,
            store,
            address="127.0.0.1" if is_one_host else address_towards(launch.address, launch.port),
            join_s=JOIN_S,
            answer_s=PATIENCE_S,
            beats=None if is_one_host else Beats(launch.rank, launch.address, launch.port),
        )
        check_ranks_agree(self._plans, config)
        return shortened(self._plans, store, device, able=is_one_host)


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environment[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"{name} must be an integer of {least} to {most}, got {text!r}")
    return int(text)
