# SPDX-License-Identifier: Apache-2.0
"""Questions for the included model, with its answers, shared by the tests of all clients."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from pydantic import BaseModel

MODEL = "quire-demo"
MISSING = "no-such-model"
QUESTION, ANSWER = "What is the capital of France?", "Paris"
BEGINNING = "The capital of France is"
TOO_LONG = "hello " * 3000
"""More tokens than the context of the model, which has 2048."""

TOOL_QUESTION = "What is the weather like in Paris?"
TOOL_ANSWER = "21 degrees"
NAME, ARGUMENTS = "get_weather", {"city": "Paris"}
DESCRIPTION = "Get the current weather of a city."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS},
}


def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return json.dumps({"city": city, "temperature": 21, "condition": "sunny"})


def said_by(role: str, text: str) -> Any:
    """One message of a conversation."""
    return {"role": role, "content": text}


def asked(text: str) -> Any:
    """The conversation that begins with this question."""
    return [said_by("user", text)]


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


PERSON_QUESTION = (
    "Extract name, age and city from this sentence as JSON: My friend Peter lives in Paris and is 36."
)
PERSON = Person(name="Peter", age=36, city="Paris")
STRICT_PERSON: dict[str, Any] = Person.model_json_schema() | {"additionalProperties": False}


def _png(side: int, pixels: bytes) -> bytes:
    """Return a square picture of RGB pixels as a file."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = name + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    lines = b"".join(b"\0" + pixels[first : first + 3 * side] for first in range(0, len(pixels), 3 * side))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


SEEING = "quire-demo-vision"
PICTURE_QUESTION, PICTURE_ANSWER = "What is in the picture?", "A red square."
_MARGIN, _LINE = b"\xff" * 3 * 64, b"\xff" * 30 + b"\xff\0\0" * 31 + b"\xff" * 69
PICTURE = _png(64, _MARGIN * 10 + _LINE * 31 + _MARGIN * 23)
"""A red square on white, as a PNG file."""
