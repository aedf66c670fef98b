# SPDX-License-Identifier: Apache-2.0
"""docs/coming_from_vllm.md is what the tables say."""

from __future__ import annotations

from pathlib import Path

from quire.vllm_names.page import PAGE, vllm_page

ROOT = Path(__file__).parents[2]


def test_page_about_vllm_is_current() -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    assert written == vllm_page(), "run: python -m quire.vllm_names.page"
