# SPDX-License-Identifier: Apache-2.0
"""The table of metrics, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

from quire.metrics.catalog import BY_NAME, METRICS, metrics_table

PAGE = Path(__file__).parents[2] / "docs/observability.md"


def test_rows_have_unique_names_and_at_most_one_listed_label() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.doc.endswith("."), metric.name
        extra = [label for label in metric.labels if label not in ("model_name", "engine")]
        assert len(extra) == 1 or not metric.values, metric.name


def test_the_page_shows_the_table() -> None:
    assert metrics_table() in PAGE.read_text(encoding="utf-8"), (
        "docs/observability.md is behind metrics_table()"
    )
