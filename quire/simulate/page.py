# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about simulated runs: a table, bars by value, and a timeline of each run.

Invariant: nothing is loaded from elsewhere and there is no script; every text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from quire.simulate.report import COLUMNS, Summary
from quire.simulate.simulator import Sample, SimulatedRun

WIDTH, HEIGHT, MARGIN = 560, 160, 34
MAX_POINTS = 600  # Of a timeline, so that pages of long runs stay small.
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1f24;
  background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .25rem .7rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr:nth-child(even) td { background: #f3f5f7; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; } figcaption { font-size: .85rem; color: #57606a; }
svg text { font: 11px system-ui, sans-serif; fill: #57606a; }
@media (prefers-color-scheme: dark) { body { color: #e6e8ea; background: #14171a; }
  tr:nth-child(even) td { background: #1d2226; } svg text, figcaption { fill: #a3adb6; color: #a3adb6; } }
"""
BARS: dict[str, Callable[[Summary], float]] = {
    "output tokens per second": lambda one: one.output_tokens_per_s,
    "time to first token, 50 %, ms": lambda one: one.ttft_ms.p50,
    "time to first token, 99 %, ms": lambda one: one.ttft_ms.p99,
    "time between outputs, 99 %, ms": lambda one: one.itl_ms.p99,
    "whole request, 50 %, ms": lambda one: one.e2e_ms.p50,
    "prompt tokens from the cache, %": lambda one: 100 * one.hit_rate,
}
COLORS = ("#2f6fdb", "#d9822b", "#2e9e6b")


def page(title: str, runs: Sequence[tuple[Summary, SimulatedRun]]) -> str:
    """Return the page."""
    summaries = [summary for summary, _ in runs]
    timelines = "".join(
        f"<h2>{escape(summary.name)}</h2><div class=charts>{_timeline(run.timeline)}</div>"
        for summary, run in runs
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>{_table(summaries)}"
        f"<div class=charts>{''.join(_bars(name, summaries, value) for name, value in BARS.items())}</div>"
        f"{timelines}</html>\n"
    )


def _table(summaries: Sequence[Summary]) -> str:
    head = "".join(f"<th>{escape(name)}" for name in ("", *COLUMNS))
    rows = [
        "".join(f"<td>{escape(cell)}" for cell in (one.name, *(cell(one) for cell in COLUMNS.values())))
        for one in summaries
    ]
    return f"<table><tr>{head}{''.join(f'<tr>{row}' for row in rows)}</table>"


def _bars(name: str, summaries: Sequence[Summary], value: Callable[[Summary], float]) -> str:
    values = [value(one) for one in summaries]
    most = max(values, default=0.0) or 1.0
    step = HEIGHT / max(len(values), 1)
    bars = "".join(
        f"<rect x=150 y={i * step + 2:.1f} width={300 * one / most:.1f} height={max(step - 4, 1):.1f} "
        f"fill='{COLORS[0]}'/><text x=144 y={(i + 0.5) * step + 4:.1f} text-anchor=end>"
        f"{escape(_shortened(summary.name))}</text>"
        f"<text x={154 + 300 * one / most:.1f} y={(i + 0.5) * step + 4:.1f}>{one:.4g}</text>"
        for i, (summary, one) in enumerate(zip(summaries, values, strict=True))
    )
    return _figure(name, bars)


def _shortened(name: str) -> str:
    return name if len(name) <= 24 else "…" + name[-23:]


def _timeline(samples: Sequence[Sample]) -> str:
    shown = samples[:: max(len(samples) // MAX_POINTS, 1)]
    counts = {
        "requests running": [float(one.num_running) for one in shown],
        "requests waiting": [float(one.num_waiting) for one in shown],
    }
    times = [one.now_s for one in shown]
    usage = {"KV cache in use, %": [100 * one.cache_usage for one in shown]}
    return _lines(times, counts) + _lines(times, usage)


def _lines(times: Sequence[float], series: dict[str, list[float]]) -> str:
    end = max(times, default=0.0) or 1.0
    most = max((value for values in series.values() for value in values), default=0.0) or 1.0

    def place(now: float, value: float) -> str:
        x = MARGIN + (WIDTH - MARGIN) * now / end
        return f"{x:.1f},{(HEIGHT - 16) * (1 - value / most) + 4:.1f}"

    drawn = "".join(
        f"<polyline fill=none stroke='{color}' stroke-width=1.5 points='"
        + " ".join(place(now, value) for now, value in zip(times, values, strict=True))
        + "'/>"
        for values, color in zip(series.values(), COLORS, strict=False)
    )
    axis = (
        f"<text x=0 y=12>{most:.4g}</text><text x=0 y={HEIGHT - 12}>0</text>"
        f"<text x={WIDTH} y={HEIGHT} text-anchor=end>{end:.4g} s</text>"
    )
    caption = ", ".join(
        f"<span style='color:{color}'>■</span> {escape(name)}"
        for name, color in zip(series, COLORS, strict=False)
    )
    return _figure(caption, drawn + axis, is_markup=True)


def _figure(caption: str, content: str, *, is_markup: bool = False) -> str:
    text = caption if is_markup else escape(caption)
    return (
        f"<figure><svg viewBox='0 0 {WIDTH} {HEIGHT + 4}' width={WIDTH} role=img>{content}</svg>"
        f"<figcaption>{text}</figcaption></figure>"
    )
