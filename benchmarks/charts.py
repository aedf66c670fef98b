# SPDX-License-Identifier: Apache-2.0
"""Charts of docs/performance.md, drawn from pages of results: `python -m benchmarks.charts`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
CPU_PAGE = "2026-11-28-compare-avx2-3.md"
GPU_PAGE = "2026-11-27-gpu-bench.md"
COLORS = ("#00897b", "#b0bec5")
PANEL_WIDTH, BAR_HEIGHT, GAP, LABEL_WIDTH, TOP = 250, 16, 10, 48, 58


class Bar(NamedTuple):
    """A row of a panel: its label, and a value of each series (tokens per second)."""

    label: str
    values: tuple[float, ...]


class Panel(NamedTuple):
    """Bars of one load on one scale."""

    title: str
    bars: tuple[Bar, ...]


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table behind a heading, without its head."""
    text = (RESULTS / page).read_text(encoding="utf-8").partition(heading)[2]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()][2:]


def cpu_panels() -> list[Panel]:
    """Return quire and llama.cpp at the same number of bits for each weight, 0.5B parameters."""
    rows = {
        (engine, weights): numbers for engine, weights, *numbers in table(CPU_PAGE, "## Tokens per second")
    }
    formats = {
        "16 bits": ("bf16, auto", "BF16"),
        "8 bits": ("int8", "Q8_0"),
        "4 bits": ("int4, int4 head", "Q4_0"),
    }

    def panel(title: str, column: int) -> Panel:
        bars = (
            Bar(label, (float(rows["quire", ours][column]), float(rows["llama.cpp", theirs][column])))
            for label, (ours, theirs) in formats.items()
        )
        return Panel(title, tuple(bars))

    return [panel("Prompt of 512 tokens", 0), panel("One request", 1), panel("Sixteen requests", 2)]


def gpu_panels() -> list[Panel]:
    """Return the weight formats of an 8B model on a GPU."""
    ours = {
        row[0].removeprefix("8B Llama, "): float(row[2].split()[0].replace(",", ""))
        for row in table(GPU_PAGE, "\n")
        if row[2]
    }
    formats = ("bf16", "int8", "int4", "fp8")

    def row_of(weights: str, load: str) -> float:
        """Return a format's value; the page has bf16, its main row, without a name and a context."""
        return ours[load.replace(", 128 in context", "") if weights == "bf16" else f"{weights}, {load}"]

    def panel(title: str, load: str, tokens: float) -> Panel:
        """Take `tokens` in so many ms; 0 if the page has a rate already."""
        times = {weights: row_of(weights, load) for weights in formats}
        rates = {name: 1000 * tokens / time if tokens else time for name, time in times.items()}
        return Panel(title, tuple(Bar(name, (rate,)) for name, rate in rates.items()))

    return [
        panel("Prompts of 2,048 tokens", "prompts of 2048", 0),
        panel("One request", "decode, batch 1, 128 in context", 1),
        panel("64 requests, 1,024 in context", "decode, batch 64, 1024 in context", 64),
    ]


def drawn(title: str, series: Sequence[str], panels: Sequence[Panel]) -> str:
    """Return an SVG of panels side by side, tokens per second written on each bar."""
    bars = [_panel(panel, place * (PANEL_WIDTH + 20), len(series)) for place, panel in enumerate(panels)]
    height = TOP + max(len(panel.bars) for panel in panels) * _row(len(series))
    width = len(panels) * (PANEL_WIDTH + 20)
    legend = "".join(
        f'<rect x="{width - 110 * (len(series) - i)}" y="5" width="11" height="11" fill="{COLORS[i]}"/>'
        f'<text x="{width - 110 * (len(series) - i) + 16}" y="15">{name}</text>'
        for i, name in enumerate(series)
        if len(series) > 1
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="#37474f"><title>{title}</title>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        f'<text x="4" y="16" font-size="14" font-weight="bold">{title}</text>{legend}'
    )
    return "\n".join([head, *bars, "</svg>", ""])


def _row(num_series: int) -> int:
    return num_series * BAR_HEIGHT + GAP


def _panel(panel: Panel, left: int, num_series: int) -> str:
    most = max(max(bar.values) for bar in panel.bars)
    scale = (PANEL_WIDTH - LABEL_WIDTH - 48) / most
    parts = [f'<text x="{left + 4}" y="{TOP - 12}" font-weight="bold">{panel.title}</text>']
    for place, bar in enumerate(panel.bars):
        top = TOP + place * _row(num_series)
        middle = top + num_series * BAR_HEIGHT / 2 + 4
        parts.append(f'<text x="{left + 4}" y="{middle:g}">{bar.label}</text>')
        for index, value in enumerate(bar.values):
            y, x, width = top + index * BAR_HEIGHT, left + 4 + LABEL_WIDTH, value * scale
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT - 2}" fill="{COLORS[index]}"/>'
                f'<text x="{x + width + 4:.1f}" y="{y + 11}" font-size="11">{_shown(value)}</text>'
            )
    return "\n".join(parts)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def charts() -> dict[Path, str]:
    """Return path -> SVG of every chart."""
    folder = ROOT / "docs/assets"
    cpu = "Tokens per second, 0.5B parameters, two Zen 4 cores held to AVX2"
    gpu = "Tokens per second, 8B parameters, one H100"
    return {
        folder / "speed-cpu.svg": drawn(cpu, ("quire", "llama.cpp"), cpu_panels()),
        folder / "speed-gpu.svg": drawn(gpu, ("quire",), gpu_panels()),
    }


def main() -> None:
    for path, text in charts().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
