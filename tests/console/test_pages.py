# SPDX-License-Identifier: Apache-2.0
"""The console's files over HTTP: access, headers, forbidden content."""

from __future__ import annotations

import re

import httpx
import pytest

from quire.config import ServerConfig
from quire.console.pages import ASSETS, FILES
from quire.entrypoints.openai.app import build_app
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MAX_BYTES = 100_000
# What turns text into HTML or code, and what loads from elsewhere.
FORBIDDEN = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser", "srcdoc",
    "importScripts", "import(", "createContextualFragment", "setHTMLUnsafe", "document.cookie",
)  # fmt: skip


def asset(name: str) -> str:
    return (ASSETS / name).read_text()


async def plain(engine: FakeEngine, path: str = "/", **options: object) -> httpx.Response:
    """The reply to a browser, unchecked: no document describes static files."""
    app = build_app(engine, ServerConfig(**options))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire") as client:
        return await client.get(path, headers=BROWSER)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_files_are_three_and_small() -> None:
    assert {path.name for path in ASSETS.iterdir()} == {name for name, _ in FILES.values()}
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= MAX_BYTES


def test_script_makes_no_html_of_text() -> None:
    script = asset("console.js")
    assert [word for word in FORBIDDEN if word in script] == []
    assert not re.search(r"setAttribute\([\"'`]on|javascript:", script)


def test_files_load_nothing_from_elsewhere() -> None:
    for name, _ in FILES.values():
        text = asset(name)
        assert not re.search(r"https?://(?!\[)|@import|url\(", re.sub(r"/\^.*?/[a-z]*\.exec", "", text)), name
    page = asset("console.html")
    assert not re.search(r"\son\w+=|<style|style=|<script(?! src=\"console/)", page)
    assert re.findall(r"(?:src|href)=\"([^\"#]*)", page) == [
        "data:,", "console/console.css", "console/console.js", "", "docs",
    ]  # fmt: skip


async def test_front_page_is_the_console_for_browsers(engine: FakeEngine) -> None:
    page = await plain(engine)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == asset("console.html")
    async with client_for(engine) as client:
        for accept in ("*/*", "application/json"):
            answer = await client.get("/", headers={"accept": accept})
            assert answer.json()["name"] == "quire"
        assert (await client.get("/console")).status_code == 404
        assert (await client.get("/console/console.html")).status_code == 404


async def test_policy_allows_own_files_only(engine: FakeEngine) -> None:
    for path in FILES:
        headers = (await plain(engine, path)).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


async def test_files_need_no_key_and_all_else_does(engine: FakeEngine) -> None:
    for path in FILES:
        assert (await plain(engine, path, api_key=("key",))).status_code == 200
    for path in ("/v1/models", "/console/frame", "/console", "/console/../v1/models", "/?x=1/console.js"):
        response = await plain(engine, path, api_key=("key",), admin_api_key="admin")
        assert response.status_code == (200 if path.startswith("/?") else 401), path
    async with client_for(engine, api_key=("key",)) as client:
        assert (await client.get("/")).status_code == 401, "the description is for those with a key"


async def test_files_are_found_below_a_prefix(engine: FakeEngine) -> None:
    for path in FILES:
        for prefix in ("", "/llm"):
            response = await plain(engine, prefix + path, root_path="/llm")
            assert response.status_code == 200, prefix + path
    assert (await plain(engine, "/llm", root_path="/llm")).text == asset("console.html")


async def test_no_console_leaves_the_plain_page(engine: FakeEngine) -> None:
    page = await plain(engine, console=False)
    assert "<script" not in page.text
    assert "<h1>quire" in page.text
    for path in ("/console/console.js", "/console/frame"):
        assert (await plain(engine, path, console=False, admin_api_key="admin")).status_code == 404


async def test_files_are_there_while_the_model_loads(engine: FakeEngine) -> None:
    engine.is_ready = False
    for path in FILES:
        assert (await plain(engine, path)).status_code == 200


async def test_known_file_is_not_sent_again(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        transport = client._transport
    async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
        first = await client.get("/console/console.js")
        again = await client.get("/console/console.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert "content-security-policy" in again.headers
        other = await client.get("/console/console.js", headers={"if-none-match": '"older"'})
        assert other.content == first.content
        head = await client.head("/console/console.js")
        assert (head.status_code, head.content) == (200, b"")
        assert (await client.post("/console/console.js")).status_code == 404
