# SPDX-License-Identifier: Apache-2.0
"""Traffic of the clients: some forty requests that are good, each always the same, and some that are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak import said
from benchmarks.soak.said import Said

MODEL = "quire-demo"
TEXTS = ("What is the capital of France?", "What is 12 + 30?", "Tell me a joke.", "Grüße, 世界! 🌍", "Hello")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Family:
    """An endpoint: where it is, and how its replies are read."""

    path: str
    whole: Callable[[Any], Said]
    stream: Callable[[Sequence[str]], Said]


COMPLETIONS = Family("/v1/completions", said.openai_whole, said.openai_stream)
CHAT = Family("/v1/chat/completions", said.openai_whole, said.openai_stream)
RESPONSES = Family("/v1/responses", said.responses_whole, said.responses_stream)
MESSAGES = Family("/v1/messages", said.messages_whole, said.messages_stream)
OLLAMA = Family("/api/chat", said.ollama_whole, said.ollama_stream)


@dataclass(frozen=True)
class Good:
    """A request that must be answered, the same each time."""

    name: str
    family: Family
    body: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Bad:
    """A request that must be refused."""

    path: str
    content: bytes
    statuses: tuple[int, ...] = (400,)


def good_requests() -> list[Good]:
    """The same in every run."""
    rng = random.Random(7)
    found: list[Good] = []
    for number, text in enumerate(TEXTS):
        messages = [{"role": "user", "content": text}]
        sampled = {"temperature": 1.0, "seed": number}
        long = [rng.randrange(5, 1000) for _ in range(rng.randrange(300, 1500))]
        bodies: list[tuple[str, Family, dict[str, Any]]] = [
            ("chat", CHAT, {"messages": messages, "max_tokens": 40, "temperature": 0}),
            ("chat n", CHAT, {"messages": messages, "max_tokens": 30, "n": 3, **sampled}),
            ("chat tools", CHAT, {"messages": messages, "max_tokens": 60, "tools": [WEATHER], "temperature": 0}),
            ("chat logprobs", CHAT, {"messages": messages, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
             | {"temperature": 0}),
            ("text", COMPLETIONS, {"prompt": text, "max_tokens": 60, "ignore_eos": True, **sampled}),
            ("text stop", COMPLETIONS, {"prompt": text, "max_tokens": 80, "stop": ["e", " the"], "min_tokens": 3}
             | sampled),
            ("text n", COMPLETIONS, {"prompt": [text, "Hi"], "max_tokens": 20, "n": 2, "logprobs": 2, **sampled}),
            ("long", COMPLETIONS, {"prompt": long, "max_tokens": 30, "ignore_eos": True, **sampled}),
            ("penalties", COMPLETIONS, {"prompt": long[:100], "max_tokens": 50, "repetition_penalty": 1.3}
             | {"presence_penalty": 0.5, "top_p": 0.9, "top_k": 30, "min_p": 0.01, **sampled}),
            ("responses", RESPONSES, {"input": text, "max_output_tokens": 30, "temperature": 0}),
            ("messages", MESSAGES, {"messages": messages, "max_tokens": 30, "temperature": 0}),
            ("ollama", OLLAMA, {"messages": messages, "options": {"num_predict": 30, "temperature": 0}}),
        ]  # fmt: skip
        found += [Good(f"{name} {number}", family, {"model": MODEL, **body}) for name, family, body in bodies]
    return found


BAD = (
    Bad("/v1/completions", b'{"prompt": ""}'),
    Bad("/v1/completions", b'{"prompt": "a", "temperature": NaN}'),
    Bad("/v1/completions", b'{"prompt": [-1]}'),
    Bad("/v1/completions", b'{"prompt": "a", "n": 1000000000}'),
    Bad("/v1/completions", b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    Bad("/v1/completions", b"\xff\xfe{"),
    Bad("/v1/completions", b'{"prompt": "' + b"word " * 200_000 + b'"}'),
    Bad("/v1/completions", b'{"model": "../x", "prompt": "a"}', (404,)),
    Bad("/v1/chat/completions", b'{"messages": []}'),
    Bad(
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
    ),
    Bad("/v1/responses", b'{"input": []}'),
    Bad("/v1/messages", b'{"messages": [], "max_tokens": 1}'),
    Bad("/api/chat", b'{"model": "other", "messages": []}', (400, 404)),
    Bad("/nowhere", b"{}", (404,)),
    Bad("/v1/models", b"{}", (405,)),
    Bad("/abort_requests", b"{}", (401,)),
)


EMBEDDER = "quire-demo-embed"
EMBEDDINGS, POOLING, SCORES, RANKINGS, COHERE, OLLAMA_EMBED = (
    Family(path, said.pooled_whole, said.pooled_lines)
    for path in ("/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank", "/v2/embed", "/api/embed")
)


def good_pooling_requests() -> list[Good]:
    """The same in every run."""
    found: list[Good] = []
    for number, text in enumerate(TEXTS):
        long = " ".join(TEXTS[(number + place) % len(TEXTS)] for place in range(150))
        bodies: list[tuple[str, Family, dict[str, Any]]] = [
            ("embeddings", EMBEDDINGS, {"input": text}),
            ("embeddings packed", EMBEDDINGS, {"input": [text, *TEXTS], "encoding_format": "base64"}),
            ("embeddings of many", EMBEDDINGS, {"input": [f"{text} {n}" for n in range(300)]}),
            ("embeddings of windows", EMBEDDINGS, {"input": [long, text], "average_windows": True}),
            ("tokens", POOLING, {"input": [text, *TEXTS], "task": "token_embed"}),
            ("scores", SCORES, {"text_1": text, "text_2": [*TEXTS]}),
            ("ranking", RANKINGS, {"query": text, "documents": [*TEXTS], "top_n": 3}),
            ("cohere", COHERE, {"texts": [text, long], "embedding_types": ["float", "ubinary"]}),
            ("ollama", OLLAMA_EMBED, {"input": [text, long]}),
        ]
        found += [
            Good(f"{name} {number}", family, {"model": EMBEDDER, **body}) for name, family, body in bodies
        ]
    return found


BAD_POOLING = (
    Bad("/v1/embeddings", b'{"input": ""}'),
    Bad("/v1/embeddings", b'{"input": []}'),
    Bad("/v1/embeddings", b'{"input": [[-1]]}'),
    Bad("/v1/embeddings", b'{"input": "a", "dimensions": 3}'),
    Bad("/v1/embeddings", b'{"input": "' + b"word " * 200_000 + b'"}'),
    Bad("/v1/embeddings", b'{"input": [' + b'"a", ' * 5000 + b'"a"]}'),
    Bad("/pooling", b'{"input": "a", "task": "classify"}'),
    Bad("/v1/rerank", b'{"query": "a", "documents": []}'),
    Bad("/v1/score", b'{"text_1": ["a", "b"], "text_2": "c"}'),
    Bad("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}', (400, 404)),
    Bad("/nowhere", b"{}", (404,)),
)
