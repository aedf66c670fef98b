# SPDX-License-Identifier: Apache-2.0
"""Interface between the engine core and an executor.

Invariant: an executor sees requests only through plans. The core calls, in this order, `load`, `kv_cache_specs`,
`kv_memory`, `initialize_kv_cache`, then `submit` and `collect` once per step. Without steps in flight and rows it may
call `sleep`; steps then follow `wake_up` of all sleeping parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from quire.config import EngineConfig
from quire.executor.feature_calls import FeatureCalls
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory
from quire.plugins import PluginTable, import_subclass, subclass_of
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput


def _forget(request_ids: Sequence[str]) -> None:
    """Keep no record."""


def _forget_loading(stage: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
    """Keep no record."""


class Executor(FeatureCalls):
    """Owner of one or more workers.

    Attributes:
        note_encoding: receives the requests whose media are encoded next, before each `encode_media`; none after it.
        note_loading: receives the stage of loading ("weights", "warm_up", "kv_cache"), with the bytes of weights read
            so far and altogether, if known.
    """

    note_encoding: Callable[[Sequence[str]], None] = staticmethod(_forget)
    note_loading: Callable[..., None] = staticmethod(_forget_loading)

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def load(self) -> None:
        """Build the model and load its weights.

        Raises:
            StartupError: the checkpoint cannot be loaded; the message names the file and tensor.
        """

    @abstractmethod
    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        """Return layer name -> its cache spec."""

    @abstractmethod
    def kv_memory(self) -> KVMemory:
        """Return the memory available to the KV cache, measured after loading and warm-up."""

    @abstractmethod
    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache once; it never grows."""

    @abstractmethod
    def submit(self, plan: SchedulerOutput) -> None:
        """Submit a step: forward pass and sampling. Steps are executed in order.

        Returns without waiting if the device works asynchronously.
        """

    @abstractmethod
    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest submitted step.

        Raises:
            Exception: error of that step; no later step was executed, and none may be submitted.
        """

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to completion, with none in flight."""
        self.submit(plan)
        return self.collect()

    def shutdown(self) -> None:
        """Release all resources; may be called twice."""
        return None


FLAG = "--distributed-executor-backend"
EXECUTORS: PluginTable[type[Executor]] = PluginTable(
    "quire.executors",
    FLAG,
    {
        "uni": "quire.executor.uniproc:UniprocExecutor",
        "mp": "quire.executor.ranks.multiproc:MultiprocExecutor",
        "ray": "quire.executor.ranks.ray_executor:RayExecutor",
        "external_launcher": "quire.executor.ranks.external_launcher:ExternalLauncherExecutor",
        "null": "quire.executor.null:NullExecutor",
    },
    subclass_of(Executor),
)  # Modules are imported on demand, so the null executor runs without torch.


def resolve_executor(name: str) -> type[Executor]:
    """Return the executor class for a value of `--distributed-executor-backend`.

    Raises:
        ConfigError: there is none of that name, or the plug-in class does not fit.
    """
    if ":" in name:
        found: type[Executor] = import_subclass(name, Executor, FLAG)
        return found
    return EXECUTORS.resolve(name)
