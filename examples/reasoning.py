# SPDX-License-Identifier: Apache-2.0
"""Ask a model to think first, and read its reasoning apart from its answer, whole and streamed.

quire serve
python examples/reasoning.py
"""

import os

from openai import OpenAI

URL = os.environ.get("QUIRE_URL", "http://localhost:8000") + "/v1"
MESSAGES = [{"role": "user", "content": "What is 47 - 38?"}]


def main() -> None:
    client = OpenAI(base_url=URL, api_key="none")
    ask = {"model": "quire-demo", "messages": MESSAGES, "reasoning_effort": "low", "temperature": 0}
    reply = client.chat.completions.create(**ask)
    print("reasoning:", reply.choices[0].message.reasoning)
    print("answer:   ", reply.choices[0].message.content)
    print("tokens:   ", reply.usage.completion_tokens_details.reasoning_tokens, "of reasoning")

    parts = {"reasoning": "", "content": ""}
    for chunk in client.chat.completions.create(**ask, stream=True):
        delta = chunk.choices[0].delta
        parts["reasoning"] += getattr(delta, "reasoning", None) or ""
        parts["content"] += delta.content or ""
    print("streamed: ", parts)


if __name__ == "__main__":
    main()
