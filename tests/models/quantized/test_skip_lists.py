# SPDX-License-Identifier: Apache-2.0
"""Modules that configs leave in floats, against those that files have in floats."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module

from quire.models.json_object import JsonObject
from quire.models.quantized.rules import skipping
from tests.fixtures.folded import folded
from tests.models.quantized.checkpoints import error_of_logits, write
from tests.models.quantized.test_awq import in_groups
from tests.models.quantized.test_published_encodings import CASES, Case

UNFIT = ("ct-w3a16", "ao-int4-tiles")
"""Forms that cannot hold a head of 264 tokens."""
WRITERS = {name: case for name, case in CASES.items() if name not in UNFIT} | {
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, in_groups(64)),
}
LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "llm_int8_skip_modules", "skip_modules")


def with_list(config: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The config with another list of skipped modules under the key that its method reads."""
    keys = {"compressed-tensors": "ignore", "modelopt": "ignore", "hqq": "skip_modules"}
    keys |= {"bitsandbytes": "llm_int8_skip_modules"}
    kept = {key: value for key, value in config.items() if key not in LISTS}
    return kept | {keys.get(config["quant_method"], "modules_to_not_convert"): names}


NONE_AND_SOME: list[list[str]] = [[], ["lm_head", "mlp.gate", "model.layers.1"]]
ONE_OF_EACH = {case.config["quant_method"]: name for name, case in WRITERS.items()}.values()


@folded(
    ("name", "skipped"),
    [
        (name, skipped)
        for number, name in enumerate(WRITERS)
        for which, skipped in enumerate(NONE_AND_SOME)
        if which == number % 2 or name in ONE_OF_EACH
    ],
)
def test_quantized_head_is_read_despite_skip_list(
    name: str, skipped: list[str], llama: Path, tmp_path: Path
) -> None:
    case = WRITERS[name]
    config = with_list(dict(case.config), skipped)
    assert error_of_logits(*write(llama, tmp_path, config, case.writer, lambda module: True)) < 1e-4


@folded("name", WRITERS)
def test_file_decides_which_modules_are_quantized(name: str, llama: Path, tmp_path: Path) -> None:
    case, draw = WRITERS[name], random.Random(name)
    config = with_list(dict(case.config), draw.sample(["lm_head", "gate", "model.layers.0", "o_proj"], 2))
    paths = write(llama, tmp_path, config, case.writer, lambda module: draw.random() < 0.5)
    assert error_of_logits(*paths) < 1e-4


PARTS = st.sampled_from(["model", "layers", "1", "10", "mlp", "gate", "gate_proj", "aggregate", "lm_head"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)


@given(module=NAMES, skipped=st.lists(NAMES | st.sampled_from(["model.layers.*", ".*gate", "fc|1"])))
@example(module="model.layers.0.mlp.gate_proj", skipped=["model.layers.0.mlp.gate"])
@example(module="model.layers.10.mlp", skipped=["model.layers.1"])
@example(module="model.layers.1.mlp", skipped=["model.layers.1"])
@example(module="model.layers.0.mlp.gate_proj", skipped=["gate"])
def test_skipping_equals_transformers(module: str, skipped: list[str]) -> None:
    rules = skipping(JsonObject("config.json", {"skip": skipped}), "skip")
    assert any(rule.matches(module) for rule in rules) != should_convert_module(module, skipped)


@pytest.mark.parametrize("name", ["(", "*", "a[", "lm_head"])
def test_skipping_takes_names_that_are_no_patterns(name: str) -> None:
    (rule,) = skipping(JsonObject("config.json", {"skip": [name]}), "skip")
    assert rule.matches(f"model.{name}")


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8"])
def test_bitsandbytes_is_known_by_its_keys(name: str, llama: Path, tmp_path: Path) -> None:
    case = CASES[name]
    config = {key: value for key, value in case.config.items() if key != "quant_method"}
    assert (
        error_of_logits(*write(llama, tmp_path, config, case.writer, lambda name: name != "lm_head")) < 1e-4
    )
