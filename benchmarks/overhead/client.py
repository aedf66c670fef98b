# SPDX-License-Identifier: Apache-2.0
"""The load: so many chat streams at a time, whose bytes are kept with their times. A process of its own; prints JSON.

    python -m benchmarks.overhead.client PORT NUM_STREAMS NUM_REQUESTS START_S STEP_S BODY

A request begins every START_S seconds, once a stream is free for it, so that streams are at all stages at any time.

The time of a piece is when it reached this process's socket, by the kernel's clock (SO_TIMESTAMPNS): how soon this
process is scheduled and how fast it reads is no affair of the server's. So it looks into its sockets now and then, and
parses nothing while the load runs: woken by each piece, it would cost the server's write more than the write itself,
which clients of a network do not. Nor do these take the server's processors: this process looks in the middle between
two steps, which come every STEP_S seconds (0: without pause), when all pieces of one are there and none of the next.
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
POLL_S = 0.003
"""From look to look, where steps come without pause. A piece that waits for another one behind it gets that one's later
time, so looks are many."""
TIMESPEC = struct.Struct("qq")
EVENT = re.compile(rb"data: (\{.*\})\n\n")
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nConnection: close\r\n"


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


class Looks:
    """Schedule of polls in the middle between two steps, derived from the arrival of pieces."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next_s = time.time()

    @property
    def wait_s(self) -> float:
        """Seconds to the next look."""
        return max(0.0, self._next_s - time.time())

    def have_seen(self, latest: float) -> None:
        """The next is half a step behind this piece, or whole steps later; by the wall clock, as pieces are."""
        now = time.time()
        step_s = self._step_s
        self._next_s = now + (step_s - (now - latest - step_s / 2) % step_s if step_s else POLL_S)


def run(
    port: int, num_streams: int, num_requests: int, start_s: float, step_s: float, body: bytes
) -> list[Stream]:
    """All streams, when the last has ended."""
    ready, streams, running = select.epoll(), list[Stream](), dict[int, Stream]()
    due, latest, looks = time.monotonic(), time.time(), Looks(step_s)
    while running or len(streams) < num_requests:
        while len(streams) < num_requests and len(running) < num_streams and time.monotonic() >= due:
            streams.append(begin(port, body))
            running[streams[-1].socket.fileno()] = streams[-1]
            ready.register(streams[-1].socket, select.EPOLLIN)
            due = max(due + start_s, time.monotonic() - start_s)
        may_begin = len(streams) < num_requests and len(running) < num_streams
        until_due = due - time.monotonic() if may_begin else looks.wait_s
        time.sleep(max(0.0, min(until_due, looks.wait_s)))
        if looks.wait_s:
            continue
        for number, _ in ready.poll(0):
            stream = running[number]
            if not stream.read():
                ready.unregister(number)
                running.pop(number).socket.close()
            elif len(stream.pieces) > 2:  # the first come when the server has taken the request, at any time
                latest = stream.pieces[-1][0]
        looks.have_seen(latest)
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
    start_s, step_s = map(float, sys.argv[4:6])
    streams = run(port, num_streams, num_requests, start_s, step_s, sys.argv[6].encode())
    seconds = time.monotonic() - started
    print(json.dumps({"seconds": seconds, "answers": [answer_of(one.pieces) for one in streams]}))


if __name__ == "__main__":
    main()
