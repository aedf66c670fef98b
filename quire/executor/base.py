"""The contract between the engine core and whatever computes.

Invariant: an executor knows nothing of requests beyond the plan it is given; the core calls, in this order,
`load`, `kv_cache_specs`, `kv_memory`, `initialize_kv_cache`, then `submit` and `collect` once per step; with no step in
flight and no row left it may call `sleep`, and then steps come after `wake_up` for all that sleeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory
from quire.lora_request import LoRARequest
from quire.plugins import PluginTable, import_subclass, subclass_of
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.vocabulary import Vocabulary


class Executor(ABC):
    """Owns one or more workers."""

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
        """Layer name -> what it needs of the cache."""

    @abstractmethod
    def kv_memory(self) -> KVMemory:
        """Memory that the KV cache may take, measured after loading and warm-up."""

    @abstractmethod
    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache once; it never grows."""

    @abstractmethod
    def submit(self, plan: SchedulerOutput) -> None:
        """Hand over a step: forward pass and sampling. Steps are executed in the order in which they come.

        Returns without waiting for it where the device can work while the host goes on.
        """

    @abstractmethod
    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step that was submitted and not collected yet.

        Raises:
            Exception: what went wrong in that step; no later step was executed, and none may be submitted.
        """

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step, with none in flight, from beginning to end."""
        self.submit(plan)
        return self.collect()

    def take_part(self) -> None:
        """Compute, in a step in which this replica has nothing to compute, for others that share its experts.

        Called in the place of a step; returns when it is done.
        """
        raise NotImplementedError("replicas share no experts in this executor")

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Give memory back to the system: that of the KV cache, whose content is lost, and at level 2 the weights'.

        At level 1 weights stay in the host's memory. What sleeps already, and as deep, is left as it is.
        """

    @abstractmethod
    def wake_up(self, tag: str) -> None:
        """Have the "weights" or the "kv_cache" (of the same size, empty) again; a cache after the weights.

        Raises:
            StartupError: they cannot be loaded, or memory does not suffice; they sleep on.
        """

    def use_vocabulary(self, source: Callable[[], Vocabulary]) -> None:
        """Where to find the model's tokens, in case that a request is constrained to a grammar."""
        return None

    def prepare_grammar(self, params: StructuredOutputsParams) -> Future[None]:
        """Compile a constraint in the background; done when a step with it would not wait. It may be done at once.

        A constraint that cannot be compiled is done as well, and fails the requests that have it.
        """
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def prepare_adapter(self, request: LoRARequest) -> Future[None]:
        """Read an adapter in the background; done when a step with it would not wait. It may be done at once.

        One that cannot be used is done with a ValidationError.
        """
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def drop_adapter(self, key: str) -> None:
        """Let go of an adapter that was prepared, wherever it is, once the steps that were submitted have run.

        One that cannot be used is dropped as well: some ranks may have it.
        """
        return None

    def shutdown(self) -> None:
        """Release what the executor holds; calling it twice is fine."""
        return None


FLAG = "--distributed-executor-backend"
EXECUTORS: PluginTable[type[Executor]] = PluginTable(
    "quire.executors",
    FLAG,
    {
        "uni": "quire.executor.uniproc:UniprocExecutor",
        "mp": "quire.executor.multiproc:MultiprocExecutor",
        "ray": "quire.executor.ray_executor:RayExecutor",
        "external_launcher": "quire.executor.external_launcher:ExternalLauncherExecutor",
        "null": "quire.executor.null:NullExecutor",
    },
    subclass_of(Executor),
)
"""An executor's module is imported when it is asked for, so the null executor runs without torch."""


def resolve_executor(name: str) -> type[Executor]:
    """The executor class of a name, as `--distributed-executor-backend` gives it.

    Raises:
        ConfigError: there is none of that name, or a class of others' does not fit.
    """
    if ":" in name:
        found: type[Executor] = import_subclass(name, Executor, FLAG)
        return found
    return EXECUTORS.resolve(name)
