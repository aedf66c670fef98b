# SPDX-License-Identifier: Apache-2.0
"""Every form that the page names is measured, and what was recorded is on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import weight_formats
from quire.bench.kernels import ModelShape
from tools import quantized_page as pages


def test_recorded_numbers_are_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(hidden=64, qkv=96, intermediate=128)
    speeds = weight_formats.measured(shape, rounds=1, prefill_rows=3, cold_bytes=1)
    rounded = weight_formats.measured_rounded(shape, rounds=1, prefill_rows=3, cold_bytes=1)
    assert (speeds.keys(), rounded.keys()) == (pages.kept_forms().keys(), pages.rounded_forms().keys())
    assert all(times > 0 for both in (*speeds.values(), *rounded.values()) for times in both)
    assert speeds[weight_formats.FLOATS] == (1.0, 1.0)
    recorded, written = tmp_path / "speeds.json", tmp_path / "page.md"
    for module in (weight_formats, pages):
        monkeypatch.setattr(module, "SPEEDS", recorded)
    assert "| decode |" not in pages.page()
    monkeypatch.setattr(weight_formats, "PAGE", written)
    weight_formats.record(dict.fromkeys(speeds, (2.25, 0.5)), dict.fromkeys(rounded, (1.5, 0.25)), 3)
    page = written.read_text()
    assert "| error, fast | decode | prefill |" in page
    assert page.count("| 2.25 | 0.50 |") == len(pages.EXAMPLES)
    assert page.count("| 1.50 | 0.25 |") == len(rounded)
    assert "for one row (decode) and for\n3 rows (prefill)" in page
