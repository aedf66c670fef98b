# SPDX-License-Identifier: Apache-2.0
"""Content of any API's reply, whole or streamed, in one form, so that two of them can be compared.

Raises ValueError wherever a stream does not end as it should.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Said = list[list[Any]]
"""Per choice: text, tool calls, why it ended."""


def pooled_whole(reply: Any) -> Said:
    """Return the content of a pooling reply: all numbers, to the last bit, and no id or time."""
    return [[json.dumps(reply[name])] for name in ("data", "results", "embeddings") if name in reply]


def pooled_lines(lines: Sequence[str]) -> Said:
    """The same: nothing that is pooled is streamed, whatever is asked for."""
    return pooled_whole(json.loads("".join(lines)))


def openai_whole(reply: Any) -> Said:
    """Return the content of a completion or chat reply."""
    return [
        [_text(choice), _calls((choice.get("message") or {}).get("tool_calls")), choice["finish_reason"]]
        for choice in sorted(reply["choices"], key=lambda choice: choice["index"])
    ]


def openai_stream(lines: Sequence[str]) -> Said:
    """Exactly one end for each choice, then [DONE]."""
    events = _data(lines)
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"a stream does not end with [DONE]: {events[-1:]}")
    choices: dict[int, list[Any]] = {}
    calls: dict[int, dict[int, list[str]]] = {}
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            raise ValueError(f"an error in a stream: {event}")
        for choice in event["choices"]:
            said = choices.setdefault(choice["index"], ["", [], None])
            said[0] += _text(choice)
            for call in (choice.get("delta") or {}).get("tool_calls") or []:
                parts = calls.setdefault(choice["index"], {}).setdefault(call["index"], ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
            if choice["finish_reason"] is not None:
                if said[2] is not None:
                    raise ValueError(f"a choice ends twice: {said[2]} and {choice['finish_reason']}")
                said[2] = choice["finish_reason"]
    for index, said in choices.items():
        said[1] = list(calls.get(index, {}).values())
        if said[2] is None:
            raise ValueError(f"choice {index} does not end")
    return [choices[index] for index in sorted(choices)]


def responses_whole(reply: Any) -> Said:
    parts = [
        part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]
    ]
    calls = [[item["name"], item["arguments"]] for item in reply["output"] if item["type"] == "function_call"]
    return [["".join(parts), calls, reply["status"]]]


def responses_stream(lines: Sequence[str]) -> Said:
    last = json.loads(_data(lines)[-1])
    if last["type"] not in ("response.completed", "response.incomplete"):
        raise ValueError(f"a stream of responses ends with {last['type']}")
    return responses_whole(last["response"])


def messages_whole(reply: Any) -> Said:
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    return [[text, [], reply["stop_reason"]]]


def messages_stream(lines: Sequence[str]) -> Said:
    events = [json.loads(data) for data in _data(lines)]
    if events[-1]["type"] != "message_stop":
        raise ValueError(f"a stream of messages ends with {events[-1]['type']}")
    text = "".join(
        event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
    )
    (reason,) = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    return [[text, [], reason]]


def ollama_whole(reply: Any) -> Said:
    return [[reply["message"]["content"], [], reply["done_reason"]]]


def ollama_stream(lines: Sequence[str]) -> Said:
    events = [json.loads(line) for line in lines if line]
    if [event["done"] for event in events].count(True) != 1 or not events[-1]["done"]:
        raise ValueError("the lines do not end with one that is done")
    return [["".join(event["message"]["content"] for event in events), [], events[-1]["done_reason"]]]


def _data(lines: Sequence[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def _text(choice: Any) -> str:
    where = choice.get("message") or choice.get("delta") or choice
    return where.get("content") or where.get("text") or ""


def _calls(calls: Any) -> list[list[str]]:
    return [[call["function"]["name"], call["function"]["arguments"]] for call in calls or []]
