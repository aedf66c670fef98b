# SPDX-License-Identifier: Apache-2.0
"""Every tiny model grows to half a billion parameters, its speed is measured, and what is recorded is on the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import families
from quire.models.built_in import BUILT_IN
from tests.fixtures.kinds import MODELS
from tests.fixtures.quick import SOME_MODELS, quick
from tools import models_page as pages


@pytest.mark.parametrize("name", quick(MODELS, SOME_MODELS))
def test_every_model_grows(name: str, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    assert 0.35e9 < families.write_large(tiny_model(name), tmp_path / "large") < 0.7e9


@pytest.mark.more
def test_a_model_is_measured(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "PROMPT", 32)
    assert all(speed > 0 for speed in families.measured(tiny_model("mixtral"), rounds=1))


def test_recorded_numbers_are_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, written = tmp_path / "speeds.json", tmp_path / "page.md"
    for module in (families, pages):
        monkeypatch.setattr(module, "SPEEDS", recorded)
    assert "| prompt |" not in pages.models_page()
    monkeypatch.setattr(families, "PAGE", written)
    families.record(dict.fromkeys(list(BUILT_IN)[1:], families.Speed(0.5, 30.4, 512.0)))
    page = written.read_text()
    assert "| 10⁹ weights | decode | prompt |" in page
    assert page.count("| 0.50 | 30 | 512 |\n") == len(BUILT_IN) - 1
    assert page.count("| - | - | - |\n") == 1
