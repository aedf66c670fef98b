# SPDX-License-Identifier: Apache-2.0
"""The console in a real browser, before a real server; an error in the browser's console fails each of them."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.browser import CHROMIUM, Browser, Page, browser
from tests.console.hostile import DEEP, TEXTS
from tests.console.prefix_proxy import prefix_proxy
from tests.console.screenshots import load
from tests.end_to_end.server import ADMIN, Server

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
]
KEY = "sk-console"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
IDLE = "document.getElementById('stop').hidden"
TAGS = {
    "A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DIV", "EM", "H1", "H2", "H3", "H4", "H5", "H6", "HR", "IMG", "LI", "OL",
    "P", "PRE", "S", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL",
}  # fmt: skip
ATTRIBUTES = {"href", "target", "rel", "src", "alt", "class", "type", "title", "start"}
TOOL = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
     "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("console") / "log"
    args = (
        "--num-gpu-blocks-override",
        "300",
        "--max-num-seqs",
        "4",
        "--api-key",
        KEY,
        "--root-path",
        "/llm",
    )
    started = Server(*args, log=log).wait_ready()
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    """The address of the server for browsers: below a prefix."""
    with prefix_proxy(server.port, "/llm") as url:
        yield url


@pytest.fixture
def page(chromium: Browser, url: str) -> Iterator[Page]:
    """A page that has both keys, behind a prefix."""
    page = chromium.new_page()
    page.keep("keys", {"api": KEY, "admin": "admin"})
    page.open(f"{url}/")
    page.until("document.getElementById('model').options.length > 0")
    yield page
    late = [one for one in page.failures if "503" in one and "console/frame" in one]  # of a busy machine
    assert [one for one in page.failures if one not in late] == []
    elsewhere = [one for one in page.requests if not one.startswith((f"{url}/", "data:", "blob:"))]
    assert elsewhere == []
    assert not [one for one in page.requests if KEY in one or "admin" in one], "a key is in no URL"


def put(page: Page, name: str, value: Any, storage: str = "sessionStorage") -> None:
    page.run(f"{storage}.setItem('quire.{name}', {json.dumps(json.dumps(value))})")


def say(page: Page, text: str) -> None:
    page.type("#draft", text)
    page.key("Enter")
    page.until(f"{IDLE} && document.getElementById('draft').value === ''")


def texts(page: Page, role: str) -> list[str]:
    found = page.run(
        f"[...document.querySelectorAll('.message.{role} .body')].map((one) => one.textContent.trim())"
    )
    assert isinstance(found, list)
    return found


def press(page: Page, label: str, place: int = -1) -> None:
    """Press the last button, or another, with this label."""
    page.run(
        "[...document.querySelectorAll('button')]"
        f".filter((one) => one.textContent === {json.dumps(label)}).at({place}).click()"
    )


def give_file(page: Page, field: str, name: str, parts: str, kind: str = "") -> None:
    """Let a file be chosen; `parts` is the script of its content."""
    page.run(
        f"{{ const input = document.getElementById('{field}'), files = new DataTransfer();"
        f" files.items.add(new File([{parts}], '{name}', {{ type: '{kind}' }}));"
        " input.files = files.files; input.dispatchEvent(new Event('change')); 0 }"
    )


def choose(page: Page, field: str, value: str) -> None:
    """Choose from a menu."""
    page.run(
        f"document.getElementById('{field}').value = '{value}';"
        f" document.getElementById('{field}').dispatchEvent(new Event('change')); 0"
    )


@pytest.mark.parametrize("kind", ["light", "dark", "phone"])
def test_every_page_opens_without_an_error(page: Page, url: str, kind: str) -> None:
    if kind == "phone":
        page.resize(390, 780, mobile=True)
    page.run(f"localStorage.setItem('quire.theme', '\"{'dark' if kind == 'dark' else 'light'}\"')")
    page.open(f"{url}/?{kind}")
    for name, condition in {
        "requests": "document.querySelectorAll('.tile').length === 8",
        "cache": "document.querySelector('.map canvas').width > 300 && document.querySelector('#legend span') !== null",
        "metrics": "document.querySelectorAll('.chart').length === 12",
        "chat": "document.querySelector('#messages .empty') !== null",
    }.items():
        page.run(f"location.hash = '{name}'")
        page.until(condition)
        assert page.run("document.title") == f"quire: {name}"
        assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    expected = "dark" if kind == "dark" else "light"
    assert page.run("document.documentElement.dataset.theme") == expected


def test_chat_answers_edits_and_keeps_branches(page: Page, url: str) -> None:
    say(page, "What is the capital of France?")
    assert texts(page, "assistant") == ["The capital of France is Paris."]
    assert "tokens" in page.run("document.getElementById('usage').textContent")
    press(page, "Retry")
    page.until(f"{IDLE} && document.querySelector('.message.assistant .tools').textContent.includes('2 / 2')")
    press(page, "Edit")
    page.run("document.querySelector('.message textarea').select()")
    page.type(".message textarea", "What is the capital of Italy?")
    page.key("Enter")
    page.until(f"{IDLE} && document.querySelector('.message.assistant .body')?.textContent.includes('Rome')")
    press(page, "‹")
    assert texts(page, "user") == ["What is the capital of France?"]
    assert texts(page, "assistant") == ["The capital of France is Paris."]
    page.open(f"{url}/?again")  # the tab keeps it
    assert texts(page, "user") == ["What is the capital of France?"]
    press(page, "New chat")
    assert texts(page, "user") == []


def test_stop_ends_the_answer_and_the_request(page: Page, url: str, server: Server) -> None:
    put(page, "settings", {"extra": '{"ignore_eos": true}', "max_tokens": "900"}, "localStorage")
    page.open(f"{url}/?stop")
    page.type("#draft", "hello")
    page.key("Enter")
    page.until("document.querySelector('.message.assistant .body')?.textContent.length > 20")
    page.key("Escape")
    page.until(IDLE)
    assert "stopped" in page.run("document.querySelector('.message.assistant .tools').textContent")
    server.check_rest()


def test_settings_and_system_prompt_are_sent(page: Page, url: str) -> None:
    put(
        page,
        "settings",
        {"temperature": "0", "seed": "7", "stop": "Par\n", "system": "Be brief."},
        "localStorage",
    )
    page.open(f"{url}/?settings")
    page.run(
        "{ const before = fetch; globalThis.fetch = (url, options) => {"
        " if (options.body) globalThis.sent = JSON.parse(options.body); return before(url, options); }; 0 }"
    )
    say(page, "What is the capital of France?")
    assert texts(page, "assistant") == ["The capital of France is"]
    sent = page.run("sent")
    assert (sent["temperature"], sent["seed"], sent["stop"]) == (0, 7, ["Par"])
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    put(page, "settings", {"tools": "{"}, "localStorage")
    page.open(f"{url}/?malformed")
    page.type("#draft", "hello")
    page.key("Enter")
    page.until("document.querySelector('#settings .error:not(:empty)') !== null")
    assert len(texts(page, "assistant")) == 1, "nothing was sent"


def test_reasoning_and_tool_calls_are_folded(page: Page, url: str) -> None:
    put(page, "settings", {"tools": json.dumps(TOOL), "thinking": "on", "temperature": "0"}, "localStorage")
    page.open(f"{url}/?tools")
    say(page, "What is the weather in Paris?")
    titles = page.run(
        "[...document.querySelectorAll('.fold:not([open]) summary')].map((one) => one.textContent)"
    )
    assert "Tool call: get_weather" in titles
    assert json.loads(page.run("[...document.querySelectorAll('.fold pre')].at(-1).textContent")) == {
        "city": "Paris"
    }
    page.type(".message textarea", '{"temperature": 21, "sky": "clear"}')
    press(page, "Send results")
    page.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 2")
    assert texts(page, "tool") == ['{"temperature": 21, "sky": "clear"}']
    put(page, "settings", {"thinking": "on"}, "localStorage")
    page.open(f"{url}/?thinks")
    press(page, "New chat")
    say(page, "What is 12 + 30?")
    assert "Reasoning" in page.run(
        "[...document.querySelectorAll('.fold summary')].map((one) => one.textContent)"
    )


def test_files_are_attached_or_refused(page: Page) -> None:
    give_file(page, "attach-file", "notes.txt", "'a note'", "text/plain")
    page.until("document.querySelectorAll('#attachments .file').length === 1")
    for name, kind, parts, why in (
        ("cat.png", "image/png", "'x'", "takes no image"),
        ("raw.bin", "application/octet-stream", "new Uint8Array([255, 254, 0])", "is no text"),
        ("big.txt", "text/plain", "'x'.repeat(300000)", "bytes"),
    ):
        give_file(page, "attach-file", name, parts, kind)
        page.until(f"document.getElementById('notice').textContent.includes('{why}')")
    assert page.run("document.querySelectorAll('#attachments .file').length") == 1
    say(page, "Hello!")
    assert page.run("document.querySelector('.message.user .file').textContent") == "notes.txt"
    assert len(texts(page, "assistant")[0]) > 0


def test_conversation_is_saved_and_opened(page: Page) -> None:
    say(page, "What is the capital of France?")
    page.run("URL.createObjectURL = (blob) => { globalThis.saved = blob; return 'blob:nowhere'; }; 0")
    page.run("HTMLAnchorElement.prototype.click = () => undefined; 0")
    press(page, "Markdown")
    assert "## Assistant\n\nThe capital of France is Paris." in page.run("saved.text()")
    press(page, "Save")
    saved = page.run("saved.text()")
    press(page, "New chat")
    give_file(page, "import-file", "chat.json", json.dumps(saved))
    page.until("document.querySelectorAll('.message.assistant').length === 1")
    loop = {
        "nodes": [
            {"id": 0, "parent": None, "role": "root", "children": [1]},
            {"id": 1, "parent": 0, "role": "x", "children": [1, 0, 5]},
        ]
    }
    give_file(page, "import-file", "chat.json", json.dumps(json.dumps(loop)))
    page.until("document.querySelectorAll('.message').length === 1")
    for text in ("", "{", "[]", '{"nodes": 1}', '{"nodes": []}', "null"):
        page.run("document.getElementById('notice').hidden = true")
        give_file(page, "import-file", "chat.json", json.dumps(text))
        page.until("!document.getElementById('notice').hidden")


def test_hostile_answers_stay_text(page: Page) -> None:
    for text in TEXTS:
        page.run(
            f"document.querySelector('#messages').replaceChildren(quireConsole.renderMarkdown({json.dumps(text)}))"
        )
        found = page.run(
            "[...document.querySelectorAll('#messages *')].map((one) =>"
            " [one.tagName, Object.fromEntries([...one.attributes].map((each) => [each.name, each.value]))])"
        )
        check_elements(text, found)
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.run("globalThis.pwned === undefined")
    page.failures[:] = [
        one for one in page.failures if "data:image/png" not in one
    ]  # no picture, but harmless


def check_elements(text: str, found: list[tuple[str, dict[str, str]]]) -> None:
    """Assert that elements are of those that Markdown has, and their links and images harmless."""
    assert {tag for tag, _ in found} <= TAGS, text
    assert {name for _, attributes in found for name in attributes} <= ATTRIBUTES, text
    for tag, attributes in found:
        if tag == "A":
            assert attributes["href"].startswith(("http:", "https:", "mailto:")), text
            assert "noopener" in attributes["rel"]
        if tag == "IMG":
            assert attributes["src"].startswith("data:image/png;base64,"), text


def test_policy_stops_html_that_a_bug_would_make(page: Page) -> None:
    assert page.run(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } })()"
    )
    refused = (
        "new Promise((done) => { const image = document.createElement('img');"
        " image.onerror = () => done(true); image.onload = () => done(false);"
        " image.src = 'https://evil.example/x.png'; })"
    )
    assert page.run(refused)
    page.failures.clear()  # the policy's own reports
    page.requests[:] = [one for one in page.requests if "evil" not in one]


def test_deep_answers_are_rendered(page: Page) -> None:
    for text in DEEP:
        page.run(f"quireConsole.renderMarkdown({json.dumps(text)}).childNodes.length")


def test_markdown_becomes_the_elements_that_it_means(page: Page) -> None:
    def tree(text: str) -> Any:
        return page.run(
            "(() => { const show = (node) => node.nodeType === 3 ? node.data"
            " : [node.tagName.toLowerCase(), ...[...node.childNodes].map(show)];"
            f" return [...quireConsole.renderMarkdown({json.dumps(text)}).childNodes].map(show); }})()"
        )

    assert tree("a *b* **c** `d` ~~e~~\nf") == [
        ["p", "a ", ["em", "b"], " ", ["strong", "c"], " ", ["code", "d"], " ", ["s", "e"], ["br"], "f"]
    ]
    assert tree("# One\n\n---\ntext") == [["h1", "One"], ["hr"], ["p", "text"]]
    assert tree("- a\n- b\n  - c\n\nd") == [["ul", ["li", "a"], ["li", "b", ["ul", ["li", "c"]]]], ["p", "d"]]
    assert tree("1. a\n2. b") == [["ol", ["li", "a"], ["li", "b"]]]
    assert tree("> a\n> b") == [["blockquote", ["p", "a", ["br"], "b"]]]
    assert tree("| a | b |\n|---|:-:|\n| 1 | **2** |") == [
        [
            "table",
            ["thead", ["tr", ["th", "a"], ["th", "b"]]],
            ["tbody", ["tr", ["td", "1"], ["td", ["strong", "2"]]]],
        ]
    ]
    assert tree("[a](https://b.c/d) https://e.f.") == [["p", ["a", "a"], " ", ["a", "https://e.f"], "."]]
    assert (
        page.run("quireConsole.renderMarkdown('snake_case_name 2 * 3 * 4').textContent")
        == "snake_case_name 2 * 3 * 4"
    )
    code = tree("```python\na = 1\n\nb = 2\n```\nend")
    assert code[0][2] == ["pre", ["code", "a = 1\n\nb = 2"]]
    assert code[1] == ["p", "end"]
    assert tree("```\nnever closed")[0][2] == ["pre", ["code", "never closed"]]


def test_page_asks_for_a_key_and_keeps_it_in_the_tab(chromium: Browser, url: str) -> None:
    page = chromium.new_page()
    page.open(f"{url}/")
    page.until("document.getElementById('notice').textContent.includes('needs an API key')")
    press(page, "Enter a key")
    page.type("#api-key", KEY)
    press(page, "Use")
    page.until("document.getElementById('model').options.length === 1")
    say(page, "What is the capital of France?")
    assert texts(page, "assistant") == ["The capital of France is Paris."]
    page.run("location.hash = 'cache'")
    page.until("document.getElementById('notice').textContent.includes('admin key')")
    assert KEY not in page.run("JSON.stringify(localStorage) + document.cookie + location.href")
    assert KEY in page.run("JSON.stringify(sessionStorage)")
    assert {one.split()[0] for one in page.failures} <= {"Failed"}, "401, of the browser's own reports"


def test_map_equals_the_servers_books(page: Page, server: Server) -> None:
    page.run("location.hash = 'cache'")
    with load(server.url, KEY):
        page.until("/Shared [1-9]/.test(document.getElementById('legend').textContent)")
        page.until("Number(document.getElementById('moment').max) > 3")
        choose(page, "color", "request")
        page.until("/cmpl-/.test(document.getElementById('legend').textContent)")
        page.run("document.querySelector('#device-map canvas').focus()")
        page.key("ArrowRight")
        page.until("document.getElementById('tip').textContent.startsWith('Block 1')")
        page.key("Enter")
        page.until("document.getElementById('block').textContent.includes('Block 1 on the device')")
        page.click("#play")
        page.until("/ago/.test(document.getElementById('moment-text').textContent)")
        page.click("#live")
        page.run("location.hash = 'requests'")
        page.until("document.querySelectorAll('#request-table .state.running').length > 0")
        page.until("document.querySelectorAll('#request-table .state.waiting').length > 0")
        page.until(
            "/place among the running requests/.test(document.getElementById('request-table').textContent)"
        )
        press(page, "Abort")
    page.run("location.hash = 'cache'")
    page.until("document.getElementById('cache-summary').textContent.startsWith('0 of 299')")
    asked = urllib.request.Request(f"{server.url}/v1/integrity", headers=ADMIN)
    with urllib.request.urlopen(asked) as reply:
        assert json.load(reply)["cores"][0]["kv_cache_usage"] == 0


def test_page_without_admin_routes_shows_a_notice(chromium: Browser, tmp_path: Path) -> None:
    server = Server(log=tmp_path / "log", QUIRE_ADMIN_API_KEY="").wait_ready()
    try:
        page = chromium.new_page()
        page.open(f"{server.url}/#requests")
        page.until("document.getElementById('notice').textContent.includes('--admin-api-key')")
    finally:
        server.process.terminate()
        server.process.wait(60)
