# SPDX-License-Identifier: Apache-2.0
"""Receive a tool call whole and as a stream of deltas.

quire serve
python examples/openai_tools.py
"""

import os

from openai import OpenAI

URL = os.environ.get("QUIRE_URL", "http://localhost:8000") + "/v1"
MESSAGES = [{"role": "user", "content": "What is the weather like in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def main() -> None:
    client = OpenAI(base_url=URL, api_key="none")
    ask = {"model": "quire-demo", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}

    reply = client.chat.completions.create(**ask)
    for call in reply.choices[0].message.tool_calls or []:
        print("whole:   ", call.function.name, call.function.arguments)

    name, arguments = "", ""
    for chunk in client.chat.completions.create(**ask, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    print("streamed:", name, arguments)

    # tool_choice="required" is enforced by a grammar: the answer is a call, whatever was asked.
    forced = client.chat.completions.create(**ask | {"tool_choice": "required"})
    print("forced:  ", forced.choices[0].finish_reason)


if __name__ == "__main__":
    main()
