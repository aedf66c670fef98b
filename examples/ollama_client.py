# SPDX-License-Identifier: Apache-2.0
"""Talk to a server through Ollama's client.

quire serve
python examples/ollama_client.py
"""

import os

from ollama import Client

URL = os.environ.get("QUIRE_URL", "http://localhost:8000")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    client = Client(host=URL)
    print("models:", *(model.model for model in client.list().models))
    options = {"temperature": 0}
    for part in client.chat("quire-demo", MESSAGES, stream=True, options=options):
        print(part.message.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
