from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.startup import prepare
from quire.errors import ConfigError


def prepared(model: Path, **args: Any) -> EngineConfig:
    return prepare(EngineConfig.from_args(model=str(model), device="cpu", **args), "offline")


def test_several_ranks_have_processes(tiny_model: Callable[[str], Path]) -> None:
    for size, executor in ((1, "uni"), (2, "mp")):
        config = prepared(tiny_model("llama"), tensor_parallel_size=size)
        assert config.parallel.distributed_executor_backend == executor


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"distributed_executor_backend": "uni"}, "which wants --distributed-executor-backend mp, not uni"),
        ({"distributed_executor_backend": "null"}, "which wants --distributed-executor-backend mp, not null"),
        ({"enable_lora": True}, "which wants no --enable-lora"),
        ({"cpu_pin_threads": True}, "which wants no --cpu-pin-threads"),
    ],
)
def test_what_does_not_work_with_several_ranks_is_refused(
    args: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size is 2, {words}"):
        prepared(tiny_model("llama"), tensor_parallel_size=2, **args)


@pytest.mark.parametrize(
    ("size", "overrides", "words"),
    [
        (3, {}, "4 attention heads cannot be shared out evenly among so many ranks; possible: 1, 2, 4$"),
        (8, {}, "4 attention heads cannot be shared out evenly among so many ranks; possible: 1, 2, 4$"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
         "3 key-value heads cannot .*; possible: 1, 3, 6$"),
        (4, {"intermediate_size": 90}, "90 features of its MLPs cannot .*; possible: 1, 2$"),
        (4, {"vocab_size": 262}, "262 tokens cannot .*; possible: 1, 2$"),
    ],
)  # fmt: skip
def test_a_number_of_ranks_that_does_not_fit_is_refused_with_those_that_do(
    size: int, overrides: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size is {size}, and the model's {words}"):
        prepared(tiny_model("llama"), tensor_parallel_size=size, hf_overrides=overrides)
