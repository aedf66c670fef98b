# SPDX-License-Identifier: Apache-2.0
"""Tests of request contents against a real server: a refusal names the field, and nothing else happens.

Every test ends with the look at the server that `service` takes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fixtures.folded import folded
from tests.reliability.service import ADMIN, Service

USER = [{"role": "user", "content": "Hello"}]
JSON = {"content-type": "application/json"}
LIMIT = 16 * 2**20
"""--max-request-bytes, by default."""


def refused(reply: httpx.Response, status: int = 400) -> str:
    """The message of an error reply, whichever API's shape it has."""
    assert reply.status_code == status, f"{reply.status_code} {reply.text[:300]}"
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert isinstance(message, str)
    assert message
    return message


@pytest.mark.item(1)
@folded(
    ("path", "body"),
    [
        *(("/v1/completions", {"prompt": prompt}) for prompt in ("", [], [""], [[]], [[1], []])),
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {}),
        ("/v1/responses", {"input": []}),
        ("/v1/messages", {"messages": [], "max_tokens": 4}),
        ("/tokenize", {}),
    ],
    ids=str,
)
def test_empty_prompt_is_refused(path: str, body: dict[str, Any], service: Service) -> None:
    refused(service.post(path, body))


NO_TOKEN = [-1, "vocab", 2**31, 2**63, 2**64, 1.5, True, "1", None, [1]]


@pytest.mark.item(2)
@folded("bad", NO_TOKEN, ids=str)
def test_invalid_token_id_is_refused_in_every_field(bad: Any, service: Service) -> None:
    if bad == "vocab":
        info = service.client.post("/detokenize", json={"tokens": [2**31]}).json()["error"]["message"]
        bad = int(re.findall(r"\d+", info)[-1]) + 1
    prompts = [[1, bad]] if bad != [1] else [[1, bad], [[1], [bad]]]
    for prompt in (*prompts, [[1], [1, bad]]):
        refused(service.complete(prompt))
    for fields in ({"stop_token_ids": [1, bad]}, {"allowed_token_ids": [1, bad]}, {"bad_words": [bad]}):
        if fields in ({"bad_words": ["1"]}, {"bad_words": [[1]]}):
            continue  # words
        refused(service.complete(**fields))
        refused(service.chat(**fields))
    if isinstance(bad, int) and not isinstance(bad, bool):
        refused(service.complete(logit_bias={str(bad): 1.0}))
        refused(service.chat(logit_bias={str(bad): 1.0}))
    refused(service.post("/detokenize", {"tokens": [1, bad]}))


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.item(3)
@pytest.mark.parametrize("field", NUMBERS)
def test_non_finite_numbers_are_refused_and_extremes_make_none(field: str, service: Service) -> None:
    def send(literal: str) -> httpx.Response:
        body = f'{{"prompt": "Hello", "max_tokens": 3, "logprobs": 2, "seed": 1, "{field}": {literal}}}'
        return service.client.post("/v1/completions", content=body, headers=JSON)

    for literal in ("NaN", "Infinity", "-Infinity", "1e309", "-1e309"):
        refused(send(literal))
    for literal in ("-0.0", "1e-320", "5e-324", "1e-300", "1e300", "-1e300", "1.7976931348623157e308"):
        reply = send(literal)
        assert reply.status_code in (200, 400)
        assert "NaN" not in reply.text
        assert "Infinity" not in reply.text


@pytest.mark.item(3)
def test_extremes_that_are_allowed_give_tokens(service: Service) -> None:
    for fields in (
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e300},
        {"temperature": 1e-300},
        {"logit_bias": {str(token): -100.0 for token in range(300)}},
    ):
        reply = service.complete(logprobs=3, seed=1, **fields)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] > 0


@pytest.mark.item(4)
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0}, {"n": -1}, {"n": 10**9}, {"n": 2**63}, {"best_of": 10**9}, {"n": 2, "best_of": 1},
        {"prompt": ["x"] * 1025}, {"prompt": [[1]] * 100_000}, {"prompt": ["x"] * 100, "n": 100},
        {"prompt": ["x"] * 1000, "stop": ["y" * 2**20]}, {"n": 128, "allowed_token_ids": list(range(500)) * 1000},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)  # fmt: skip
def test_too_much_at_once_is_refused_before_anything_is_copied(
    fields: dict[str, Any], service: Service
) -> None:
    refused(service.complete(**{"prompt": "Hello", **fields}))


@pytest.mark.item(5)
def test_impossible_lengths_are_refused_and_none_is_cut_silently(service: Service) -> None:
    for value in (0, -1, 2**63, 2**200, 1.0, True):
        refused(service.complete(max_tokens=value))
    prompt = [5] * 2000
    reply = service.complete(prompt, max_tokens=2000, temperature=0).json()
    assert reply["adjusted"] == {"max_tokens": 48}
    too_long = service.complete([5] * 2048)
    assert "2048" in refused(too_long)
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.item(6)
def test_logprobs_are_bounded(service: Service) -> None:
    for value in (10**6, -2, 21, 2**80, True, 1.5):
        refused(service.complete(logprobs=value))
        refused(service.complete(prompt_logprobs=value))
        refused(service.chat(logprobs=True, top_logprobs=value))


@pytest.mark.item(6)
def test_logprobs_of_a_prompt_do_not_depend_on_the_prefix_cache(service: Service) -> None:
    fields = {"prompt_logprobs": 2, "max_tokens": 1, "temperature": 0, "cache_salt": "item-6"}
    prompt = list(range(1, 300))
    cold = service.complete(prompt, **fields).json()["choices"]
    service.complete(prompt, cache_salt="item-6")
    assert service.complete(prompt, **fields).json()["choices"] == cold


@pytest.mark.item(7)
def test_min_tokens_works_with_stop_ids_contradictions_refused(service: Service) -> None:
    everything = service.complete(min_tokens=4, max_tokens=8, stop_token_ids=list(range(2000)))
    assert everything.status_code in (200, 400), everything.text
    some = service.complete(min_tokens=4, max_tokens=8, stop_token_ids=[1, 2, 3]).json()
    assert some["usage"]["completion_tokens"] >= 4
    for fields in (
        {"min_tokens": 9, "max_tokens": 8},
        {"min_tokens": -1},
        {"min_tokens": 4, "max_tokens": 8, "allowed_token_ids": [7], "stop_token_ids": [7]},
    ):
        refused(service.complete(**fields))


@pytest.mark.item(8)
def test_a_body_of_the_limit_is_read_and_a_byte_more_is_not(service: Service) -> None:
    def body(size: int) -> bytes:
        content = b'{"prompt": "Hello", "max_tokens": 1}'
        return content + b" " * (size - len(content))

    assert service.client.post("/v1/completions", content=body(LIMIT), headers=JSON).status_code == 200
    refused(service.client.post("/v1/completions", content=body(LIMIT + 1), headers=JSON), 413)


@pytest.mark.item(8)
def test_a_body_that_never_ends_is_not_read_on(service: Service) -> None:
    chunk, num_sent = b"10000\r\n" + b" " * 2**16 + b"\r\n", 0
    with raw(service) as client, contextlib.suppress(OSError):
        client.sendall(head("POST", "content-type: application/json", "transfer-encoding: chunked"))
        while num_sent < 8 * LIMIT:
            client.sendall(chunk)
            num_sent += 2**16
    assert num_sent < 4 * LIMIT, "the connection is closed soon after the limit"


@pytest.mark.item(8)
def test_compressed_body_counts_its_decoded_size(service: Service) -> None:
    def send(content: bytes, encoding: str) -> httpx.Response:
        headers = {**JSON, "content-encoding": encoding}
        return service.client.post("/v1/completions", content=content, headers=headers)

    refused(send(gzip.compress(b" " * (LIMIT + 1)), "gzip"), 413)
    refused(send(gzip.compress(b'{"prompt": "Hello"}')[:-5], "gzip"))
    for encoding in ("br", "deflate", "gzip, gzip", "zstd"):
        refused(send(b'{"prompt": "Hello"}', encoding), 415)


def head(method: str, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


@contextlib.contextmanager
def raw(service: Service) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", service.process.port), timeout=30) as client:
        yield client


def status_of(service: Service, request: bytes) -> int:
    """Status of the first answer to these bytes."""
    with raw(service) as client:
        client.sendall(request)
        return int(client.recv(4096).split()[1])


@pytest.mark.item(9)
def test_heads_that_are_too_large_or_ambiguous_are_refused(service: Service) -> None:
    body = b'{"prompt": "Hello", "max_tokens": 1}'
    length = f"content-length: {len(body)}"
    json_type = "content-type: application/json"
    assert status_of(service, head("POST", json_type, length) + body) == 200
    assert status_of(service, head("GET", "x-long: " + "a" * 40_000, path="/health")) == 431
    assert status_of(service, head("GET", *(f"x-{i}: a" for i in range(1000)), path="/health")) == 431
    assert status_of(service, head("GET", *(f"x-{i}: a" for i in range(10_000)), path="/health")) in (
        400,
        431,
    )
    for extra in (
        "content-length: 5",
        "transfer-encoding: chunked",
        "content-length: -1",
        "content-length: 1e30",
    ):
        assert status_of(service, head("POST", json_type, length, extra) + body) == 400
    for host in ("/health", "x/?#", "x\\health", "quire?/health"):
        with raw(service) as client:
            client.sendall(f"GET /v1/requests HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            assert int(client.recv(4096).split()[1]) in (400, 401, 403), (
                "no host opens what the admin key opens"
            )


@pytest.mark.item(10)
@folded(
    "body",
    [
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
        b'{"prompt": [' + b"[]," * 200_000 + b"[]]}",
        b"{" + b",".join(b'"k%d": 1' % i for i in range(300_000)) + b"}",
        b"[" * 100_000,
        b"{",
        b"",
        b"null",
        b'"x"',
        b"{'prompt': 'a'}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_strange_json_is_refused(body: bytes, service: Service) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        refused(service.client.post(path, content=body, headers=JSON))


@pytest.mark.item(11)
def test_fields_without_effect_are_named_in_the_reply(service: Service) -> None:
    reply = service.chat(temprature=1, num_ctx=5)
    assert reply.json()["ignored"] == ["temprature", "num_ctx"]
    assert reply.headers["x-quire-ignored-fields"] == "temprature, num_ctx"


@pytest.mark.item(16)
@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"__class__": 1}},
        {"chat_template_kwargs": {"raise_exception": 1}},
        {"chat_template_kwargs": {"x" * 2**20: 1}},
    ],
    ids=lambda fields: json.dumps(fields)[:50],
)
def test_request_cannot_change_how_the_template_runs(fields: dict[str, Any], service: Service) -> None:
    reply = service.chat(**fields, temperature=0)
    if reply.status_code == 200:  # what the template does not read has no effect, and that is said
        plain = service.chat(temperature=0).json()
        assert reply.json()["choices"] == plain["choices"]
        assert reply.json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        assert "chat_template_kwargs" in str(reply.json()["ignored"])
    else:
        refused(reply)


@pytest.mark.item(17)
def test_special_tokens_that_a_user_writes_are_text(service: Service) -> None:
    """A message of such a literal has more tokens than an empty one by those of its plain characters."""

    def ids(text: str) -> list[int]:
        body = {"messages": [{"role": "user", "content": text}]}
        return list(service.post("/tokenize", body).json()["tokens"])

    def texts(tokens: list[int]) -> list[str]:
        return [service.post("/detokenize", {"tokens": [token]}).json()["prompt"] for token in tokens]

    plain = texts(ids(""))
    specials = sorted({text for text in plain if re.fullmatch(r"<\|.*\|>", text)})
    assert specials, "the model's template has special tokens"
    for literal in [*specials, "".join(specials), f"a{specials[0]}b", specials[0][:3] + specials[0][3:]]:
        shown = texts(ids(literal))
        for special in specials:
            assert shown.count(special) == plain.count(special)
        assert literal in "".join(shown)


@pytest.mark.item(19)
def test_no_address_in_a_request_is_ever_opened(service: Service) -> None:
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as trap:

        def listen() -> None:
            while True:
                try:
                    client, _ = trap.accept()
                except OSError:
                    return
                connections.append(client)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        host = f"127.0.0.1:{trap.getsockname()[1]}"
        urls = [f"http://{host}/x.png", f"http://ok\\@{host}/", f"https://{host}/", "file:///etc/passwd"]
        for url in [*urls, "http://169.254.169.254/latest/meta-data"]:
            for path, part in (
                ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": url}}),
                ("/v1/chat/completions", {"type": "input_audio", "input_audio": {"data": url}}),
                ("/v1/messages", {"type": "image", "source": {"type": "url", "url": url}}),
            ):
                messages = [{"role": "user", "content": [part]}]
                refused(service.post(path, {"messages": messages, "max_tokens": 4}))
            inputs = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
            refused(service.post("/v1/responses", {"input": inputs}))
            ollama = {"model": "quire-demo", "messages": [{"role": "user", "content": "a", "images": [url]}]}
            refused(service.post("/api/chat", ollama))
        trap.shutdown(socket.SHUT_RDWR)
        listener.join(300)
    assert not connections


@pytest.mark.item(20)
@folded("name", ["../x", "/etc/passwd", "a\0b", "x" * 10_000, "..%2f..%2fx", "quire-demo/../x"])
def test_names_of_models_are_looked_up_and_are_no_paths(name: str, service: Service) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        reply = service.post(path, {"model": name, "prompt": "a", "messages": USER})
        assert len(refused(reply, reply.status_code)) < 400
        assert reply.status_code in (400, 404)
    assert service.client.get(f"/v1/models/{name}".replace("\0", "%00")).status_code in (400, 404)


@pytest.mark.item(21)
def test_an_id_that_clients_choose_is_a_label_and_opens_nothing(service: Service) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(lambda _: service.post("/v1/completions", {"prompt": "Hi", "temperature": 0},
                                            **{"x-request-id": "same"}), range(8))
        )  # fmt: skip
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.json()["id"] for reply in replies}) == 8
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
    assert {reply.headers["x-request-id"] for reply in replies} == {"same"}
    for headers in ({}, {"authorization": "Bearer other"}):
        assert service.client.post("/abort_requests", json={}, headers=headers).status_code == 401
    unknown = service.client.post("/abort_requests", json={"request_ids": ["same"]}, headers=ADMIN)
    assert unknown.json() == {"num_aborted": 0}


@pytest.mark.item(22)
def test_cache_of_one_salt_is_not_found_by_another(service: Service) -> None:
    prompt = [7] * 200
    text = "one two three four five six seven eight nine ten " * 8

    def cached(path: str, salt: str | None) -> int:
        body: dict[str, Any] = {"max_tokens": 1, **({} if salt is None else {"cache_salt": salt})}
        body |= {"prompt": prompt} if path.endswith("/completions") and "chat" not in path else {}
        body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {}
        usage = service.post(path, body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    for path in ("/v1/completions", "/v1/chat/completions"):
        assert cached(path, f"A{path}") == 0
        assert cached(path, f"A{path}") > 0
        assert cached(path, f"B{path}") == 0
        assert cached(path, None) == 0
    for salt in ("", "x" * 129, 5, "x" * 10**6):
        refused(service.complete(cache_salt=salt))


TELLTALE = re.compile(
    r"0x[0-9a-f]{6}|/home|/root|/tmp|site-packages|Traceback|\.py\b|Error\(|object at|<class"
)


@pytest.mark.item(24)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": {"a": 1}}),
        ("/v1/completions", {"prompt": "a", "temperature": "hot", "logit_bias": {"x": "y"}}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x" * 2**20: 1}}),
        ("/v1/completions", {"prompt": "a", "model": "/etc/passwd"}),
        ("/v1/completions", {"prompt": [2**70]}),
        ("/v1/chat/completions", {"messages": [{"role": 1}]}),
        ("/v1/chat/completions", {"messages": USER, "tools": [1]}),
        ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "x"}}),
        ("/v1/responses", {"input": 1}),
        ("/v1/messages", {"messages": USER}),
        ("/api/chat", {"model": "quire-demo", "messages": 1}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/nowhere", {}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_error_describes_the_request_and_not_the_server(
    path: str, body: dict[str, Any], service: Service
) -> None:
    reply = service.post(path, body)
    assert reply.status_code in (400, 404)
    assert not TELLTALE.search(reply.text), reply.text
    assert len(reply.text) < 2000, "what was sent is not sent back"


@pytest.mark.item(25)
def test_strange_methods_and_paths_leave_no_trace_in_the_metrics(service: Service) -> None:
    def sweep(seed: int) -> None:
        for number in range(100):
            service.client.request(f"FOO{seed}X{number}", "/v1/completions")
            service.client.get(f"/p{seed}/{number}")

    def names() -> set[str]:
        return {line.rsplit(" ", 1)[0] for line in service.client.get("/metrics").text.splitlines()}

    sweep(0)
    names()  # which is a request, too
    before = names()
    sweep(1)
    assert names() == before
