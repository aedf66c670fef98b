# SPDX-License-Identifier: Apache-2.0
"""The pages hang together: links lead somewhere, the site's navigation names every page, charts show the results."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.charts import charts
from tests.fixtures.folded import folded

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / folder / "README.md" for folder in ("examples", "benchmarks", "demo_model")),
]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return a page without its code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them of plain words."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@folded("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)", prose(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}, which does not exist"


def navigation(entry: Any) -> Iterator[str]:
    """Yield the pages of a part of the site's navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from navigation(part)


def test_navigation_of_the_site_names_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("!!python/name:", "")
    listed = list(navigation(yaml.safe_load(text)["nav"]))
    assert len(listed) == len(set(listed))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(listed)
    assert all((ROOT / "docs" / page).exists() or (ROOT / page).exists() for page in listed)


def test_charts_show_the_pages_of_results() -> None:
    for path, text in charts().items():
        assert path.read_text(encoding="utf-8") == text, "run: python -m benchmarks.charts"


def test_first_page_is_short_and_has_a_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    pictures = re.findall(r"!\[[^]]+\]\((\S+)\)", text)
    assert len(pictures) == 1
    assert (ROOT / pictures[0]).stat().st_size <= 200_000


def test_guide_to_the_core_is_its_line_budget() -> None:
    guide = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("\n## ")[2]
    named = re.findall(r"`(quire/[\w/]+\.py)`", guide)
    budgets = tomllib.loads((ROOT / "tools" / "size.toml").read_text(encoding="utf-8"))
    assert sorted(named) == budgets["core"]["files"]
    stated = re.search(r"core is these (\d+) files \(about ([\d,]+) lines", guide)
    assert stated
    assert int(stated[1]) == len(named)
    assert abs(int(stated[2].replace(",", "")) - budgets["core"]["lines"]) < 0.05 * budgets["core"]["lines"]
