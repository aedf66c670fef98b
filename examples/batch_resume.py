# SPDX-License-Identifier: Apache-2.0
"""Answer a file of requests, interrupted and resumed: the second run computes only what the first has not.

python examples/batch_resume.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

COUNTRIES = ["France", "Japan", "Italy"]
COMMAND = [sys.executable, "-m", "quire.entrypoints.cli.main", "run-batch"]  # `quire run-batch`


def request(country: str) -> str:
    """Return a line of OpenAI's batch format."""
    messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
    body = {"messages": messages, "max_tokens": 20, "temperature": 0}
    line = {"custom_id": country, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line) + "\n"


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    requests, answers = folder / "requests.jsonl", folder / "answers.jsonl"
    requests.write_text("".join(map(request, COUNTRIES[:2])))  # as if the job had been killed after two
    subprocess.run([*COMMAND, "-i", requests, "-o", answers], check=True)
    requests.write_text("".join(map(request, COUNTRIES)))
    subprocess.run([*COMMAND, "-i", requests, "-o", answers], check=True)  # asks for the third only
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        print(answer["custom_id"], "->", answer["response"]["body"]["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
