# SPDX-License-Identifier: Apache-2.0
"""Real models behind a real router: three models, memory for two, clients that leave, servers that are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import Server, has_ended, wait_until

PAGE = Path(__file__).parents[2] / "docs/many_models.md"
CHILD = "quire.model_router.child_process"
TIMEOUT_S = 300.0
NUM_CLIENTS, NUM_REQUESTS = 8, 6
FILE = """
defaults: {memory: 400M, kv_cache: 16M, options: {max-num-seqs: 4, cpu-threads: 1}}
models:
  demo: {model: quire-demo}
  draft: {model: quire-demo-draft}
  again: {model: quire-demo, sleep: false}
  broken: {model: /no/such/model}
"""


class Router(Server):
    """`quire serve --models`; what its models hold is theirs to say."""

    def __init__(self, file: Path, *args: str, log: Path) -> None:
        super().__init__("--models", str(file), *args, log=log)

    def held(self) -> dict[str, float]:
        return {}

    def ask(self, model: str, **fields: Any) -> tuple[int, dict[str, Any], str | None]:
        """Status, reply and Retry-After of a completion."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)) as client:
            body = {
                "model": model,
                "prompt": "The capital of France is",
                "max_tokens": 4,
                "temperature": 0,
                **fields,
            }
            client.request("POST", "/v1/completions", json.dumps(body))
            reply = client.getresponse()
            return reply.status, json.loads(reply.read()), reply.headers["retry-after"]

    def cards(self) -> list[dict[str, Any]]:
        """Entries of all models."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)) as client:
            client.request("GET", "/models")
            cards: list[dict[str, Any]] = json.load(client.getresponse())["data"]
            return cards

    def num_running(self) -> int:
        return sum(card["status"]["num_running"] for card in self.cards())

    def leave(self, model: str) -> None:
        """Begin a long answer and do not wait for it."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)) as client:
            client.request(
                "POST", "/v1/completions", json.dumps({"model": model, "prompt": "a", "max_tokens": 500})
            )


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return file


@pytest.mark.more
def test_chaos_leaves_every_reply_right_or_refused(tmp_path: Path) -> None:
    flags = ("--models-memory", "900M", "--models-turn", "1")
    router = Router(write(tmp_path, FILE), *flags, log=tmp_path / "log")
    router.wait_ready()
    right = {model: router.ask(model)[1]["choices"][0]["text"] for model in ("demo", "draft", "again")}
    assert right["demo"] == right["again"] == " Paris."

    def client(number: int) -> list[tuple[str, int, str]]:
        dice, seen = random.Random(number), []
        for _ in range(NUM_REQUESTS):
            model = dice.choice([*right, *right, "broken", "unknown"])
            if dice.random() < 0.15 and model in right:
                router.leave(model)
                continue
            status, reply, retry_after = router.ask(model)
            assert (status == 503) == (retry_after is not None)
            text = reply["choices"][0]["text"] if status == 200 else reply["error"]["message"]
            seen.append((model, status, text))
        return seen

    with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
        killing = pool.submit(kill_one, router)
        seen = [one for answers in pool.map(client, range(NUM_CLIENTS)) for one in answers]
        killing.result()
    for model, status, text in seen:
        if model == "unknown":
            assert status == 404
        elif model == "broken":
            assert status == 503
            assert "failed" in text
            assert "/no/such" not in text
        elif status == 200:
            assert text == right[model]
        else:  # of the one that was killed
            assert status == 503
            assert "has ended; try again" in text or "failed" in text or "terminat" in text, text
    assert sum(status == 200 for _, status, _ in seen) >= NUM_CLIENTS
    for model, text in right.items():
        wait_until(lambda model=model: router.ask(model)[0] == 200, TIMEOUT_S, router.last_words)
        assert router.ask(model)[1]["choices"][0]["text"] == text
    assert sum(card["status"]["state"] == "loaded" for card in router.cards()) <= 2
    assert len(router.children(CHILD)) <= 2
    assert router.stop() == 0, router.last_words()


def kill_one(router: Router) -> None:
    """Kill a model's server while others answer."""
    wait_until(lambda: router.num_running() and router.children(CHILD), TIMEOUT_S, router.last_words)
    for pid in router.children(CHILD)[:1]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.more
def test_killed_router_leaves_no_process_behind(tmp_path: Path) -> None:
    router = Router(write(tmp_path, FILE), log=tmp_path / "log")
    router.wait_ready()
    assert router.ask("draft")[0] == 200
    children = router.children(CHILD)
    assert children
    router.process.kill()
    router.process.wait()
    wait_until(lambda: all(map(has_ended, children)), 60.0, "a model's server outlives its router")


@pytest.mark.more
def test_spare_serves_as_any_other_and_is_replaced(tmp_path: Path) -> None:
    """A spare that is killed is replaced; the next load gets the process that was there, and leaves nothing behind."""
    router = Router(write(tmp_path, FILE), log=tmp_path / "log")
    router.wait_ready()
    wait_until(lambda: len(router.children(CHILD)) == 1, TIMEOUT_S, router.last_words)
    (killed,) = router.children(CHILD)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: set(router.children(CHILD)) - {killed}, TIMEOUT_S, router.last_words)
    (spare,) = set(router.children(CHILD)) - {killed}
    status, reply, _ = router.ask("demo")
    assert (status, reply["choices"][0]["text"]) == (200, " Paris.")
    wait_until(lambda: len(router.children(CHILD)) == 2, TIMEOUT_S, router.last_words)
    assert spare in router.children(CHILD)
    os.kill(spare, signal.SIGKILL)
    wait_until(lambda: router.ask("demo")[0] == 200, TIMEOUT_S, router.last_words)
    children = router.children(CHILD)
    assert router.stop() == 0, router.last_words()
    assert all(map(has_ended, children))


@pytest.mark.more
def test_documented_example_is_served(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    router = Router(
        write(tmp_path, example.replace("path/to/model", "quire-demo-draft")), log=tmp_path / "log"
    )
    router.wait_ready()
    commands = re.findall(r"^curl .*$", text, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command.replace("localhost:8000", f"localhost:{router.port}") + " --fail --silent"],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}\n{router.last_words()}"
        assert done.stdout
    assert router.stop() == 0, router.last_words()


def test_router_never_imports_torch() -> None:
    program = (
        "import sys, quire.model_router.run, quire.model_router.flags; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=TIMEOUT_S)
