# SPDX-License-Identifier: Apache-2.0
"""Starts that cannot succeed: one sentence, an exit code, and nothing left; and output that cannot be written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUIRE = (sys.executable, "-m", "quire.entrypoints.cli.main")
WITHIN_S = 90.0


def start(
    tmp_path: Path, *args: str, sh: str = 'exec "$@"', command: str = "serve", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run to its end a command that has no reason to go on; nothing of it may be left in its temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["sh", "-c", sh, "sh", *QUIRE, command, *args],
        env={**os.environ, "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert not list(folder.glob("quire-*"))
    return done


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence."""
    assert done.returncode not in (0, None), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    found = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    assert len(found) == 1, done.stderr
    return found[0]


NULL = ("--distributed-executor-backend", "null", "--port", "0")


@pytest.mark.item(49)
@pytest.mark.parametrize(
    ("args", "sh", "words"),
    [
        pytest.param(("--dtype", "float7"), "", "float7", marks=pytest.mark.more),
        pytest.param(("--kv-cache-memory-bytes", "1"), "", "blocks", marks=pytest.mark.more),
        pytest.param(("--kv-cache-memory-bytes", str(10**16)), "", "memory", marks=pytest.mark.more),
        pytest.param(
            ("--max-model-len", "100000000"), "", "max-model-len|max_model_len", marks=pytest.mark.more
        ),
        (("no-such-model",), "", "no-such-model"),
        pytest.param(("--api-key-file", "/nowhere"), "", "/nowhere", marks=pytest.mark.more),
        pytest.param((), "ulimit -f 0;", "TMPDIR", marks=pytest.mark.more),
        pytest.param((), "ulimit -n 20;", "open files", marks=pytest.mark.more),
        pytest.param(
            (), f"mkdir -p $TMPDIR/{'x' * 190}; TMPDIR=$TMPDIR/{'x' * 190};", "TMPDIR", marks=pytest.mark.more
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_impossible_start_names_its_reason(
    args: tuple[str, ...], sh: str, words: str, tmp_path: Path
) -> None:
    backend = NULL if "kv-cache-memory" not in str(args) else ("--port", "0")
    assert re.search(words, reason(start(tmp_path, *args, *backend, sh=sh + ' exec "$@"')))


@pytest.mark.more
@pytest.mark.item(49)
def test_taken_port_is_an_error_before_loading(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = start(tmp_path, "--port", str(taken.getsockname()[1]))
    assert "--port" in reason(done)


@pytest.mark.more
@pytest.mark.item(49)
@pytest.mark.parametrize("after_s", [0.1, 0.5, 1.0, 1.5, 2.0])
def test_a_signal_while_it_starts_ends_it_and_leaves_nothing(after_s: float, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*QUIRE, "serve", "--port", "0"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)  # the core has the other end, too
    assert process.returncode in (0, -signal.SIGTERM), output
    assert "Traceback" not in output or process.returncode == -signal.SIGTERM
    assert not list(tmp_path.glob("quire-*"))


def damaged(model: Path, folder: Path, damage: Callable[[Path], None]) -> Path:
    shutil.copytree(model, folder)
    damage(folder)
    return folder


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)  # type: ignore[return-value]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "layers": (with_config(num_hidden_layers=10**9), "num_hidden_layers"),
    "negative": (with_config(hidden_size=-8), "hidden_size"),
    "positions": (
        with_config(max_position_embeddings=2**31 - 1),
        "max_position_embeddings",
    ),
    "no json": (replaced("config.json", b"{"), "config.json"),
    "half the weights": (cut("model.safetensors", 2000), "model.safetensors"),
    "no header": (replaced("model.safetensors", b"\xff" * 64), "model.safetensors"),
    "no tokenizer": (replaced("tokenizer.json", b"[]"), "tokenizer"),
}


@pytest.mark.more
@pytest.mark.item(26)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_model_is_named_in_one_sentence(
    kind: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    damage, words = DAMAGE[kind]
    folder = damaged(tiny_model("llama"), tmp_path / "model", damage)
    found = reason(start(tmp_path, str(folder), "--port", "0", sh='ulimit -v 16000000; exec "$@"'))
    assert words in found


@pytest.mark.more
@pytest.mark.item(26)
def test_no_code_of_a_model_directory_is_imported(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    def poison(folder: Path) -> None:
        code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        for name in ("modeling_x", "configuration_x", "tokenization_x", "generation_x"):
            (folder / f"{name}.py").write_text(code)
        classes = {
            "AutoConfig": "configuration_x.X",
            "AutoModelForCausalLM": "modeling_x.X",
            "AutoTokenizer": ["tokenization_x.X", None],
        }
        with_config(auto_map=classes, _attn_implementation_internal="a/b", trust_remote_code=True)(folder)

    folder = damaged(tiny_model("llama"), tmp_path / "model", poison)
    done = start(
        tmp_path, "Hello", "--model", str(folder), "--max-tokens", "2", "--max-model-len", "32", command="run"
    )
    assert done.returncode in (0, 1), done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.more
@pytest.mark.item(53)
@pytest.mark.parametrize("sh", ['exec "$@"', 'ulimit -f 2000; exec "$@"'])
def test_batch_with_unwritable_answers_is_an_error(sh: str, tmp_path: Path) -> None:
    body = {"model": "quire-demo", "prompt": "Hello", "max_tokens": 40, "logprobs": 20, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
        for index in range(1 if "ulimit" not in sh else 200)
    ]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    out = "/dev/full" if "ulimit" not in sh else str(tmp_path / "out.jsonl")
    done = start(tmp_path, "-i", str(tmp_path / "in.jsonl"), "-o", out, command="run-batch", sh=sh)
    assert "cannot be written" in reason(done)
