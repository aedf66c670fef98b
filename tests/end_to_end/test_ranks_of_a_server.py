# SPDX-License-Identifier: Apache-2.0
"""A server whose ranks die or stop: streams go on with the tokens that they would have had, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import Server, children_of

NOTICED_S = 10.0
BODIES = [
    {"prompt": prompt, "max_tokens": 50, "ignore_eos": True, "n": 8, "stream": True, "seed": 3, **more}
    for prompt, more in (([1, 2, 3], {}), ([4, 5] * 3, {"temperature": 0.0, "logprobs": 1}))
]
FLAGS = (
    "--max-model-len=64",
    "--max-num-seqs=1",
    "--no-enable-prefix-caching",
    "--device=cpu",
    "--cpu-threads=1",
)


def streamed(url: str, body: dict[str, Any], begun: Callable[[], None]) -> dict[int, str]:
    """The text of each completion, to the end of the stream."""
    texts: dict[int, str] = {}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            begun()
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.02)


@contextmanager
def serving(model: Path, base: Path, *flags: str) -> Iterator[Server]:
    server = Server(str(model), *FLAGS, *flags, log=base / "log", TMPDIR=str(base))
    try:
        yield server.wait_ready()
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.more
@pytest.mark.parametrize("struck", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("flags", [("-tp=2",), ("-pp=2",)])
def test_dead_or_stopped_rank_pauses_the_streams(
    struck: signal.Signals, flags: tuple[str, ...], tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    segments = set(Path("/dev/shm").iterdir())
    with serving(tiny_model("llama"), tmp_path, *flags) as server, ThreadPoolExecutor(2) as pool:
        wanted = [streamed(server.url, body, lambda: None) for body in BODIES]
        core = server.core_pid()
        assert core is not None
        ranks = children_of(core)
        assert len(ranks) == 2
        left = [ranks[1]]

        def strike() -> None:
            with contextlib.suppress(IndexError):  # somebody was faster
                os.kill(left.pop(), struck)

        streams = [pool.submit(streamed, server.url, body, strike) for body in BODIES]
        wait_until(lambda: server.health() == 503, NOTICED_S, "nobody noticed")
        assert [stream.result() for stream in streams] == wanted
        server.wait_ready()
        assert server.core_pid() not in (core, None)
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), NOTICED_S, "a rank lives on"
        )
        fresh = server.core_pid()
        assert fresh is not None
        assert len(children_of(fresh)) == 2
        assert server.stop() == 0
        wait_until(lambda: not Path(f"/proc/{fresh}").exists(), NOTICED_S, "the core lives on")
    assert not list(tmp_path.glob("quire-*"))
    assert set(Path("/dev/shm").iterdir()) <= segments
