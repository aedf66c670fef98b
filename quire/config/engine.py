# SPDX-License-Identifier: Apache-2.0
"""`EngineConfig`: all configuration of one engine, one frozen child per owner; and `EngineArgs`, its flat spelling."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.arch import ModelArch
from quire.config.cache import CacheConfig, KVEventsConfig
from quire.config.device import DeviceConfig, HostShare, KernelConfig, ParallelConfig
from quire.config.fields import (
    Config,
    Parser,
    add_arguments,
    default_of,
    field_types,
    flag_of,
    info_named,
    plain_type,
)
from quire.config.kv_store import KVStoreConfig
from quire.config.model import LoadConfig, LoRAConfig, ModelConfig, StructuredOutputsConfig
from quire.config.multimodal import MultimodalConfig
from quire.config.observability import ObservabilityConfig
from quire.config.pooling import PoolingSpec
from quire.config.quantization import QuantizationConfig
from quire.config.scheduler import SchedulerConfig, SupervisionConfig
from quire.config.speculative import SpeculativeConfig
from quire.config.training import TrainingConfig
from quire.plugins import place_of
from quire.vllm_names.option_values import translated_values
from quire.vllm_names.options import OPTIONS
from quire.vllm_names.row import suggestion, translated


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of one engine.

    As the user gives it, fields may say 0 or "auto". `quire.engine.startup.prepare` returns a copy in which
    every such field has a value and what stands below them is set; the core and the worker only see that copy.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    kv_store: KVStoreConfig = field(default_factory=KVStoreConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    model_dir: str = ""
    # State of the checkpoint's files when first read (`quire.engine.file_states`); empty: unchecked.
    files: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    # Class that serves the model, as "module:Name", so that other processes find registered classes.
    model_class: str = ""
    model_arch: ModelArch | None = None
    pooling: PoolingSpec | None = None  # Pooling settings; None: the model generates.
    draft: EngineConfig | None = None  # Prepared config of the draft model; None: there is none.
    # `max_model_len` is an upper limit, lowered to what the KV cache can hold.
    fit_max_model_len: bool = False
    tells_cache: bool = False  # Report prefix cache changes to a router.
    share: HostShare | None = None  # Share of the host for one of several replicas; None: the only replica.
    torch_device: str = ""  # torch's name of the device type, set by the worker; a plug-in's name may differ.
    meeting: str = ""  # Directory where replicas that share experts meet; a new one for each start.

    @property
    def arch(self) -> ModelArch:
        """Model architecture; only a prepared config has one."""
        assert self.model_arch is not None, "EngineConfig was used before prepare()"
        return self.model_arch

    @property
    def embedding_bytes(self) -> int:
        """Most bytes of one embedding of an image, which are float32; without a model, of 8 values."""
        if self.model_arch is None:
            return 32
        part_of = self.model_arch.part_of
        return 4 * self.model_arch.media_size * (1 if part_of is None else part_of.vectors_per_embedding)

    def on_torch_device(self, name: str) -> EngineConfig:
        """Return a copy, and of the draft model's configuration one in it, whose device torch calls by this name."""
        draft = self.draft and self.draft.on_torch_device(name)
        return replace(self, torch_device=name, draft=draft)

    def with_weights(self, model_dir: str) -> EngineConfig:
        """Return a copy with weights of another directory, also for a draft model that is in the same checkpoint.

        They are read as they are: no packed form of them is looked for or kept. Their files are unchecked until
        `files` is set.
        """
        draft, load = self.draft, replace(self.load, enable_packed_weights_cache=False, load_format="auto")
        if draft is not None and draft.model_dir == self.model_dir:
            draft = draft.with_weights(model_dir)
        return replace(self, model_dir=model_dir, load=load, files={}, draft=draft)

    def without_adapters(self) -> EngineConfig:
        """Return a copy whose requests may not name adapters."""
        return replace(self, lora=LoRAConfig())

    @property
    def serves_adapters(self) -> bool:
        """True if requests may name adapters."""
        return self.lora.enable_lora

    @property
    def max_adapters(self) -> int:
        """Most different adapters of one step; 0: none are served."""
        return self.lora.max_loras if self.lora.enable_lora else 0

    @property
    def num_kept_adapters(self) -> int:
        """Most adapters in the host's memory."""
        return self.lora.num_kept

    @property
    def max_added_tokens(self) -> int:
        """Tokens that an adapter may add to the vocabulary; 0 with a draft model, which could not read them."""
        knows_all = self.draft is None and self.pooling is None
        return self.lora.lora_extra_vocab_size if self.lora.enable_lora and knows_all else 0

    @property
    def num_disjoint_steps(self) -> int:
        """Steps in flight that contain different requests, as pipeline stages need; 1: they may share requests."""
        return self.scheduler.max_steps_in_flight if self.parallel.pipeline_parallel_size > 1 else 1

    @property
    def num_tokens_ahead(self) -> int:
        """Most tokens of a request that are planned before they are sampled."""
        return 0 if self.num_disjoint_steps > 1 else self.scheduler.max_steps_in_flight - 1

    @staticmethod
    def from_args(**args: Any) -> EngineConfig:
        """Build a config from flat names, as `LLM(...)` and the command line give them; None means the default.

        Raises:
            TypeError: a name is neither a config field nor one of vLLM's options.
            ConfigError: a value is out of range, or vLLM's option is not supported.
        """
        args = translated_values(translated(args, OPTIONS, engine_fields()))
        by_child: dict[str, dict[str, Any]] = {}
        for name, value in args.items():
            if name not in engine_fields():
                raise TypeError(_unknown_field(name))
            if value is not None:
                child, owner = engine_fields()[name]
                by_child.setdefault(child, {})[name] = _coerced(value, owner, name)
        children: dict[str, Any] = {child: _CHILDREN[child](**values) for child, values in by_child.items()}
        return EngineConfig(**children)

    def encoded(self) -> bytes:
        """Serialize for another process, as msgpack since JSON has no infinities."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decoded(encoded: bytes) -> EngineConfig:
        """Deserialize the output of `encoded`."""
        return msgspec.msgpack.decode(encoded, type=EngineConfig)

    def evolve(self, **args: Any) -> EngineConfig:
        """Return a copy with some fields replaced, by flat names."""
        changed = self
        for name, value in args.items():
            child, _ = engine_fields()[name]
            new_child = dataclasses.replace(getattr(changed, child), **{name: value})
            changed = dataclasses.replace(changed, **{child: new_child})
        return changed


_CHILDREN: dict[str, type[Config]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "device": DeviceConfig,
    "kernels": KernelConfig,
    "load": LoadConfig,
    "quantization": QuantizationConfig,
    "lora": LoRAConfig,
    "observability": ObservabilityConfig,
    "kv_events": KVEventsConfig,
    "kv_store": KVStoreConfig,
    "structured_outputs": StructuredOutputsConfig,
    "speculative": SpeculativeConfig,
    "supervision": SupervisionConfig,
    "multimodal": MultimodalConfig,
    "training": TrainingConfig,
}


@functools.cache
def engine_fields() -> dict[str, tuple[str, type[Config]]]:
    """Flat field name -> (child's name in EngineConfig, child's class); names are unique over all children."""
    owners: dict[str, tuple[str, type[Config]]] = {}
    for child, owner in _CHILDREN.items():
        for config_field in dataclasses.fields(owner):
            assert config_field.name not in owners, f"two configs have a field {config_field.name}"
            owners[config_field.name] = (child, owner)
    return owners


def child_configs() -> dict[str, type[Config]]:
    """Child name -> class, in the order in which help and docs show them."""
    return dict(_CHILDREN)


def _coerced(value: Any, owner: type[Config], name: str) -> Any:
    """Accept the spellings Python callers use: lists for tuples, one for a list of it, classes and dtypes for names."""
    expected, info = field_types(owner)[name], info_named(owner, name)
    if isinstance(value, str) and info.words:
        return dict(info.words).get(value, value)
    if plain_type(expected) is tuple:
        values = (value,) if isinstance(value, str | int | type) else tuple(value)
        return tuple(place_of(one, flag_of(name)) for one in values) if info.places else values
    if info.places and isinstance(value, type):
        return place_of(value, flag_of(name))
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    return value


def _unknown_field(name: str) -> str:
    return f"unknown engine argument {name!r}{suggestion(name, engine_fields())}"


def _with_fields(cls: type[EngineArgs]) -> type[EngineArgs]:
    """Make a dataclass of all engine options with their defaults."""
    for name, (_, owner) in engine_fields().items():
        config_field = next(one for one in dataclasses.fields(owner) if one.name == name)
        cls.__annotations__[name] = field_types(owner)[name]
        setattr(cls, name, field(default_factory=functools.partial(default_of, config_field)))
    return dataclass(init=False)(cls)


@_with_fields
class EngineArgs:
    """Configuration by flat names; a dataclass with a field for each engine option, which may be assigned.

    Raises:
        TypeError: a name is no engine option.
        ConfigError: a value is out of range.
    """

    def __init__(self, model: str | None = None, **args: Any) -> None:
        config = EngineConfig.from_args(model=model, **args)
        for name, (child, _) in engine_fields().items():
            setattr(self, name, getattr(getattr(config, child), name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def create_engine_config(self) -> EngineConfig:
        """Return the configuration for these arguments; raises ConfigError as the constructor does."""
        return EngineConfig.from_args(**{name: getattr(self, name) for name in engine_fields()})

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add a flag for each option to an argparse parser, and return it."""
        for owner in child_configs().values():
            add_arguments(parser, owner)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the arguments of parsed flags; other entries of the namespace are ignored.

        Raises:
            ConfigError: a value is out of range.
        """
        given = {name: value for name, value in vars(args).items() if name in engine_fields()}
        return cls(**given)
