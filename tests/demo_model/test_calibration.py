# SPDX-License-Identifier: Apache-2.0
"""The texts for calibration are what the generator makes."""

from __future__ import annotations

from demo_model.calibration import FILE, text


def test_the_file_in_the_box_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "run: python -m demo_model.calibration"
