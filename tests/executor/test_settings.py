# SPDX-License-Identifier: Apache-2.0
"""Ranks have the bits of one process under settings of all kinds at once: of their product, what a seed draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire.kernels.cpu import library
from tests.executor.test_multiproc import numbers, run, said, started
from tests.fixtures.thread_ranks import ThreadRanks

needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())
SHAPES = [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
"""Shares and stages."""
WIDE = {
    "load_format": "dummy",
    "hf_overrides": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 3},
}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "quantization_config": {"mode": "precise", "head": "int4"}},
}
CHOICES: dict[str, list[Any]] = {
    "format": sorted(FORMATS),
    "async_scheduling": [False, True],
    "enable_prefix_caching": [False, True],
    "max_num_batched_tokens": [7, 16, 64],  # prompts in chunks, or whole
    "num_gpu_blocks_override": [9, 14, 60],  # which requests take from each other, or not
    "swap_space": [0, 0.01],
    "speculative_config": [None, {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}],
    "kv_cache_dtype": ["auto", "int8"],
}


def drawn(count: int) -> list[dict[str, Any]]:
    """Settings in which each value of each choice occurs, and each shape."""
    chance = random.Random(20)
    columns = {
        name: [value for _ in range(count // len(values) + 1) for value in chance.sample(values, len(values))]
        for name, values in (CHOICES | {"shape": SHAPES}).items()
    }
    return [{name: values[index] for name, values in columns.items()} for index in range(count)]


def options_of(settings: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in settings.items() if name not in ("shape", "format")}
    return WIDE | FORMATS[settings["format"]] | rest | {"tp_invariant": True, "block_size": 8}


def check(model: Path, settings: dict[str, Any]) -> None:
    """Twice: the second time there may be prefixes to find."""
    options = options_of(settings)
    one = started(model, **options)
    alone = [run(one), run(one)]
    one.shutdown()
    shares, stages = settings["shape"]
    engine = started(model, **options, tensor_parallel_size=shares, pipeline_parallel_size=stages)
    for wanted in alone:
        outputs = run(engine)
        assert said(outputs) == said(wanted)
        assert numbers(outputs) == numbers(wanted)
    engine.shutdown()


def name_of(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values()).replace(" ", "")


@needs_kernels
@pytest.mark.more
@pytest.mark.parametrize("settings", drawn(20), ids=name_of)
def test_ranks_have_the_bits_of_one_in_all_settings(
    settings: dict[str, Any], tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())
    check(tiny_model("llama"), settings)


@needs_kernels
@pytest.mark.more
@pytest.mark.parametrize(
    "settings", [one for one in drawn(20) if one["shape"] in SHAPES[::2]][:4], ids=name_of
)
def test_process_ranks_with_recorded_graphs_match_one_rank(
    settings: dict[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    check(tiny_model("llama"), settings)
