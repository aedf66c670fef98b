# SPDX-License-Identifier: Apache-2.0
"""Ready message: the address, and an example request for the kind of model."""

from __future__ import annotations

import ipaddress
import json
from typing import Any, NamedTuple

from quire.config.pooling import CLASS_TASKS, PoolingSpec

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - what users ask for


class Greeting(NamedTuple):
    """Example request for one kind of model.

    Attributes:
        call: method of the OpenAI client that sends it; empty if there is none.
        shown: part of the reply to print.
    """

    path: str
    body: dict[str, Any]
    call: str = ""
    shown: str = ""


CHAT = Greeting(
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hello!"}]},
    "chat.completions",
    "choices[0].message.content",
)

COMPLETION = Greeting("/v1/completions", {"prompt": "Once upon a time"}, "completions", "choices[0].text")

EMBEDDING = Greeting("/v1/embeddings", {"input": "Once upon a time"}, "embeddings", "data[0].embedding")

TOKEN_EMBEDDING = Greeting("/pooling", {"input": "Once upon a time"})

CLASSES = Greeting("/classify", {"input": "Once upon a time"})

SCORE = Greeting("/v1/score", {"text_1": "Hello!", "text_2": "Hi there!"})


def greeting_of(spec: PoolingSpec | None, *, has_chat: bool) -> Greeting:
    """Return the example request for a pooling model, or for a generative one."""
    if spec is None:
        return CHAT if has_chat else COMPLETION
    if spec.is_cross_encoder:
        return SCORE
    if spec.tasks[0] in CLASS_TASKS:
        return CLASSES if spec.tasks[0] == "classify" else TOKEN_EMBEDDING
    return EMBEDDING if "embed" in spec.tasks else TOKEN_EMBEDDING


def reaches_others(host: str) -> bool:
    """Return whether other machines can reach this address; a host name counts as local."""
    try:
        return host in EVERYWHERE or not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int, root_path: str = "", scheme: str = "http") -> str:
    """Return the server's URL as seen from this machine."""
    host = EVERYWHERE.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{root_path}"


def curl_example(url: str, model: str, greeting: Greeting, *, needs_key: bool) -> str:
    lines = [f"curl {url}{greeting.path}", "-H 'Content-Type: application/json'"]
    if needs_key:
        lines.append('-H "Authorization: Bearer $QUIRE_API_KEY"')
    quoted = json.dumps({"model": model, **greeting.body}, ensure_ascii=False).replace("'", "'\\''")
    return " \\\n  ".join([*lines, f"-d '{quoted}'"])


def python_example(url: str, model: str, greeting: Greeting, *, needs_key: bool) -> str:
    """Return an example with the OpenAI client; empty if the client has no such call."""
    if not greeting.call:
        return ""
    key = 'os.environ["QUIRE_API_KEY"]' if needs_key else '"none"'
    lines = ["import os", ""] if needs_key else []
    fields = {"model": model, **greeting.body}.items()
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in fields)
    lines += [
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url="{url}/v1", api_key={key})',
        f"reply = client.{greeting.call}.create({arguments})",
        f"print(reply.{greeting.shown})",
    ]
    return "\n".join(lines)


def ready_text(url: str, model: str, greeting: Greeting, *, needs_key: bool) -> str:
    """Return the ready message: the address, and working example requests."""
    examples = (
        example(url, model, greeting, needs_key=needs_key) for example in (curl_example, python_example)
    )
    return "\n".join(["", f"{model} is ready at {url}", *(f"\n{one}" for one in examples if one), ""])
