# SPDX-License-Identifier: Apache-2.0
"""Samplers in every API: one set of fields, one rule for those that do not exist."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.openai.field_rules import REFUSED_SAMPLERS as REFUSED
from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.parsing import filter_fields
from quire.entrypoints.openai.protocol.requests import SAMPLERS, ChatCompletionRequest, CompletionRequest
from quire.errors import ValidationError
from quire.sampling_params import SamplingParams
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

HI = [{"role": "user", "content": "hi"}]
HEADER = "x-quire-ignored-fields"
Fields = dict[str, Any]
APIS: dict[str, tuple[str, Callable[[Fields], Fields]]] = {
    "chat": ("/v1/chat/completions", lambda fields: {"messages": HI, **fields}),
    "completions": ("/v1/completions", lambda fields: {"prompt": "hi", **fields}),
    "responses": ("/v1/responses", lambda fields: {"input": "hi", **fields}),
    "messages": ("/v1/messages", lambda fields: {"messages": HI, "max_tokens": 9, **fields}),
    "ollama": (
        "/api/chat",
        lambda fields: {"model": "fake-model", "messages": HI, "stream": False, "options": fields},
    ),
}
ALL_ON: Fields = {
    "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "repetition_penalty": 1.5, "repeat_last_n": 64, "seed": 5, "dry_multiplier": 0.75, "dry_base": 2.0,
    "dry_allowed_length": 3, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", "User:"], "top_n_sigma": 1.5,
    "typical_p": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.25, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0,
    "mirostat_tau": 4.0, "mirostat_eta": 0.25, "temperature_last": True,
}  # fmt: skip
OFF: Fields = {
    "repeat_last_n": -1, "dry_multiplier": 0, "dry_base": 0, "dry_penalty_last_n": 0, "dry_sequence_breakers": [],
    "top_n_sigma": -1, "typical_p": 1, "xtc_probability": 0, "xtc_threshold": 1, "dynatemp_range": 0, "mirostat": 0,
    "temperature_last": False,
}  # fmt: skip
OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("repeat_last_n", -2), ("dry_multiplier", -1), ("dry_multiplier", 101), ("dry_base", -0.5),
    ("dry_allowed_length", -1), ("dry_penalty_last_n", -2), ("dry_sequence_breakers", [""]),
    ("dry_sequence_breakers", ["x" * 41]), ("dry_sequence_breakers", ["x"] * 65), ("top_n_sigma", -2),
    ("typical_p", 0), ("typical_p", 1.5), ("xtc_probability", 1.1), ("xtc_threshold", -0.1), ("dynatemp_range", -1),
    ("dynatemp_exponent", -1), ("mirostat", 3), ("mirostat", -1), ("mirostat", 1.5), ("mirostat_tau", -1),
    ("mirostat_eta", -1), ("mirostat", True), ("typical_p", "0.5"), ("temperature_last", 1),
]  # fmt: skip


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine) as client:
        yield client


async def post(client: httpx.AsyncClient, api: str, fields: Fields) -> httpx.Response:
    path, body = APIS[api]
    return await client.post(path, json=body(fields))


@pytest.mark.parametrize("api", APIS)
async def test_samplers_arrive_from_every_api(
    api: str, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await post(client, api, ALL_ON)
    assert (response.status_code, response.headers.get(HEADER)) == (200, None), response.text
    params: SamplingParams = engine.seen[-1][1]
    found = {name: getattr(params, name) for name in ALL_ON}
    assert found == ALL_ON | {"dry_sequence_breakers": ("\n", "User:")}
    assert ALL_ON.keys() | {"mirostat", "repeat_penalty", "penalty_last_n"} == set(SAMPLERS)


@pytest.mark.parametrize("api", APIS)
async def test_samplers_switched_off_are_no_offence(
    api: str, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    neutral = {name: rule.neutral[0] for name, rule in REFUSED.items() if rule.neutral}
    names = {"stop", "stop_token_ids", "top_k", "top_p", "min_tokens", "logit_bias"}
    response = await post(client, api, OFF | {k: v for k, v in neutral.items() if k not in names})
    assert (response.status_code, response.headers.get(HEADER)) == (200, None), response.text
    params: SamplingParams = engine.seen[-1][1]
    assert (params.has_sampler_chain, params.uses_dry) == (False, False)


@pytest.mark.parametrize("api", APIS)
async def test_values_out_of_range_are_a_400_that_names_them(api: str, client: httpx.AsyncClient) -> None:
    for name, value in OUT_OF_RANGE:
        response = await post(client, api, {name: value})
        assert response.status_code == 400, (name, value, response.text)
        assert name in response.text


@pytest.mark.parametrize("api", APIS)
async def test_unknown_samplers_are_refused_by_name(api: str, client: httpx.AsyncClient) -> None:
    honored = {"chat": ChatCompletionRequest, "completions": CompletionRequest}.get(api)
    known = {"stop_token_ids", "stop"} | ({"num_predict"} if api == "ollama" else set())
    known |= set(SAMPLERS) | set(() if honored is None else honored.model_fields)
    for name in sorted(REFUSED.keys() - known):
        response = await post(client, api, {name: 0.123})
        assert response.status_code == 400, (name, response.text)
        assert name in response.text


@pytest.mark.parametrize("api", APIS)
async def test_unknown_fields_are_reported(api: str, client: httpx.AsyncClient) -> None:
    response = await post(client, api, {"sparkle": 3})
    expected = "options.sparkle" if api == "ollama" else "sparkle"
    assert (response.status_code, response.headers[HEADER]) == (200, expected)


@pytest.mark.parametrize("api", APIS)
async def test_llama_names_of_penalties(api: str, client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await post(client, api, {"repeat_penalty": 1.5, "penalty_last_n": 32})).status_code == 200
    assert (engine.seen[-1][1].repetition_penalty, engine.seen[-1][1].repeat_last_n) == (1.5, 32)
    wrong = await post(client, api, {"repeat_penalty": -1})
    assert wrong.status_code == 400
    assert "repeat_penalty" in wrong.text


@pytest.mark.parametrize("api", APIS)
async def test_two_names_of_a_penalty_must_agree(api: str, client: httpx.AsyncClient) -> None:
    same = await post(client, api, {"repeat_penalty": 1.5, "repetition_penalty": 1.5})
    other = await post(client, api, {"repeat_last_n": 2**63, "penalty_last_n": 0})
    assert (same.status_code, other.status_code) == (200, 400)
    assert "send one of them" in other.text


async def test_filters_beside_mirostat_are_reported(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await post(client, "chat", {"mirostat": 2, "top_p": 0.9, "temperature": 0.8})
    assert (response.status_code, response.headers[HEADER]) == (200, "top_p")
    assert engine.seen[-1][1].mirostat == 2


async def test_ollama_takes_whole_floats_for_integers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    options = {"num_predict": 3.0, "num_ctx": 2048.0, "top_k": 40.0, "seed": 7.0, "repeat_last_n": 64.0}
    assert (await post(client, "ollama", options | {"mirostat": 0.0})).status_code == 200
    params = engine.seen[-1][1]
    assert (params.max_tokens, params.top_k, params.seed, params.repeat_last_n) == (3, 40, 7, 64)


async def test_ollamas_own_defaults_are_taken(client: httpx.AsyncClient) -> None:
    defaults = {
        "num_keep": 4, "seed": 0, "num_predict": -1, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "tfs_z": 1.0,
        "typical_p": 1.0, "repeat_last_n": 64, "temperature": 0.8, "repeat_penalty": 1.1, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "penalize_newline": True,
        "stop": ["x"], "num_ctx": 4096, "num_batch": 512, "num_gpu": -1, "use_mmap": True, "num_thread": 8,
    }  # fmt: skip
    response = await post(client, "ollama", defaults)
    assert response.status_code == 200
    assert "mirostat" not in response.headers[HEADER]


async def test_tokenize_ignores_and_reports_sampler_fields(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"prompt": "hi", "tfs": 0.5, "temperature": 2})
    assert (response.status_code, response.headers[HEADER]) == (200, "tfs, temperature")


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(
    st.dictionaries(
        st.sampled_from([*REFUSED, *SAMPLERS, "other"]), st.sampled_from([0, 1, 0.7, [], "", True])
    )
)
def test_no_sampler_is_dropped_silently(body: Fields) -> None:
    notes = RequestNotes()
    try:
        kept = filter_fields(body, SAMPLERS, notes)
    except ValidationError:
        assert REFUSED.keys() & body.keys() - set(SAMPLERS)
        return
    for name in body.keys() - kept.keys():
        assert name in notes.ignored or any(body[name] == neutral for neutral in REFUSED[name].neutral)
