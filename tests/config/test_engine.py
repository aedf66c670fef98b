# SPDX-License-Identifier: Apache-2.0
"""`EngineConfig`: flat names in, one frozen child per owner out."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import DEMO_MODEL, EngineConfig, ServerConfig, child_configs, engine_fields
from quire.config.arch import Mamba2Arch, ModelArch
from quire.config.fields import field_types, info_of, plain_type
from quire.errors import ConfigError

QUANTIZATION_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "group_size": st.sampled_from([32, 64, 128]),
    "symmetric": st.booleans(),
    "mode": st.sampled_from(["fast", "precise", "checkpoint"]),
    "scale": st.sampled_from(["row", "tensor"]),
    "gemm": st.sampled_from(["vendor", "triton"]),
    "ignore": st.lists(st.text(min_size=1)),
}
KV_EVENTS_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "enable_kv_cache_events": st.booleans(),
    "publisher": st.sampled_from(["zmq", "null"]),
    "buffer_steps": st.integers(1, 1000),
    "topic": st.text(),
}
STRUCTURED_OUTPUTS_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "backend": st.sampled_from(["auto", "guidance"]),
    "disable_any_whitespace": st.booleans(),
    "compile_timeout_s": st.floats(0.1, 60),
    "cache_mb": st.integers(1, 1000),
}
SPECULATIVE_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "num_speculative_tokens": st.integers(1, 64),
    "adaptive": st.booleans(),
}
KV_TRANSFER_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "kv_port": st.integers(1, 60000),
    "kv_rank": st.integers(0, 3),
    "kv_load_failure_policy": st.sampled_from(["recompute", "fail"]),
}
PROFILER_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "torch_profiler_with_stack": st.booleans(),
    "max_iterations": st.integers(1, 1000),
}
REQUIRED: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "speculative_config": {"method": st.text(min_size=1)},
    "profiler_config": {
        "profiler": st.sampled_from(["torch", "cprofile"]),
        "torch_profiler_dir": st.text(min_size=1),
    },
    "kv_transfer_config": {
        "kv_connector": st.just("RowServerConnector"),
        "kv_role": st.sampled_from(["kv_producer", "kv_both"]),
    },
}
KEYS = {
    "kv_transfer_config": KV_TRANSFER_KEYS,
    "quantization_config": QUANTIZATION_KEYS,
    "kv_events_config": KV_EVENTS_KEYS,
    "structured_outputs_config": STRUCTURED_OUTPUTS_KEYS,
    "speculative_config": SPECULATIVE_KEYS,
    "profiler_config": PROFILER_KEYS,
}


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Valid values of one engine field."""
    if name in KEYS:
        return st.fixed_dictionaries(REQUIRED.get(name, {}), optional=KEYS[name])
    if name in ("cudagraph_capture_sizes", "prefill_graph_sizes"):
        return st.lists(st.integers(1)).map(tuple)
    owner = engine_fields()[name][1]
    info = next(info_of(field) for field in dataclasses.fields(owner) if field.name == name)
    if info.choices:
        return st.sampled_from(info.choices)
    low, high = info.ge if info.ge is not None else info.gt, info.le
    strategies: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(min_value=low and int(low), max_value=high and int(high)),
        float: st.floats(low, high, exclude_min=info.gt is not None, allow_nan=False, allow_infinity=False),
        str: st.text(min_size=1),
        tuple: st.lists(st.text(min_size=1)).map(tuple),
        dict: st.dictionaries(st.text(), st.integers(1)),
    }
    return strategies[plain_type(field_types(owner)[name])]


ARGUMENTS = st.fixed_dictionaries({}, optional={name: values_of(name) for name in engine_fields()})


def flat(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(getattr(config, child), name) for name, (child, _) in engine_fields().items()}


@settings(derandomize=True, max_examples=50, deadline=None)
@given(arguments=ARGUMENTS)
def test_every_argument_reaches_its_field_and_no_other(arguments: dict[str, Any]) -> None:
    assert flat(EngineConfig.from_args(**arguments)) == {**flat(EngineConfig()), **arguments}


@settings(derandomize=True, max_examples=50, deadline=None)
@given(first=ARGUMENTS, second=ARGUMENTS)
def test_evolve_replaces_named_fields_only(first: dict[str, Any], second: dict[str, Any]) -> None:
    config = EngineConfig.from_args(**first)
    assert config.evolve(**second) == EngineConfig.from_args(**{**first, **second})
    assert config == EngineConfig.from_args(**first)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (1e-3, 0.1)])
def test_every_number_reaches_another_process(limits: tuple[float, float]) -> None:
    """Mamba 2's time steps have no upper limit in most models, and JSON has no infinite numbers."""
    mamba = Mamba2Arch(heads=4, head_dim=8, groups=1, states=8, taps=4, norm_eps=1e-5, time_limits=limits)
    arch = ModelArch("Mamba2ForCausalLM", "mamba2", 9, 8, 0, 1, 0, 0, 0, 64, mamba2=mamba)
    config = dataclasses.replace(EngineConfig.from_args(model="any"), model_arch=arch)
    assert EngineConfig.decoded(config.encoded()) == config


def test_no_name_is_shared_between_the_engine_and_the_server() -> None:
    assert not set(engine_fields()) & set(field_types(ServerConfig))


def test_children_stand_in_the_config_under_their_names() -> None:
    types = field_types(EngineConfig)
    assert all(types[child] is owner for child, owner in child_configs().items())


def test_none_means_the_default() -> None:
    assert EngineConfig.from_args(**dict.fromkeys(engine_fields())) == EngineConfig()
    assert EngineConfig().model.model == DEMO_MODEL


def test_words_stand_for_numbers() -> None:
    assert EngineConfig.from_args(max_model_len="auto").model.max_model_len == -1
    with pytest.raises(ConfigError, match="an integer, got 'most'"):
        EngineConfig.from_args(max_model_len="most")


def test_spellings_of_python_callers() -> None:
    class dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    dtype.__module__ = "torch"
    config = EngineConfig.from_args(
        served_model_name="a",
        model=pathlib.Path("some") / "dir",
        download_dir=pathlib.Path("d"),
        dtype=dtype(),
    )
    assert config.model.served_model_name == ("a",)
    assert config.model.model == "some/dir"
    assert config.load.download_dir == "d"
    assert config.model.dtype == "bfloat16"
    assert EngineConfig.from_args(served_model_name=["a", "b"]).model.served_model_name == ("a", "b")


def test_unknown_argument_is_a_type_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig.from_args(max_num_seq=3)
    with pytest.raises(TypeError, match=r"'zzz'$"):
        EngineConfig.from_args(zzz=3)


def test_bad_value_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--block-size must be at least 1, got 0"):
        EngineConfig.from_args(block_size=0)
