# SPDX-License-Identifier: Apache-2.0
"""Interface of features that take part in a worker's steps, composed once from `quire.features.WORKER_FEATURES`.

`WorkerFeature` lives as long as the worker: memory, further models, and calls of the executor. `RunnerPart` lives as
long as a model runner: state per row, and hooks around the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.config import EngineConfig
from quire.features import WORKER_FEATURES
from quire.kv_cache.spec import KVCacheConfig
from quire.layers.shard import WHOLE, Shard
from quire.models.base import CausalLM
from quire.models.stages import ALL, Stage
from quire.plugins import import_place
from quire.scheduler.output import NewRequestData, SchedulerOutput
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs
from quire.worker.launched_step import LaunchedStep, StepPart
from quire.worker.pipeline import LanguageModel
from quire.worker.sampler import Sampler
from quire.worker.sampler.feature import LogitsFeature

if TYPE_CHECKING:
    from quire.worker.devices import Device


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """Parts of a model runner that features build on.

    Attributes:
        config: prepared.
        sampler: sampler of rows without added tokens.
        slice_size: most rows of logits that exist at once.
        is_rehearsal: the steps are run to measure memory.
    """

    model: LanguageModel
    config: EngineConfig
    kv_config: KVCacheConfig
    batch: InputBatch
    device: Device
    sampler: Sampler
    slice_size: int
    is_rehearsal: bool


class RunnerPart:
    """Part of a model runner that belongs to a feature; every method here does nothing."""

    reads_all_tokens: bool = False
    """True if `follow` or `compute` reads hidden states of tokens that are not sampled."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the state of a request that was given a row."""
        return None

    def remove_request(self, row: int) -> None:
        """Drop the state of a row."""
        return None

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Process a step's hidden states [T, H], perhaps padded, as a part of its forward pass."""
        return None

    def compute(self, inputs: StepInputs, hidden: Tensor) -> StepPart | None:
        """Launch the feature's work on a step after its forward pass; None: it adds nothing to the result."""
        return None

    def calibrate(self, launch: Callable[[SchedulerOutput], LaunchedStep]) -> None:
        """Run steps of no request while none has a block of the cache; they may leave nothing behind.

        Not called after an update of the weights during which requests keep their blocks.
        """
        return None


class WorkerFeature:
    """Feature of one worker; every method here does nothing.

    Args:
        config: prepared.
        shard: tensor-parallel shard of each layer.
        stage: pipeline stage of the model.
    """

    def __init__(self, config: EngineConfig, device: Device, shard: Shard, stage: Stage) -> None:
        self._config = config
        self._device = device
        self._shard = shard
        self._stage = stage

    @classmethod
    def is_wanted(cls, config: EngineConfig) -> bool:
        """Return whether a worker with this config needs the feature."""
        return True

    @classmethod
    def step_bytes(cls, config: EngineConfig) -> int:
        """Return the bytes that the feature takes in the largest step, beside those of its models."""
        return 0

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """Functions for the executor, by name."""
        return {}

    @property
    def models(self) -> Sequence[CausalLM]:
        """Further models whose layers share the KV cache."""
        return ()

    @property
    def rehearsed_models(self) -> Sequence[CausalLM]:
        """Models of `models` that have steps of their own, which the rehearsal runs as well."""
        return ()

    def load(self, model: CausalLM) -> None:
        """Load what the feature needs; the model was loaded, or loaded again."""
        return None

    def unload(self) -> None:
        """Drop what `load` has loaded."""
        return None

    def prepare(self, config: EngineConfig, model: CausalLM) -> Callable[[], None]:
        """Load what the feature needs of a model with new weights; calling the result uses it in place of the old."""

        def use() -> None:
            self._config = config
            self.load(model)

        return use

    def launch_kernels(self) -> None:
        """Launch the kernels that no rehearsed step reaches, so that they are compiled."""
        return None

    def attach(self, batch: InputBatch) -> None:
        """Add the feature's state to the rows of a new batch."""
        return None

    def make_logits_feature(self, batch: InputBatch, vocab_size: int) -> LogitsFeature[Any] | None:
        """Return a sampling feature for a sampler of this width, if there is one."""
        return None

    def make_part(self, context: RunnerContext) -> RunnerPart | None:
        """Return the feature's part of a new model runner, which samples or pools; None: it has none."""
        return None

    def close(self) -> None:
        """Release all resources; may be called twice."""
        return None


def wanted_features(config: EngineConfig) -> dict[str, type[WorkerFeature]]:
    """Return the classes of the features that a config needs, in the order of `WORKER_FEATURES`."""
    classes: dict[str, type[WorkerFeature]] = {
        name: import_place(place) for name, place in WORKER_FEATURES.items()
    }
    return {name: kind for name, kind in classes.items() if kind.is_wanted(config)}


def worker_features(
    config: EngineConfig, device: Device, shard: Shard = WHOLE, stage: Stage = ALL
) -> dict[str, WorkerFeature]:
    """Make the features that a config needs, in the order of `WORKER_FEATURES`."""
    return {name: kind(config, device, shard, stage) for name, kind in wanted_features(config).items()}


def step_bytes(config: EngineConfig) -> int:
    """Return the bytes that all features take in the largest step."""
    return sum(kind.step_bytes(config) for kind in wanted_features(config).values())
