# SPDX-License-Identifier: Apache-2.0
"""Ollama's own client."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from tests.clients.world import (
    ANSWER,
    ARGUMENTS,
    MISSING,
    MODEL,
    NAME,
    PERSON,
    PERSON_QUESTION,
    QUESTION,
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
    asked,
    get_weather,
)

EXACT = {"temperature": 0}


@pytest.fixture
def client(server: str) -> ollama.Client:
    return ollama.Client(server)


def test_the_model_is_listed_and_shown(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert shown.capabilities is not None
    assert {"completion", "tools"} <= set(shown.capabilities)


def test_a_chat_streamed_joins_to_the_whole(client: ollama.Client) -> None:
    whole = client.chat(MODEL, asked(QUESTION), options=EXACT)
    parts = list(client.chat(MODEL, asked(QUESTION), options=EXACT, stream=True))
    text = "".join(part.message.content or "" for part in parts)
    assert ANSWER in text
    assert text == whole.message.content
    assert parts[-1].eval_count == whole.eval_count
    assert whole.prompt_eval_count


def test_a_generated_text_streamed_joins_to_the_whole(client: ollama.Client) -> None:
    whole = client.generate(MODEL, QUESTION, options=EXACT)
    parts = list(client.generate(MODEL, QUESTION, options=EXACT, stream=True))
    assert ANSWER in whole.response
    assert "".join(part.response for part in parts) == whole.response
    assert parts[-1].done


async def test_a_chat_runs_asynchronously(server: str) -> None:
    client = ollama.AsyncClient(server)
    whole = await client.chat(MODEL, asked(QUESTION), options=EXACT)
    stream = await client.chat(MODEL, asked(QUESTION), options=EXACT, stream=True)
    assert "".join([part.message.content or "" async for part in stream]) == whole.message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_is_called_and_its_result_is_in_the_answer(client: ollama.Client, streamed: bool) -> None:
    def step(messages: list[Any]) -> list[ollama.Message]:
        request: Any = {"messages": messages, "tools": [get_weather], "options": EXACT}
        if not streamed:
            return [client.chat(MODEL, **request).message]
        return [part.message for part in client.chat(MODEL, **request, stream=True)]

    messages = asked(TOOL_QUESTION)
    calls = [(message, call) for message in step(messages) for call in message.tool_calls or []]
    ((message, call),) = calls
    assert (call.function.name, call.function.arguments) == (NAME, ARGUMENTS)
    result = {"role": "tool", "tool_name": NAME, "content": get_weather(**ARGUMENTS)}
    answer = step([*messages, message, result])
    assert TOOL_ANSWER in "".join(message.content or "" for message in answer)


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_are_the_clients_own(client: ollama.Client, streamed: bool) -> None:
    def ask(model: str, text: str) -> None:
        list(client.chat(model, asked(text), stream=streamed))

    with pytest.raises(ollama.ResponseError, match=MODEL) as missing:
        ask(MISSING, QUESTION)
    with pytest.raises(ollama.ResponseError, match="maximum context length") as too_long:
        ask(MODEL, TOO_LONG)
    assert (missing.value.status_code, too_long.value.status_code) == (404, 400)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", ["json", Person.model_json_schema()], ids=["json", "schema"])
def test_an_answer_has_the_format(client: ollama.Client, form: Any, streamed: bool) -> None:
    request: Any = {"format": form, "options": EXACT, "stream": streamed}
    chat, text = (
        client.chat(MODEL, asked(PERSON_QUESTION), **request),
        client.generate(MODEL, PERSON_QUESTION, **request),
    )
    said = [part.message.content for part in chat] if streamed else [chat.message.content]
    generated = [part.response for part in text] if streamed else [text.response]
    assert Person.model_validate_json("".join(said)) == PERSON
    assert Person.model_validate_json("".join(generated)) == PERSON


def test_listed_sizes_are_those_of_the_files(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.size is not None
    assert model.size > 100_000
    assert model.digest
    assert model.details is not None
    assert model.details.format == "safetensors"
    assert (model.details.parameter_size or "").endswith(("K", "M", "B"))


def test_a_served_model_is_there_without_a_download(client: ollama.Client) -> None:
    assert client.pull(MODEL).status == "success"
    assert [step.status for step in client.pull(MODEL, stream=True)] == ["success"]


def test_downloads_and_deletions_need_the_operator(client: ollama.Client) -> None:
    for call in (lambda: client.pull("some/model"), lambda: client.delete("some/model")):
        with pytest.raises(ollama.ResponseError, match="--allow-pull") as caught:
            call()
        assert caught.value.status_code == 403
