# SPDX-License-Identifier: Apache-2.0
"""The document that the server publishes of itself, and the page that shows it.

That replies are what it says is held by every other test of a route: `serving.CheckedClient` looks at each.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from fastapi.routing import APIRoute

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai.app import CONTROLS, build_app, routers
from quire.entrypoints.openai.openapi.limits import ServerLimits
from quire.entrypoints.openai.openapi.operation import operation_of
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.relations import is_relation
from tests.entrypoints.openai.replies import ODD
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded
from tests.fixtures.quick import quick

EVERYTHING: dict[str, Any] = {"admin_api_key": "admin", "enable_tokenizer_info_endpoint": True}
OPEN = {"/health", "/livez", "/readyz", "/ping"}
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 5, "messages": HI},
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": {"model": "fake-model", "messages": HI, "stream": False},
    "/api/generate": {"model": "fake-model", "prompt": "hi", "stream": False},
    "/api/show": {"model": "fake-model"},
    "/completion": {"prompt": "hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/apply-template": {"messages": HI},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/abort_requests": {},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}


def document(engine: FakeEngine | None = None, **options: Any) -> dict[str, Any]:
    app = build_app(engine or FakeEngine(), ServerConfig(**options))  # type: ignore[arg-type]
    written = app.state.document.under(ServerLimits.from_server(app.state.server))
    assert isinstance(written, dict)
    return written


def operations(written: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in written["paths"].items():
        for operation in methods.values():
            yield path, operation


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from references(item)


def body_validator(written: dict[str, Any], path: str) -> jsonschema_rs.Draft202012Validator:
    schema = written["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema_rs.Draft202012Validator({**schema, "components": written["components"]})


def test_every_route_describes_body_and_reply() -> None:
    for router in (*routers(ServerConfig(**EVERYTHING), EngineConfig()), *CONTROLS):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            assert operation_of(route.endpoint) is not None, f"{route.path} is not described"
            assert route.description, f"{route.path} has no docstring"


def test_references_lead_somewhere_and_names_are_given_once() -> None:
    written = document(**EVERYTHING)
    for reference in set(references(written)):
        node = written
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
    names = [operation["operationId"] for _, operation in operations(written)]
    assert len(set(names)) == len(names)
    for name in written["components"]["schemas"]:
        assert re.fullmatch(r"[A-Za-z]+", name), name


def test_schemas_are_schemas() -> None:
    for name, schema in document(**EVERYTHING)["components"]["schemas"].items():
        assert jsonschema_rs.meta.is_valid(schema), name


def test_document_requires_keys_where_needed() -> None:
    for options, wanted in (
        ({}, lambda path: []),
        ({"api_key": ("k",)}, lambda path: [] if path in OPEN else ["bearer", "header"]),
        (
            {"api_key": ("k",), "allow_unauthenticated_metrics": True},
            lambda path: [] if path in OPEN | {"/metrics"} else ["bearer", "header"],
        ),
    ):
        for path, operation in operations(document(**options)):
            schemes = [name for scheme in operation.get("security", []) for name in scheme]
            assert schemes == wanted(path), path
            assert ("401" in operation["responses"]) == bool(schemes)
    for options in ({}, {"api_key": ("k",)}):
        written = document(admin_api_key="admin", **options)
        for path in ("/v1/requests", "/abort_requests", "/reset_prefix_cache"):
            (operation,) = written["paths"][path].values()
            assert operation["security"] == [{"adminBearer": []}, {"adminHeader": []}]


def test_document_states_a_tenant_limit(tmp_path: Path) -> None:
    for limit, is_told in (("max_concurrent: 1", True), ("weight: 1", False)):
        keys = tmp_path / "keys.yaml"
        keys.write_text(f"a:\n  keys: [k]\n  {limit}\n")
        for path, methods in document(api_key_file=str(keys))["paths"].items():
            for method, operation in methods.items():
                assert ("429" in operation["responses"]) == (is_told and method == "post"), path


def test_errors_have_the_shape_of_their_api() -> None:
    written = document()
    for path, kind in (
        ("/v1/messages", "AnthropicError"),
        ("/api/chat", "OllamaError"),
        ("/v1/completions", "ErrorBody"),
    ):
        assert written["paths"][path]["post"]["responses"]["400"]["$ref"].endswith(f"/{kind}400")
        response = written["components"]["responses"][f"{kind}503"]
        assert response["content"]["application/json"]["schema"]["$ref"].endswith(f"/{kind}")
        assert "retry-after" in response["headers"]


def test_the_limits_of_the_server_are_in_the_schemas() -> None:
    engine = FakeEngine(max_model_len=77, max_logprobs=3, served_model_name=("a", "b"))
    validator = body_validator(document(engine), "/v1/completions")
    for good, bad in (
        ({"max_tokens": 78}, {"max_tokens": 0.5}),
        ({"logprobs": 3}, {"logprobs": 4}),
        ({"model": "b"}, {"model": "c"}),
        ({"temperature": 2}, {"temperature": 2.1}),
        ({"top_p": 1}, {"top_p": 0}),
        ({"stop_token_ids": [257]}, {"stop_token_ids": [258]}),
        ({"stop": ["x"]}, {"stop": [""]}),
        ({"priority": 0}, {"priority": 1}),
        ({"n": None}, {"n": "1"}),
        ({"unheard_of": 1}, {"cache_salt": ""}),
    ):
        assert validator.is_valid({"prompt": "hi", **good}), good
        assert not validator.is_valid({"prompt": "hi", **bad}), bad
    strict = body_validator(document(engine, unknown_fields="reject"), "/v1/completions")
    assert not strict.is_valid({"prompt": "hi", "unheard_of": 1})
    ranked = document(FakeEngine(scheduling_policy="priority"))
    assert body_validator(ranked, "/v1/completions").is_valid({"prompt": "hi", "priority": 1})


async def test_document_follows_resolved_engine_values() -> None:
    engine = FakeEngine()
    async with client_for(engine) as client:
        before = (await client.get("/openapi.json")).json()
        engine.config = engine.config.evolve(max_logprobs=3)
        after = (await client.get("/openapi.json")).json()
    assert (before, after) == (document(), document(FakeEngine(max_logprobs=3)))
    assert before != after


@pytest.mark.parametrize("share", quick([3, 1], [3]))
@pytest.mark.parametrize("path", list(BODIES))
async def test_schema_accepts_exactly_the_bodies_that_are_served(path: str, share: int) -> None:
    """Each field of each request with each odd value, with a sixth of them if an earlier route has it, too.

    With every change a third of the values, each field another one.
    """
    written = document(**EVERYTHING)
    validator, base = body_validator(written, path), BODIES[path]
    earlier = list(BODIES)[: list(BODIES).index(path)]
    async with client_for(FakeEngine(), **EVERYTHING) as client:
        for field, value in list(_cases(written, path, earlier))[::share]:
            body = {**base, field: value}
            response = await client.post(path, json=body, headers={"authorization": "Bearer admin"})
            fits, taken = validator.is_valid(body), response.status_code == 200
            assert fits or not taken, f"{body} is taken"
            assert taken or not fits or is_relation(response.text, body), f"{body}: {response.text}"


def _cases(written: dict[str, Any], path: str, earlier: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """All fields of a request with all values; of one rule for all, that for fields which are refused, with a few.

    Those that a route of `earlier` has with the same schema take a sixth of the values, each route another one.
    """
    others = [_properties(written, other) for other in earlier]
    asked = [field for other in others for field in other.items()]
    for name, one in _properties(written, path).items():
        some = ODD[::7] if "enum" in one else ODD[len(others) % 6 :: 6] if (name, one) in asked else ODD
        for value in (None, *some):
            yield name, value


def _properties(written: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields of a route's request, each with its schema."""
    schema = written["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    models = [reference.rsplit("/", 1)[-1] for reference in references(schema)]
    schemas = written["components"]["schemas"]
    return {name: one for model in models for name, one in schemas[model]["properties"].items()}


async def test_page_is_self_contained_and_shows_every_operation() -> None:
    async with client_for(FakeEngine()) as client:
        page = await client.get("/docs")
        written = (await client.get("/openapi.json")).json()
        assert "/docs" in (await client.get("/")).json()["docs"]
        assert (await client.get("/redoc")).status_code == 404
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|<link|src=|https?://", page.text)
    for path, methods in written["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    anchors, links = (set(re.findall(form, page.text)) for form in (r"id='(\w+)'", r"href='#(\w+)'"))
    assert links <= anchors == set(written["components"]["schemas"])


async def test_the_document_can_be_kept_back() -> None:
    async with client_for(FakeEngine(), disable_fastapi_docs=True) as client:
        for path in ("/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 404
        front = (await client.get("/")).json()
    assert front["docs"] is None
    assert "POST /v1/completions" in front["endpoints"]


async def test_behind_a_proxy_the_page_links_relatively() -> None:
    async with client_for(FakeEngine(), root_path="/llm") as client:
        page = await client.get("/docs")
    assert "href='openapi.json'" in page.text


def test_the_document_is_json() -> None:
    assert json.loads(json.dumps(document(**EVERYTHING))) == document(**EVERYTHING)


CALLED = {"name": "f", "arguments": {"x": 1}}
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
            {
                "role": "assistant",
                "content": "calls",
                "tool_calls": [{"id": "1", "type": "function", "function": CALLED}],
            },
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
            }
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "input_text", "text": "42"}],
            },
        ],
        "tools": [
            {
                "type": "function",
                "name": "f",
                "description": "f",
                "parameters": {"type": "object"},
                "strict": True,
            }
        ],
    },
    "/v1/messages": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]}
                ],
            },
        ],
        "tools": [{"type": "custom", "name": "f", "description": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "me"},
    },
    "/api/chat": {
        "model": "fake-model",
        "messages": [
            {"role": "user", "content": "hi", "images": []},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": CALLED}]},
            {"role": "tool", "content": "42", "tool_name": "f"},
        ],
        "options": {"temperature": 0.5, "stop": ["x"], "num_predict": 3, "mirostat": 0, "num_ctx": 5},
    },
}
DEEP = ("x", "", 1, True, None, [], ["a"], {}, {"a": 1}, [{}])


@pytest.mark.parametrize("path", list(RICH))
@folded("unknown", ["ignore", "reject"])
async def test_every_field_is_read_as_its_schema(path: str, unknown: str) -> None:
    """Any value in any place of a conversation with a tool call, however deep; and each place without its value.

    That unknown fields are refused changes nothing about the values of known ones, so there a few will do.
    """
    validator, rich = body_validator(document(unknown_fields=unknown), path), RICH[path]
    async with client_for(FakeEngine(), unknown_fields=unknown) as client:
        first = await client.post(path, json=rich)
        assert unknown == "reject" or (first.status_code == 200 and validator.is_valid(rich)), first.text
        for body in _changed(rich, DEEP if unknown == "ignore" else DEEP[::3]):
            response = await client.post(path, json=body)
            fits, taken = validator.is_valid(body), response.status_code == 200
            assert fits or not taken, f"{body} is taken"
            assert taken or not fits or is_relation(response.text, body), f"{body}: {response.text}"


def _changed(node: Any, values: Sequence[Any]) -> Iterator[Any]:
    """Copies of a value with one place in it changed."""
    places = list(
        node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    )
    for key, value in places:
        for changed in (*values, *_changed(value, values)):
            copied = copy.copy(node)
            copied[key] = changed
            yield copied
        copied = copy.copy(node)
        del copied[key]
        yield copied
    if isinstance(node, dict):
        yield {**node, "unheard_of": 1}
