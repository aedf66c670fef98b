"""The model of smolagents; its agents force tool calls."""

from __future__ import annotations

import openai
import pytest
from smolagents import OpenAIModel

from tests.clients.world import ANSWER, MISSING, MODEL, QUESTION, TOO_LONG, asked

BLOCKS = [{"type": "text", "text": QUESTION}]


def make(base_url: str, model: str = MODEL) -> OpenAIModel:
    return OpenAIModel(model, api_base=base_url, api_key="none", temperature=0)


def test_a_stream_joins_to_the_whole(base_url: str) -> None:
    messages = [{"role": "user", "content": BLOCKS}]
    whole = make(base_url).generate(messages)
    deltas = list(make(base_url).generate_stream(messages))
    assert ANSWER in whole.content
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    usages = [delta.token_usage for delta in deltas if delta.token_usage]
    assert usages == [whole.token_usage]


def test_errors_are_the_clients_own(base_url: str) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        make(base_url, MISSING).generate(asked(QUESTION))
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        make(base_url).generate(asked(TOO_LONG))
