# SPDX-License-Identifier: Apache-2.0
"""Engines that speak just enough HTTP to fail at a chosen stage, and a server for the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from quire.disagg.proxy import DisaggProxy

PARAMS = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1, "remote_request_id": "r"}
EVENTS = [b'data: {"n": %d}\n\n' % number for number in range(4)] + [b"data: [DONE]\n\n"]


class FakeEngine:
    """Engine in a thread.

    Attributes:
        breaks: stage at which it closes the connection: "accept", "head", "body", "event" or "" for none.
        status: of its replies.
        params_status: of its replies to requests with blocks of a prefill engine, if not 0.
        requests: (path, headers, body) of each POST.
        waits: it sends no head until this is set.
        is_frozen: that holds for health checks, too.
    """

    def __init__(self) -> None:
        self.breaks, self.status, self.params_status = "", 200, 0
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.waits: threading.Event | None = None
        self.is_frozen = False
        self.num_closed_early = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):
                await self._exchange(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.breaks == "accept":
            return
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
        if method == "POST" or self.is_frozen:
            self.requests.append((path, headers, body))
            while self.waits is not None and not self.waits.is_set():
                if reader.at_eof():
                    self.num_closed_early += 1
                    return
                await asyncio.sleep(0.005)
        if self.breaks == "head":
            return
        asked = body.get("kv_transfer_params") or {}
        status = (asked.get("do_remote_prefill") and self.params_status) or self.status
        if body.get("stream") and status == 200:
            await self._stream(writer)
        else:
            await self._whole(writer, asked, status)
        await writer.drain()

    async def _whole(self, writer: asyncio.StreamWriter, asked: dict[str, Any], status: int) -> None:
        reply = {
            "url": self.url,
            "got": asked,
            "kv_transfer_params": PARAMS if asked.get("do_remote_decode") else None,
        }
        content = json.dumps(reply if status == 200 else {"error": {"message": "no"}}).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (status, len(content))
        )
        writer.write(content[:5] if self.breaks == "body" else content)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if self.breaks == "body":
            return
        for number, event in enumerate(EVENTS):
            if self.breaks == "event" and number == 2:
                writer.write(b"%x\r\n%b\r\n" % (len(event) - 6, event[:-6]))
                return
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


@contextlib.contextmanager
def fakes(number: int) -> Iterator[list[FakeEngine]]:
    engines = [FakeEngine() for _ in range(number)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.stop()


@contextlib.contextmanager
def served(proxy: DisaggProxy) -> Iterator[str]:
    """Yield the URL of a proxy that runs in a thread."""
    server = uvicorn.Server(uvicorn.Config(proxy, host="127.0.0.1", port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    started = threading.Event()
    while not server.started:
        assert thread.is_alive(), "the proxy does not start"
        started.wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
