"""The load: so many chat streams at a time, whose bytes are kept with their times. A process of its own; prints JSON.

python -m benchmarks.overhead.client PORT NUM_STREAMS NUM_REQUESTS NUM_TOKENS [--token-ids]
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any, NamedTuple

EVENT = re.compile(rb"data: (\{.*\})\n\n")
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
)


class Answer(NamedTuple):
    """The id of an answer, the number of its events, and when each token came whose id was sent along.

    Times are of the clock that all processes of the machine share.
    """

    id: str
    num_events: int
    times: list[float]


async def received(port: int, body: bytes) -> list[tuple[float, bytes]]:
    """What came, and when."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    pieces = []
    while data := await reader.read(65536):
        pieces.append((time.monotonic(), data))
    writer.close()
    return pieces


def answer_of(pieces: list[tuple[float, bytes]]) -> Answer:
    """Take an answer apart; an event came with the last byte of it."""
    whole = b"".join(data for _, data in pieces)
    if b"200 OK" not in whole[:20]:
        raise SystemExit(f"the server answered {whole!r:.300}")
    ends, end = [], 0
    for came, data in pieces:
        end += len(data)
        ends.append((end, came))
    times: list[float] = []
    found = [(match.end(), json.loads(match[1])) for match in EVENT.finditer(whole)]
    place = 0
    for position, event in found:
        while ends[place][0] < position:
            place += 1
        times += [ends[place][1]] * len(event["choices"][0].get("token_ids", ()))
    return Answer(found[0][1]["id"], len(found), times)


async def main(port: int, num_streams: int, num_requests: int, num_tokens: int, **options: Any) -> None:
    """Run the load, and print what came."""
    messages = [{"role": "user", "content": "Count."}]
    body = {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, **options}
    slots = asyncio.Semaphore(num_streams)

    async def one() -> list[tuple[float, bytes]]:
        async with slots:
            return await received(port, json.dumps(body).encode())

    started = time.monotonic()
    answers = await asyncio.gather(*(one() for _ in range(num_requests)))
    seconds = time.monotonic() - started
    print(json.dumps({"seconds": seconds, "answers": [answer_of(pieces) for pieces in answers]}))


if __name__ == "__main__":
    more = {"return_token_ids": True} if "--token-ids" in sys.argv else {}
    asyncio.run(main(*map(int, sys.argv[1:5]), **more))
