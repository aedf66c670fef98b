# SPDX-License-Identifier: Apache-2.0
"""Sounds in chat with a real server, by OpenAI's client: offline's answer, whole and streamed, in any company."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from tests.end_to_end.server import Server
from tests.fixtures.hearing_models import BEGIN, HEARING, SOUND_TOKEN, make_hearing, sound
from tests.multimodal.door.test_sounds import base, wav

NAME, NUM_TOKENS = "hearing", 8
SOUNDS = [base(wav(sound(2_000 + 3_500 * seed, seed))) for seed in range(4)]
NEVER = {str(BEGIN): -100, str(SOUND_TOKEN): -100}
pytestmark = pytest.mark.more


def messages(*sounds: str) -> list[Any]:
    parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}} for data in sounds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "t5 t6"}]}]


@pytest.fixture(scope="module", params=list(HEARING))
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_hearing(request.param, path)
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = ("--dtype", "float32", "--max-model-len", "256", "--served-model-name", NAME, "--device", "cpu")
    server = Server("--model", str(checkpoint), *args, log=tmp_path_factory.mktemp("log") / "log")
    try:
        yield server.wait_ready()
        server.check_rest()
    finally:
        server.stop()


def test_stock_client_gets_the_answer_of_offline_chat(server: Server, checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", max_model_len=256, device="cpu")
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias={BEGIN: -100, SOUND_TOKEN: -100}
    )
    talks = [messages(one) for one in SOUNDS] + [messages(*SOUNDS[:2])]
    wanted = [output.outputs[0].text for output in llm.chat(talks, params, use_tqdm=False)]
    llm.shutdown()
    assert len(set(wanted)) == len(wanted), "sounds of different answers"

    async def answers() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [_answer(client, talk, streamed) for talk in talks for streamed in (False, True)]
            return await asyncio.gather(*asked)

    assert asyncio.run(answers()) == [each for each in wanted for _ in range(2)]


async def _answer(client: openai.AsyncOpenAI, talk: list[Any], streamed: bool) -> str:
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": talk,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "logit_bias": NEVER,
        "extra_body": {"ignore_eos": True},
    }
    if streamed:
        stream = await client.chat.completions.create(stream=True, **fields)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    reply = await client.chat.completions.create(**fields)
    assert reply.usage.prompt_tokens_details.audio_tokens > 0
    return reply.choices[0].message.content or ""
