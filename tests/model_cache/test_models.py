# SPDX-License-Identifier: Apache-2.0
"""`quire pull | list | show | rm` on a cache that the test has made."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.cli.main import main
from quire.errors import ModelLoadError
from quire.model_cache.cache import cached_models
from quire.model_cache.facts import numbers_by_type, read_header
from tests.fixtures.folded import folded


def add(cache: Path, name: str, files: dict[str, bytes], used: float = 1e9) -> Path:
    """Write a model into a cache as Hugging Face's library does, and return its snapshot."""
    repo = cache / ("models--" + name.replace("/", "--"))
    commit = hashlib.sha1(name.encode()).hexdigest()
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    for number, (file, content) in enumerate(files.items()):
        blob = repo / "blobs" / f"{number:064x}"
        blob.write_bytes(content)
        os.utime(blob, (used, used))
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    add(tmp_path / "hub", "some/floats", {"model.safetensors": bytes(3000), "config.json": b"{}"}, used=1.7e9)
    add(tmp_path / "hub", "other/ggufs", {"a-Q4_K_M.gguf": bytes(5000), "a-Q8_0.gguf": bytes(9000)})
    return tmp_path / "hub"


def test_list_shows_models_last_used_first(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["some/floats", "other/ggufs"]
    assert "2023-11-14  safetensors" in lines[0] or "2023-11-15  safetensors" in lines[0]
    assert lines[1].endswith("gguf")
    assert any(line.startswith("quire-demo ") for line in lines)


def test_list_as_json_has_sizes_in_bytes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json", "--download-dir", str(cache)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["model"], first["size"], first["files"]) == ("some/floats", 3002, ["model.safetensors"])
    assert second["files"] == ["a-Q4_K_M.gguf", "a-Q8_0.gguf"]


def test_list_of_a_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert cached_models(str(tmp_path / "none")) == []


def test_rm_removes_the_named_models_alone(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "other/ggufs", "--yes", "--download-dir", str(cache)]) == 0
    assert "removed other/ggufs" in capsys.readouterr().out
    assert [model.id for model in cached_models(str(cache))] == ["some/floats"]
    assert not (cache / "models--other--ggufs").exists()


def test_rm_removes_an_interrupted_download(cache: Path) -> None:
    (cache / "models--cut--off/snapshots").mkdir(parents=True)
    assert main(["rm", "cut/off", "--yes", "--download-dir", str(cache)]) == 0
    assert not (cache / "models--cut--off").exists()
    assert len(cached_models(str(cache))) == 2


@pytest.mark.parametrize(
    "name", ["some/none", "..", "../..", "some--floats", "models--some--floats", "/etc", ""]
)
def test_rm_of_a_missing_model_removes_nothing(
    cache: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = sorted(cache.rglob("*"))
    assert main(["rm", "some/floats", name, "--yes", "--download-dir", str(cache)]) == 2
    error = capsys.readouterr().err
    assert "is not in the cache" in error
    assert "some/floats" in error
    assert sorted(cache.rglob("*")) == before


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_rm_without_confirmation_keeps_the_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["rm", "some/floats", "--download-dir", str(cache)]) != 0
    assert len(cached_models(str(cache))) == 2


@pytest.mark.parametrize("name", ["quire-demo", "./here", "llama3.2:1b", "a/b/c", "https://example.com/a"])
def test_pull_of_an_invalid_id_names_the_form(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", name]) == 2
    assert "Hugging Face id" in capsys.readouterr().err


def test_pull_finds_a_cached_model(
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    files = {path.name: path.read_bytes() for path in tiny_model("llama").iterdir() if path.is_file()}
    add(tmp_path, "tiny/llama", files)
    assert main(["pull", "tiny/llama", "--download-dir", str(tmp_path)]) == 0
    assert "models--tiny--llama" in capsys.readouterr().out


def test_show_prints_the_facts_of_the_files(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tiny_model("llama")), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["layers"] == str(config["num_hidden_layers"])
    assert facts["numbers"].startswith("0.")
    assert "F32 100%" in facts["numbers"]


def test_numbers_are_counted_by_type(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]},
        "b": {"dtype": "I32", "shape": [], "data_offsets": [30, 34]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(34))
    assert numbers_by_type(tmp_path) == {"BF16": 15, "I32": 1}


@folded(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": {}}',
        struct.pack("<Q", 40) + b'{"a": {"dtype": "F32", "shape": [-1]}}  ',
        struct.pack("<Q", 40) + b'{"a": {"dtype": "F32", "shape": ["1"]}} ',
        struct.pack("<Q", 3) + b"\xff\xfe\xfd",
    ],
)
def test_malformed_header_is_refused_with_its_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        read_header(file)


class PsServer(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        has_key = self.headers.get("Authorization") == "Bearer key"
        details = {"format": "gguf", "quantization_level": "Q4_K"}
        model = {"name": "a-model", "size": 2_500_000_000, "context_length": 8192, "details": details}
        body = json.dumps({"models": [model]} if has_key else {"error": "no key"}).encode()
        self.send_response(200 if has_key and self.path == "/api/ps" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_ps_lists_the_loaded_models(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), PsServer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            assert main(["ps", "--url", url, "--api-key", "key"]) == 0
            header, row = capsys.readouterr().out.splitlines()
            assert header.split() == ["NAME", "SIZE", "CONTEXT", "FORMAT"]
            assert row.split() == ["a-model", "2.50", "GB", "8,192", "gguf", "Q4_K"]
            assert main(["ps", "--url", url, "--api-key", "key", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)[0]["name"] == "a-model"
            assert main(["ps", "--url", url, "--api-key", "other"]) == 2
        finally:
            server.shutdown()
