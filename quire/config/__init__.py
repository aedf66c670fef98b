# SPDX-License-Identifier: Apache-2.0
"""Configuration: one frozen, validated dataclass per owner, bundled in `EngineConfig`."""

from typing import TYPE_CHECKING

from quire.config.arch import ModelArch, RopeScaling
from quire.config.cache import CacheConfig, KVEventsConfig
from quire.config.device import DeviceConfig, KernelConfig, ParallelConfig
from quire.config.engine import EngineArgs, EngineConfig, child_configs, engine_fields
from quire.config.model import (
    ASSETS,
    BUNDLED_MODELS,
    DEMO_MODEL,
    DEMO_VISION,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    StructuredOutputsConfig,
)
from quire.config.observability import ObservabilityConfig
from quire.config.quantization import QuantizationConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.server import ModelRouterConfig, ServerConfig
from quire.vllm_names.imports import attributes_of

__all__ = [
    "ASSETS",
    "BUNDLED_MODELS",
    "DEMO_MODEL",
    "DEMO_VISION",
    "CacheConfig",
    "DeviceConfig",
    "EngineArgs",
    "EngineConfig",
    "KVEventsConfig",
    "KernelConfig",
    "LoRAConfig",
    "LoadConfig",
    "ModelArch",
    "ModelConfig",
    "ModelRouterConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "QuantizationConfig",
    "RopeScaling",
    "SchedulerConfig",
    "ServerConfig",
    "StructuredOutputsConfig",
    "child_configs",
    "engine_fields",
]

if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are elsewhere
