# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs (`make docs`): files of the repository that pages link to become pages of the site.

Pages are written for a reader of the repository, so they link to programs, folders and results beside `docs/`. These
are added to the site at their own paths: Markdown as it is, sources in a code block, folders as lists of files. A link
to nothing fails the build.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
# `make docs` fetches both if npm is there: what draws diagrams, and what searches in pages that are opened as files.
DIAGRAMS, SEARCH = ROOT / "build/scripts/mermaid.min.js", ROOT / "build/scripts/iframe-worker.js"
SEARCH_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"  # where the theme loads it from
HOME = {"README.md": "index.md"}  # The site has a first page of its own.
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Serve the library that draws diagrams from the site itself, if it is here."""
    if DIAGRAMS.exists():
        config.extra_javascript.append(f"assets/{DIAGRAMS.name}")
    return config


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the search's script from the site itself, if it is there: files are read without a network."""
    if not SEARCH.exists():
        return output
    return output.replace(SEARCH_ELSEWHERE, get_relative_url(f"assets/{SEARCH.name}", page.url))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside `docs/` that a page links to, directly or through other such files."""
    scripts = (script for script in (DIAGRAMS, SEARCH) if script.exists())
    for script in scripts:
        files.append(File.generated(config, f"assets/{script.name}", abs_src_path=str(script)))
    waiting = [(DOCS + file.src_uri, file.content_string) for file in files.documentation_pages()]
    known = {file.src_uri for file in files}
    while waiting:
        page, text = waiting.pop()
        for path in targets(page, text):
            if (uri := uri_of(path)) in known:
                continue
            known.add(uri)
            content = content_of(path)
            if content is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
            else:
                files.append(File.generated(config, uri, content=content))
                waiting.append((f"{path}/" if (ROOT / path).is_dir() else path, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with its links turned to where their targets are on the site."""
    here = page.file.src_uri

    def turned(match: re.Match[str]) -> str:
        uri = uri_of(path_of(source_of(here), match[1]))
        return f"]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{match[2] or ''})"

    return outside_fences(markdown, lambda text: _LINK.sub(turned, text))


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Apply a function to the text between fenced blocks."""
    parts, last = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, change(markdown[last:])])


def targets(page: str, text: str) -> Iterator[str]:
    """Yield the repository paths that a page links to."""
    for match in _LINK.finditer(_FENCE.sub("", text)):
        yield path_of(page, match[1])


def path_of(page: str, link: str) -> str:
    """Return the repository path of a relative link.

    Raises:
        PluginError: there is no such file or folder.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if path.startswith("..") or not (ROOT / path).exists():
        raise PluginError(f"{page} links to {link}, which does not exist")
    return path


def source_of(uri: str) -> str:
    """Return the repository path of a page of the site; the inverse of `uri_of`."""
    if (ROOT / DOCS / uri).exists():
        return DOCS + uri
    path = uri.removesuffix(".md") if PurePosixPath(uri.removesuffix(".md")).suffix in LANGUAGES else uri
    return path if (ROOT / path).exists() else posixpath.dirname(path) + "/"


def uri_of(path: str) -> str:
    """Return where the site has a file or folder of the repository."""
    if path in HOME:
        return HOME[path]
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if (ROOT / path).is_dir():
        readme = f"{path}/README.md"
        return readme if (ROOT / readme).exists() else f"{path}/index.md"
    return f"{path}.md" if PurePosixPath(path).suffix in LANGUAGES else path


def content_of(path: str) -> str | None:
    """Return the Markdown that stands for a file or folder; None if it is copied."""
    place = ROOT / path
    if place.is_dir():
        readme = place / "README.md"
        return readme.read_text(encoding="utf-8") if readme.exists() else listing(place)
    if place.suffix in LANGUAGES:
        return f"# {path}\n\n```{LANGUAGES[place.suffix]}\n{place.read_text(encoding='utf-8')}```\n"
    return place.read_text(encoding="utf-8") if place.suffix == ".md" else None


def listing(folder: Path) -> str:
    """Return a page with links to the files of a folder that has no README."""
    kinds = {".md", *LANGUAGES}
    found = (Path(base, name) for base, _, names in os.walk(folder) for name in names)
    files = sorted(file.relative_to(folder).as_posix() for file in found if file.suffix in kinds)
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{file}]({file})\n" for file in files)
