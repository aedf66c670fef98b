# SPDX-License-Identifier: Apache-2.0
"""One description of the rotary embedding, wherever config.json and overrides have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.models.config_overrides import with_overrides
from tests.fixtures.tiny_models import VOCAB_SIZE, oracle_of
from tests.models.harness import load_tiny, logits_of

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
IDS = torch.randint(3, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))


def edit(directory: Path, changes: dict[str, Any], inside: str | None = None) -> Path:
    """Change keys of config.json; null removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    place = config[inside] if inside else config
    place |= changes
    for key in [key for key, value in place.items() if value is None]:
        del place[key]
    path.write_text(json.dumps(config))
    return directory


def logits(directory: Path, **args: Any) -> torch.Tensor:
    (found,) = logits_of(load_tiny(directory, **args), IDS.tolist(), chunk_sizes=[7, 40])
    return found


def expected(directory: Path) -> torch.Tensor:
    with torch.no_grad():
        return oracle_of(directory)(IDS).logits[0]


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "default beside linear": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": LINEAR},
    ),
    "empty beside linear": ("llama", {"rope_parameters": {}, "rope_scaling": LINEAR}),
    "null beside linear": ("llama", {"rope_parameters": None, "rope_scaling": LINEAR}),
    "linear beside empty": ("llama", {"rope_parameters": LINEAR | {"rope_theta": 500.0}, "rope_scaling": {}}),
    "legacy kind": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0}),
    "two kinds": ("llama", {"rope_parameters": LINEAR | {"rope_theta": 10000.0}, "rope_scaling": YARN}),
    "theta in scaling": (
        "qwen2",
        {"rope_parameters": LINEAR | {"rope_theta": 10000.0}, "rope_scaling": YARN | {"rope_theta": 900.0}},
    ),
    "theta at the top": (
        "qwen3",
        {"rope_parameters": LINEAR | {"rope_theta": 100.0}, "rope_scaling": YARN, "rope_theta": 900.0},
    ),
    "a type of layers": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
}


@pytest.mark.parametrize("case", FILES)
def test_rope_in_two_places_equals_transformers(case: str, copy_of: Callable[[str], Path]) -> None:
    family, changes = FILES[case]
    directory = edit(copy_of(family), changes)
    torch.testing.assert_close(logits(directory), expected(directory), atol=1e-4, rtol=1e-4)


LAYOUTS: dict[str, dict[str, Any]] = {
    "parameters": {"rope_parameters": YARN | {"rope_theta": 300.0}},
    "scaling": {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 300.0},
    "both": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_scaling": YARN},
}
"""Files that say the same in three ways."""
OVERRIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scaling": ({"rope_scaling": LINEAR}, LINEAR | {"rope_theta": 300.0}),
    "scaling with theta": ({"rope_scaling": LINEAR | {"rope_theta": 7.0}}, LINEAR | {"rope_theta": 7.0}),
    "parameters": ({"rope_parameters": LINEAR}, LINEAR | {"rope_theta": 300.0}),
    "theta": ({"rope_theta": 7.0}, YARN | {"rope_theta": 7.0}),
    "theta and scaling": ({"rope_theta": 7.0, "rope_scaling": LINEAR}, LINEAR | {"rope_theta": 7.0}),
    "none": ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 300.0}),
}
"""Overrides, and the rotary embedding that they ask for."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", OVERRIDES)
def test_rope_override_wins_over_the_file(case: str, layout: str, copy_of: Callable[[str], Path]) -> None:
    override, meaning = OVERRIDES[case]
    directory = edit(copy_of("llama"), LAYOUTS[layout])
    found = logits(directory, hf_overrides=override)
    edit(directory, {"rope_parameters": meaning, "rope_scaling": None, "rope_theta": None})
    assert torch.equal(found, logits(directory))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("nested", [False, True])
def test_rope_override_of_wrapper_reaches_the_text(
    nested: bool, key: str, copy_of: Callable[[str], Path]
) -> None:
    directory = copy_of("with-eyes-mistral3")
    override: dict[str, Any] = {key: LINEAR}
    found = logits(directory, hf_overrides={"text_config": override} if nested else override)
    inner = json.loads((directory / "config.json").read_text())["text_config"]
    theta = inner.get("rope_parameters", inner)["rope_theta"]
    edit(directory, {"rope_parameters": LINEAR | {"rope_theta": theta}, "rope_scaling": None}, "text_config")
    assert torch.equal(found, logits(directory))


ROPES = st.one_of(
    st.none(),
    st.just({}),
    st.fixed_dictionaries(
        {}, optional={"rope_type": st.sampled_from(["default", "linear"]), "rope_theta": st.floats(1, 1e6)}
    ),
    st.fixed_dictionaries(
        {"full_attention": st.fixed_dictionaries({}, optional={"rope_theta": st.floats(1)})}
    ),
)
SOURCES = st.fixed_dictionaries(
    {}, optional={"rope_scaling": ROPES, "rope_parameters": ROPES, "rope_theta": st.floats(1, 1e6)}
)


@given(values=SOURCES, overrides=SOURCES)
def test_with_overrides_twice_changes_nothing_more(values: dict[str, Any], overrides: dict[str, Any]) -> None:
    once = with_overrides(values, overrides)
    assert with_overrides(once, overrides) == once
    assert not (once.get("rope_scaling") and once.get("rope_parameters"))


@given(values=SOURCES, theta=st.floats(1, 1e6))
def test_with_overrides_of_theta_is_never_ignored(values: dict[str, Any], theta: float) -> None:
    merged = with_overrides(values, {"rope_theta": theta})
    rope = merged.get("rope_scaling") or merged.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    assert (rope.get("rope_theta") or merged["rope_theta"]) == theta
