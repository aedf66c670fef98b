# SPDX-License-Identifier: Apache-2.0
"""Talk to a server through Anthropic's client.

quire serve
python examples/anthropic_client.py
"""

import os

from anthropic import Anthropic

URL = os.environ.get("QUIRE_URL", "http://localhost:8000")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    client = Anthropic(base_url=URL, api_key="none")
    ask = {"model": "quire-demo", "max_tokens": 64, "messages": MESSAGES}
    print(client.messages.create(**ask).content[0].text)
    with client.messages.stream(**ask) as stream:
        print(*stream.text_stream, sep="")
    print(client.messages.count_tokens(model="quire-demo", messages=MESSAGES).input_tokens, "tokens")


if __name__ == "__main__":
    main()
