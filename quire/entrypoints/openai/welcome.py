"""What the server prints when it is ready: its address, and ways to talk to it that work as pasted."""

from __future__ import annotations

import ipaddress
import json
from typing import Any, NamedTuple

from quire.config.pooling import CLASS_TASKS, PoolingSpec

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - what users ask for


class Greeting(NamedTuple):
    """A first request to a model of one kind.

    Attributes:
        call: the method of the OpenAI client that sends it; empty: it has none.
        shown: what of the reply to print.
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
    """For a model that pools so, or one that generates."""
    if spec is None:
        return CHAT if has_chat else COMPLETION
    if spec.is_cross_encoder:
        return SCORE
    if spec.tasks[0] in CLASS_TASKS:
        return CLASSES if spec.tasks[0] == "classify" else TOKEN_EMBEDDING
    return EMBEDDING if "embed" in spec.tasks else TOKEN_EMBEDDING


def reaches_others(host: str) -> bool:
    """Whether a server at this address is there for other machines; a name, of which that is not known, is not."""
    try:
        return host in EVERYWHERE or not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int, root_path: str = "") -> str:
    """The URL at which this machine reaches the server."""
    host = EVERYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{root_path}"


def curl_example(url: str, model: str, greeting: Greeting, *, needs_key: bool) -> str:
    lines = [f"curl {url}{greeting.path}", "-H 'Content-Type: application/json'"]
    if needs_key:
        lines.append('-H "Authorization: Bearer $QUIRE_API_KEY"')
    quoted = json.dumps({"model": model, **greeting.body}, ensure_ascii=False).replace("'", "'\\''")
    return " \\\n  ".join([*lines, f"-d '{quoted}'"])


def python_example(url: str, model: str, greeting: Greeting, *, needs_key: bool) -> str:
    """By the OpenAI client; empty where it has no such call."""
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
    """The whole message."""
    examples = (
        example(url, model, greeting, needs_key=needs_key) for example in (curl_example, python_example)
    )
    return "\n".join(["", f"{model} is ready at {url}", *(f"\n{one}" for one in examples if one), ""])
