# SPDX-License-Identifier: Apache-2.0
"""Chat with a server through OpenAI's client: a whole answer, a stream, and several requests at once.

quire serve
python examples/openai_chat.py
"""

import asyncio
import os

from openai import AsyncOpenAI, OpenAI

URL = os.environ.get("QUIRE_URL", "http://localhost:8000") + "/v1"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def ask_all(questions: list[str]) -> list[str]:
    """Return the answers to all questions, which the server computes in one batch."""
    async with AsyncOpenAI(base_url=URL, api_key="none") as client:

        async def ask(question: str) -> str:
            messages = [{"role": "user", "content": question}]
            reply = await client.chat.completions.create(model="quire-demo", messages=messages)
            return reply.choices[0].message.content

        return await asyncio.gather(*map(ask, questions))


def main() -> None:
    client = OpenAI(base_url=URL, api_key="none")
    reply = client.chat.completions.create(model="quire-demo", messages=QUESTION, temperature=0)
    print("whole:   ", reply.choices[0].message.content)

    stream = client.chat.completions.create(model="quire-demo", messages=QUESTION, temperature=0, stream=True)
    print("streamed: ", end="")
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    for answer in asyncio.run(ask_all(["What is 12 + 30?", "What is 47 - 38?"])):
        print("batched: ", answer)


if __name__ == "__main__":
    main()
