# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.rank_checks import check_ranks, valid_tp_sizes
from quire.engine.startup import prepare
from quire.errors import ConfigError
from quire.layers.shard import Shard
from quire.models.loader import without_weights
from quire.platforms import Host
from tests.fixtures.quick import quick_models
from tests.fixtures.thread_ranks import InProcess
from tests.models.test_tensor_parallel import EVERY_FAMILY


def prepared(model: Path, **args: Any) -> EngineConfig:
    return prepare(EngineConfig.from_args(model=str(model), device="cpu", **args), "offline")


def test_several_ranks_have_processes(tiny_model: Callable[[str], Path]) -> None:
    for size, executor in ((1, "uni"), (2, "mp")):
        config = prepared(tiny_model("llama"), tensor_parallel_size=size)
        assert config.parallel.distributed_executor_backend == executor


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            {"distributed_executor_backend": "uni"},
            "which requires --distributed-executor-backend mp, not uni",
        ),
        (
            {"distributed_executor_backend": "null"},
            "which requires --distributed-executor-backend mp, not null",
        ),
        ({"cpu_pin_threads": True, "cpu_numa": "off"}, "which requires no --cpu-pin-threads"),
    ],
)
def test_options_unfit_for_several_ranks_are_refused(
    args: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size is 2, {words}"):
        prepared(tiny_model("llama"), tensor_parallel_size=2, **args)


@pytest.mark.parametrize(
    ("size", "overrides", "words"),
    [
        (3, {}, "4 attention heads cannot be sharded evenly over so many ranks; possible: 1, 2, 4$"),
        (8, {}, "4 attention heads cannot be sharded evenly over so many ranks; possible: 1, 2, 4$"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
         "3 key-value heads cannot .*; possible: 1, 3, 6$"),
        (4, {"intermediate_size": 90}, "90 features of its MLPs cannot .*; possible: 1, 2$"),
    ],
)  # fmt: skip
def test_unfit_number_of_ranks_is_refused_with_the_fitting_ones(
    size: int, overrides: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size is {size}, and the model's {words}"):
        prepared(tiny_model("llama"), tensor_parallel_size=size, hf_overrides=overrides)


@pytest.mark.parametrize(
    ("name", "size", "args", "words"),
    [
        ("qwen2moe", 4, {"moe_intermediate_size": 30, "shared_expert_intermediate_size": 64},
         "30 features of each of its experts cannot .*; possible: 1, 2$"),
        ("qwen2moe", 4, {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 30},
         "30 features of its shared experts cannot .*; possible: 1, 2$"),
        ("qwen3next", 4, {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
         "2 key heads with a state cannot .*; possible: 1, 2$"),
    ],
)  # fmt: skip
def test_units_of_experts_and_states_are_named(
    name: str, size: int, args: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size is {size}, and the model's {words}"):
        prepared(tiny_model(name), tensor_parallel_size=size, hf_overrides=args)


@pytest.mark.parametrize(
    "name", quick_models(sorted(EVERY_FAMILY), {"llama", "jamba", "qwen3next", "diffllama", "jetmoe"})
)
def test_valid_tp_sizes_are_exactly_the_shardable_ones(name: str, tiny_model: Callable[[str], Path]) -> None:
    """And what is said not to be, cannot."""
    config = prepared(tiny_model(name))
    for size in range(2, 9):
        cut = partial(without_weights, config, Shard.of_group(InProcess.group(size)[0]))
        if size in valid_tp_sizes(config):
            cut()
        else:
            with pytest.raises(ConfigError, match="cannot be"):
                cut()


def test_more_ranks_than_cores_are_warned_of(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = prepared(tiny_model("llama"), tensor_parallel_size=2, pipeline_parallel_size=2)
    caplog.clear()
    check_ranks(config, serves=False, host=FakeHost(4))
    assert not caplog.messages
    check_ranks(config, serves=False, host=FakeHost(3))
    assert "4 ranks are to run on this host, which has 3 cores for this process" in caplog.text


class FakeHost(Host):
    """One with so many cores."""

    def __init__(self, num_cores: int) -> None:
        super().__init__()
        self._num_cores = num_cores

    def cores(self) -> list[tuple[int, ...]]:
        return [(number,) for number in range(self._num_cores)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"pipeline_parallel_size": 4}, "--pipeline-parallel-size is 4, and the model has 3 layers"),
        ({"pipeline_partition": "1,1"}, "1,1 has 2 stages with 2 layers; --pipeline-.*-size is 2, and .* 3 layers"),
        ({"pipeline_parallel_size": 1, "pipeline_partition": "1,2"}, "1,2 has 2 stages with 3 layers; .*-size is 1"),
        ({"pipeline_partition": "3,0"}, "--pipeline-partition must be such as 3,5, got '3,0'"),
        ({"pipeline_partition": "all"}, "--pipeline-partition must be such as 3,5, got 'all'"),
        ({"distributed_executor_backend": "uni"}, "is 2, which requires --distributed-executor-backend mp, not uni"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_are_refused(
    args: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepared(tiny_model("llama"), **{"pipeline_parallel_size": 2} | args)


@pytest.mark.parametrize("nodes", [{}, {"nnodes": 2, "node_rank": 0}], ids=["one host", "two"])
def test_draft_model_of_stages_is_whole_with_any_layer_count(
    nodes: dict[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    model = tiny_model("llama")
    guesses = {"method": "draft_model", "model": str(model)}
    config = prepared(
        model, pipeline_parallel_size=2, pipeline_partition="1,2", speculative_config=guesses, **nodes
    )
    assert config.draft is not None
    assert config.draft.parallel.num_ranks == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"model": "llama"}, "--enable-expert-parallel shards experts, and LlamaForCausalLM has none"),
        ({"model_impl": "transformers"}, "shards experts, and MixtralForCausalLM has none"),
        ({"tensor_parallel_size": 4, "data_parallel_size": 2}, "6 experts with at least one per rank, .* 8"),
        ({"data_parallel_size": 2, "distributed_executor_backend": "uni"}, "requires --distributed-executor-backend"),
        ({"data_parallel_size": 2, "enable_lora": True}, "size is 2, which requires no --enable-lora"),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, "which requires --pipeline-parallel-size 1"),
        ({"data_parallel_size": 4, "data_parallel_rank": 1}, "which requires all replicas in one server"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_shared_out_are_refused(
    args: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    options = {"enable_expert_parallel": True} | args
    with pytest.raises(ConfigError, match=words):
        prepared(tiny_model(options.pop("model", "mixtral")), **options)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tp_invariant": True}, "--tp-invariant requires --device cpu, not cuda: device libraries"),
        ({"tensor_parallel_size": 2, "tp_invariant": True}, "--tp-invariant requires --device cpu, not cuda"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
         "with 2 ranks, which requires --distributed-executor-backend mp or external_launcher, not ray"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "which requires no --enable-expert-parallel"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "which requires no --enable-expert-parallel"),
    ],
)  # fmt: skip
def test_options_unfit_for_device_ranks_are_refused(
    args: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(EngineConfig.from_args(model=str(tiny_model("mixtral")), device="cuda", **args), "offline")


@pytest.mark.parametrize(
    ("args", "executor"),
    [
        ({"tensor_parallel_size": 2}, "mp"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "mp"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "mp"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)  # fmt: skip
def test_ranks_may_have_devices(
    args: dict[str, Any], executor: str, tiny_model: Callable[[str], Path]
) -> None:
    args = {"device": "cuda"} | args
    found = prepare(EngineConfig.from_args(model=str(tiny_model("mixtral")), **args), "offline")
    assert found.parallel.distributed_executor_backend == executor
    with pytest.raises(ConfigError, match="which requires --device cpu or cuda, not xpu"):
        prepare(
            EngineConfig.from_args(model=str(tiny_model("mixtral")), **args | {"device": "xpu"}), "offline"
        )


def test_ranks_that_plan_by_themselves_read_no_clock(tiny_model: Callable[[str], Path]) -> None:
    launched = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    assert prepared(tiny_model("llama"), **launched, max_mixed_step_s=0.0).scheduler.max_mixed_step_s == 0.0
    with pytest.raises(ConfigError, match="external_launcher requires --max-mixed-step-s 0: ranks measure"):
        prepared(tiny_model("llama"), **launched, max_mixed_step_s=0.1)
