# SPDX-License-Identifier: Apache-2.0
"""`quire docs`: prints pages of the documentation, which wheels contain, so that a message can name `docs/NAME.md`."""

from __future__ import annotations

from pathlib import Path

import click

from quire.vllm_names.row import nearest

_PACKAGE = Path(__file__).parents[2]
FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
"""Folder of the pages in a wheel, and in a source tree."""


def pages() -> dict[str, Path]:
    """Return the pages by name.

    Raises:
        ClickException: this installation has none.
    """
    for folder in FOLDERS:
        if (folder / "index.md").is_file():
            return {path.stem: path for path in sorted(folder.glob("*.md"))}
    raise click.ClickException(
        f"this installation has no pages; they are neither in {' nor in '.join(map(str, FOLDERS))}"
    )


def title_of(page: Path) -> str:
    """Return a page's first heading."""
    with page.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Print a page of the documentation: batch, or docs/batch.md; without PAGE, list them."""
    found = pages()
    if page is None:
        width = max(map(len, found))
        click.echo("\n".join(f"{name:{width}}  {title_of(path)}" for name, path in found.items()))
        return
    name = page.partition("#")[0].removeprefix("docs/").removesuffix(".md")
    if name not in found:
        near = nearest(name, found)
        hint = f"did you mean {near!r}?" if near else "`quire docs` lists the pages"
        raise click.BadParameter(f"there is no page {name!r}; {hint}", param_hint="'PAGE'")
    click.echo_via_pager(found[name].read_text(encoding="utf-8"))
