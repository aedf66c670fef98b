"""The contract between the engine core and whatever computes.

Invariant: an executor knows nothing of requests beyond the plan it is given; the core calls, in this order,
`load`, `kv_cache_specs`, `available_kv_bytes`, `initialize_kv_cache`, then `execute_model` once per step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, SwapCosts
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput


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
    def available_kv_bytes(self) -> int:
        """Bytes that may be used for the KV cache, measured after loading and warm-up."""

    def swap_costs(self) -> SwapCosts:
        """Rates by which swapping and recomputing compare, measured after loading and warm-up."""
        return SwapCosts()

    @abstractmethod
    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache once; it never grows."""

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: forward pass and sampling."""

    def shutdown(self) -> None:
        """Release what the executor holds; calling it twice is fine."""
        return None
