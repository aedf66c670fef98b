"""Configuration: one frozen, validated dataclass per owner, bundled in `EngineConfig`."""

from quire.config.arch import ModelArch, RopeScaling
from quire.config.cache import CacheConfig
from quire.config.device import DeviceConfig, KernelConfig, ParallelConfig
from quire.config.engine import EngineArgs, EngineConfig, child_configs, engine_fields
from quire.config.kv_events import KVEventsConfig
from quire.config.lora import LoRAConfig
from quire.config.model import DEMO_MODEL, IN_THE_BOX, LoadConfig, ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.quantization import QuantizationConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.server import ServerConfig
from quire.config.structured_outputs import StructuredOutputsConfig

__all__ = [
    "DEMO_MODEL",
    "IN_THE_BOX",
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
