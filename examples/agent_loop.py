# SPDX-License-Identifier: Apache-2.0
"""An agent: run the functions that the model calls until it answers.

quire serve
python examples/agent_loop.py "What is the weather like in Paris?"
"""

import json
import os
import sys

from openai import OpenAI

URL = os.environ.get("QUIRE_URL", "http://localhost:8000") + "/v1"
MAX_TURNS = 5


def get_weather(city: str) -> dict:
    """Get the current weather of a city."""
    return {"city": city, "temperature": 18, "condition": "rainy"}


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": function.__doc__,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name, function in FUNCTIONS.items()
]


def run(name: str, arguments: str) -> str:
    """Return a call's result as JSON; an unknown function or bad arguments give the model an error to read."""
    try:
        return json.dumps(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": repr(error)})


def main() -> None:
    question = " ".join(sys.argv[1:]) or "What is the weather like in Paris?"
    client = OpenAI(base_url=URL, api_key="none")
    messages: list = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(
            model="quire-demo", messages=messages, tools=TOOLS, temperature=0
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message)
        for call in message.tool_calls:
            result = run(call.function.name, call.function.arguments)
            print(f"[{call.function.name}({call.function.arguments}) -> {result}]")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(f"no answer after {MAX_TURNS} turns")


if __name__ == "__main__":
    main()
