"""Signs of life in a stream that has nothing to send, so that no proxy or client takes it for dead.

Proxies close a connection on which nothing comes for a minute (nginx, ALB: 60 s, Cloudflare: 120 s), and clients repeat
the request then. A stream is silent while its prompt waits or is computed, and while a tool call is written, which is
sent whole.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Send


class KeepAlive:
    """Sends `ping` whenever the stream around which it stands (`async with`) was silent for an interval.

    Args:
        send: the ASGI channel of a response that has begun; each piece is whole, so a ping may come between any two.
        ping: what the API has for this purpose; without it nothing is sent.
        interval_s: seconds; 0: never.
    """

    def __init__(self, send: Send, ping: bytes, interval_s: float) -> None:
        self._send = send
        self._ping = ping
        self._interval_s = interval_s
        self._num_sent = 0
        self._task: asyncio.Task[None] | None = None

    def count_sent(self) -> None:
        """Note that the stream has sent something."""
        self._num_sent += 1

    async def __aenter__(self) -> KeepAlive:
        if self._ping and self._interval_s:
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is None:
            return
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if error is None and isinstance(ended, Exception):
            raise ended

    async def _run(self) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(self._interval_s)
            if num_sent == self._num_sent:
                await self._send({"type": "http.response.body", "body": self._ping, "more_body": True})
