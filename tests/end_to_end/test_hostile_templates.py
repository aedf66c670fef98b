# SPDX-License-Identifier: Apache-2.0
"""A chat template from a stranger's model, in a real server: whatever it does costs the requests that meet it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import Server

pytestmark = pytest.mark.more
LIMIT_S = 30.0
"""A guard against hanging; the server's own limit is two seconds."""
FOREVER = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "sums": "{% set ns = namespace(x=1) %}{% for a in range(99999) %}{% set ns.x = ns.x * 3 %}{% endfor %}{{ ns.x }}",
}
GIGABYTES = {
    "times": "{{ 'x' * n }}",
    "center": "{{ 'x' | center(n) }}",
    "percent": "{{ ('%' ~ n ~ 'd') % 1 }}",
    "format filter": "{{ ('%' ~ n ~ 'd') | format(1) }}",
    "format method": "{{ ('{:' ~ n ~ 'd}').format(1) }}",
    "ljust": "{{ 'x'.ljust(n) }}",
    "indent": "{{ ('x\n' * m) | indent(1000) }}",
    "replace": "{{ ('x' * m) | replace('x', 'y' * 1000) }}",
    "join": "{{ range(99999) | join('y' * 100000) }}",
    "doubling": "{% set s = namespace(x='x') %}{% for a in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
    "doubled list": "{% set s = namespace(x=[1]) %}{% for a in range(40) %}{% set s.x = s.x + s.x %}{% endfor %}",
    "printed": "{% for a in range(99999) %}{{ 'x' * 20000 }}{% endfor %}",
    "power": "{{ 10 ** n }}",
    "tojson": "{{ ('x' * 1000) | tojson(indent=n) }}{{ [1] | tojson(indent=n) }}",
    "batch": "{{ [1] | batch(n, 'x') | list | length }}",
    "wordwrap": "{{ ('x' * m) | wordwrap(1, True, 'y' * 1000) }}",
}
FORBIDDEN = {
    "class": "{{ messages.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "format field": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "change": "{{ messages.append(messages[0]) }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
}
UNDEFINED = {
    "attr filter": "{{ messages | attr('__class__') | attr('__mro__') }}",
    "map attribute": "{{ messages | map(attribute='__class__') | list }}",
    "frame": "{% set g = namespace(x=1) %}{{ raise_exception.__code__ }}{{ g }}",
}
"""To a template these are values that are not there."""
KINDS = (("forever", FOREVER), ("gigabyte", GIGABYTES), ("forbidden", FORBIDDEN), ("undefined", UNDEFINED))
HOSTILE = {f"{kind}: {name}": text for kind, table in KINDS for name, text in table.items()}
NUMBERS = "{% set n = messages | length * 1000000000 %}{% set m = messages | length * 1000000 %}"
"""Not constants, which Jinja computes when the template is compiled: then the server does not start."""
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def template() -> str:
    """Does the one or the other thing, as the last message says."""
    branches = [
        f"{{% {'elif' if index else 'if'} messages[-1].content == {name!r} %}}{text}"
        for index, (name, text) in enumerate(HOSTILE.items())
    ]
    return "".join([NUMBERS, *branches, "{% else %}", PLAIN, "{% endif %}"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    file = folder / "template.jinja"
    file.write_text(template())
    running = Server("--chat-template", str(file), log=folder / "log").wait_ready()
    limit = address_space_of(running) + 2**30  # so that whoever runs these tests goes on, too
    resource.prlimit(running.process.pid, resource.RLIMIT_AS, (limit, limit))
    yield running
    assert running.stop() == 0, running.log.read_text()


def ask(server: Server, content: str) -> httpx.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT_S)


def status_of(server: Server, field: str) -> int:
    """Bytes, of the API process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def address_space_of(server: Server) -> int:
    return status_of(server, "VmSize")


def most_memory_of(server: Server) -> int:
    return status_of(server, "VmHWM")


@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.startswith("undefined")])
def test_hostile_template_is_a_400_and_others_are_answered(server: Server, name: str) -> None:
    before = most_memory_of(server)
    with ThreadPoolExecutor(2) as pool:
        hostile, other = pool.submit(ask, server, name), pool.submit(ask, server, "Hello")
        assert other.result().status_code == 200, other.result().text
        assert hostile.result().status_code == 400, hostile.result().text
    error = hostile.result().json()["error"]
    assert error["message"].startswith("the chat template")
    assert error["param"] == "messages"
    assert ask(server, "Hello").status_code == 200
    assert most_memory_of(server) - before < 2**29


@pytest.mark.parametrize("name", [name for name in HOSTILE if name.startswith("undefined")])
def test_template_cannot_reach_hidden_attributes(server: Server, name: str) -> None:
    response = ask(server, name)
    assert response.status_code in (200, 400), response.text
    assert "class" not in response.text
