"""The load: so many chat streams at a time, whose bytes are kept with their times. A process of its own; prints JSON.

    python -m benchmarks.overhead.client PORT NUM_STREAMS NUM_REQUESTS START_S BODY

A request begins every START_S seconds, once a stream is free for it, so that streams are at all stages at any time.

The time of a piece is when it reached this process's socket, by the kernel's clock (SO_TIMESTAMPNS): how soon this
process is scheduled and how fast it reads is no affair of the server's. So it looks into its sockets now and then, and
parses nothing while the load runs: woken by each piece, it would cost the server's write more than the write itself,
which clients of a network do not. A piece that waits for another one behind it gets that one's later time.
"""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import NamedTuple

SO_TIMESTAMPNS = 35
LOOK_S = 0.003
"""From look to look; less than a step takes, so that pieces of two steps seldom meet."""
TIMESPEC = struct.Struct("qq")
EVENT = re.compile(rb"data: (\{.*\})\n\n")
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
)


@dataclass
class Stream:
    """One request: its socket, and what came with the seconds since the epoch."""

    socket: socket.socket
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def read(self) -> bool:
        """Take what is there; False at the end."""
        data, control, _, _ = self.socket.recvmsg(1 << 16, 64)
        if data:
            # The kernel begins to note times a moment after the first socket asks for them.
            seconds, nanoseconds = TIMESPEC.unpack(control[0][2]) if control else (time.time(), 0)
            self.pieces.append((seconds + nanoseconds * 1e-9, data))
        return bool(data)


class Answer(NamedTuple):
    """The id of an answer, and of each event that brought text: when its last byte came, and the text's length."""

    id: str
    events: list[tuple[float, int]]


def begin(port: int, body: bytes) -> Stream:
    """Send a request."""
    stream = Stream(socket.create_connection(("127.0.0.1", port)))
    stream.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    stream.socket.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    stream.socket.setblocking(False)
    return stream


def run(port: int, num_streams: int, num_requests: int, start_s: float, body: bytes) -> list[Stream]:
    """All streams, when the last has ended."""
    ready, streams, running = select.epoll(), list[Stream](), dict[int, Stream]()
    due = time.monotonic()
    while running or len(streams) < num_requests:
        while len(streams) < num_requests and len(running) < num_streams and time.monotonic() >= due:
            streams.append(begin(port, body))
            running[streams[-1].socket.fileno()] = streams[-1]
            ready.register(streams[-1].socket, select.EPOLLIN)
            due = max(due + start_s, time.monotonic() - start_s)
        time.sleep(LOOK_S)
        for number, _ in ready.poll(0):
            if not running[number].read():
                ready.unregister(number)
                running.pop(number).socket.close()
    return streams


def answer_of(pieces: list[tuple[float, bytes]]) -> Answer:
    """Take an answer apart."""
    whole = b"".join(data for _, data in pieces)
    if b"200 OK" not in whole[:20]:
        raise SystemExit(f"the server answered {whole!r:.300}")
    ends, end = [], 0
    for came, data in pieces:
        end += len(data)
        ends.append((end, came))
    answer_id, events, place = "", [], 0
    for match in EVENT.finditer(whole):
        event = json.loads(match[1])
        answer_id = event["id"]
        while ends[place][0] < match.end():
            place += 1
        if text := event["choices"][0]["delta"].get("content"):
            events.append((ends[place][1], len(text)))
    return Answer(answer_id, events)


def main() -> None:
    """Run the load, and print what came."""
    port, num_streams, num_requests = map(int, sys.argv[1:4])
    started = time.monotonic()
    streams = run(port, num_streams, num_requests, float(sys.argv[4]), sys.argv[5].encode())
    seconds = time.monotonic() - started
    print(json.dumps({"seconds": seconds, "answers": [answer_of(one.pieces) for one in streams]}))


if __name__ == "__main__":
    main()
