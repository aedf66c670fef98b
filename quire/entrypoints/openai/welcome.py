"""What the server prints when it is ready: its address, and two ways to talk to it that work as pasted."""

from __future__ import annotations

import json

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - what users ask for


def base_url(host: str, port: int, root_path: str = "") -> str:
    """The URL at which this machine reaches the server."""
    host = EVERYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{root_path}"


def curl_example(url: str, model: str, *, needs_key: bool, has_chat: bool) -> str:
    path, body = _request(model, has_chat)
    lines = [f"curl {url}{path}", "-H 'Content-Type: application/json'"]
    if needs_key:
        lines.append('-H "Authorization: Bearer $QUIRE_API_KEY"')
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return " \\\n  ".join([*lines, f"-d '{quoted}'"])


def python_example(url: str, model: str, *, needs_key: bool, has_chat: bool) -> str:
    key = 'os.environ["QUIRE_API_KEY"]' if needs_key else '"none"'
    lines = ["import os", ""] if needs_key else []
    lines += ["from openai import OpenAI", "", f'client = OpenAI(base_url="{url}/v1", api_key={key})']
    name = json.dumps(model, ensure_ascii=False)
    if has_chat:
        messages = '[{"role": "user", "content": "Hello!"}]'
        lines += [
            f"reply = client.chat.completions.create(model={name}, messages={messages})",
            "print(reply.choices[0].message.content)",
        ]
    else:
        lines += [
            f'reply = client.completions.create(model={name}, prompt="Once upon a time")',
            "print(reply.choices[0].text)",
        ]
    return "\n".join(lines)


def ready_text(url: str, model: str, *, needs_key: bool, has_chat: bool) -> str:
    """The whole message."""
    curl = curl_example(url, model, needs_key=needs_key, has_chat=has_chat)
    python = python_example(url, model, needs_key=needs_key, has_chat=has_chat)
    return f"\n{model} is ready at {url}\n\n{curl}\n\n{python}\n"


def _request(model: str, has_chat: bool) -> tuple[str, dict[str, object]]:
    if has_chat:
        return "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    return "/v1/completions", {"model": model, "prompt": "Once upon a time"}
