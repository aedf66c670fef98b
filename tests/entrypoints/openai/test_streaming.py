"""The short way of a stream's chunks gives the bytes of the long one."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.openai.chat_completions import ChatAnswer
from quire.entrypoints.openai.protocol.responses import ChatChunk, ChatChunkChoice, ChatDelta
from quire.entrypoints.openai.streaming import TextFrame, frame
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


@given(TEXTS)
def test_a_frame_of_a_text_is_that_of_its_chunk(text: str) -> None:
    def chunk(content: str) -> msgspec.Struct:
        choice = ChatChunkChoice(index=3, delta=ChatDelta(content=content))
        return ChatChunk(id="a", created=1, model='a "model"', choices=[choice], usage=None)

    assert TextFrame(chunk(TextFrame.MARK)).of(text) == frame(chunk(text))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["ep"]},
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
async def test_streams_are_the_same_bytes_either_way(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}

    async def streamed() -> str:
        async with client_for(FakeEngine()) as client:
            text = (await client.post("/v1/chat/completions", json=body)).text
        return re.sub(r'"(id|created|timings)":("[^"]*"|\d+|\{[^}]*\})', "", text)

    short = await streamed()
    assert short.count("data: ") > 3
    with monkeypatch.context() as patch:
        patch.setattr(ChatAnswer, "_plain_frame", lambda *_: None)
        assert await streamed() == short
