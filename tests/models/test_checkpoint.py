# SPDX-License-Identifier: Apache-2.0
"""Tests of model names and the directories that they resolve to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import huggingface_hub.constants  # the package loads it lazily
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quire.config import DEMO_MODEL
from quire.errors import ModelLoadError
from quire.models import checkpoint
from quire.models.checkpoint import resolve_model_dir


def test_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model_dir(str(tmp_path), None, None) == tmp_path.resolve()
    assert resolve_model_dir("owner/name", None, None) == (tmp_path / "owner" / "name").resolve()


def test_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "ASSETS", tmp_path / "assets")
    with pytest.raises(ModelLoadError, match="quire-demo is not part of this installation"):
        resolve_model_dir(DEMO_MODEL, None, None)
    directory = tmp_path / "assets" / DEMO_MODEL
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert resolve_model_dir(DEMO_MODEL, None, None) == directory


@pytest.mark.parametrize("model", ["/no/such", "./no/such", "a/b/c", ""])
def test_neither_directory_nor_id(model: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no such directory; a model is a directory"):
        resolve_model_dir(model, None, None)


def test_nearest_name_of_this_machine_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "my-models" / "llama-8b").mkdir(parents=True)
    (tmp_path / "models--owner--qwen3-8b").mkdir()
    for typed, meant in (
        ("quire-dem0", "quire-demo"),
        (f"{tmp_path}/my-models/lama-8b", f"{tmp_path}/my-models/llama-8b"),
        ("owner/qwen-8b", "owner/qwen3-8b"),
    ):
        with pytest.raises(ModelLoadError, match=f"did you mean '{re.escape(meant)}'"):
            resolve_model_dir(typed, None, str(tmp_path))
    with pytest.raises(ModelLoadError) as caught:
        resolve_model_dir("owner/unlike", None, str(tmp_path))
    assert "did you mean" not in str(caught.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="is a file; it must be a directory"):
        resolve_model_dir(str(tmp_path / "model.bin"), None, None)


def test_hugging_face_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    (tmp_path / "model.safetensors").touch()

    def fake_download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    assert resolve_model_dir("owner/name", "v1", "/downloads") == tmp_path
    assert (asked["model"], asked["revision"], asked["cache_dir"]) == ("owner/name", "v1", "/downloads")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(pattern in asked["allow_patterns"] for pattern in ("*", "*.bin", "*.py"))


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="'owner/name' at revision 'v1' is not on this machine"):
        resolve_model_dir("owner/name", "v1", str(tmp_path))
    with pytest.raises(ModelLoadError, match="'gpt2' is not on this machine"):
        resolve_model_dir("gpt2", None, str(tmp_path))


def test_invalid_id() -> None:
    with pytest.raises(ModelLoadError, match="neither a directory nor a valid Hugging Face id"):
        resolve_model_dir("owner/na..me--", None, None)


def http_error(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/owner/name"))
    return kind("a long text", response=response)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (LocalEntryNotFoundError("x"), "cannot be reached"),
        (http_error(GatedRepoError), "is gated: ask for access"),
        (http_error(RepositoryNotFoundError), "nor a public model on Hugging Face$"),
        (http_error(RevisionNotFoundError), "not in this revision$"),
        (http_error(HfHubHTTPError), "cannot be fetched: a long text"),
        (OSError("disk full"), "cannot be fetched: disk full"),
    ],
)
def test_failed_download(failure: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, **options: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=words):
        resolve_model_dir("owner/name", None, None)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = (
    "README.md",
    "mmproj-F16.gguf",
    "tiny-Q4_0.gguf",
    "tiny-q4_k_m.gguf",
    "tiny-IQ4_K_M.gguf",
    "tiny-UD-Q8_0.gguf",
    "tiny-Q8_0.gguf",
    "F16/tiny-F16-00001-of-00002.gguf",
    "F16/tiny-F16-00002-of-00002.gguf",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of Hugging Face on a machine that cannot reach it; the directory of the model owner/name in it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    return repository / "snapshots" / COMMIT


def fill(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_0", "tiny-Q4_0.gguf"),
        ("Q4_K_M", "tiny-q4_k_m.gguf"),
        ("ud-q8_0", "tiny-UD-Q8_0.gguf"),
        ("tiny-Q8_0.gguf", "tiny-Q8_0.gguf"),
        ("F16", "F16/tiny-F16-00001-of-00002.gguf"),
        ("F16/tiny-F16-00001-of-00002.gguf", "F16/tiny-F16-00001-of-00002.gguf"),
    ],
)
def test_a_gguf_file_by_its_repository(wanted: str, found: str, cache: Path) -> None:
    fill(cache, REPOSITORY)
    assert resolve_model_dir(f"owner/name:{wanted}", None, str(cache.parents[2])) == cache / found


@pytest.mark.parametrize(
    ("names", "model", "words"),
    [
        (
            REPOSITORY,
            "owner/name:Q4_K",
            r"has no GGUF models 'Q4_K': name one as owner/name:tiny-F16-00001-of-00002",
        ),
        (
            REPOSITORY,
            "owner/name:Q8_0",
            r"2 GGUF models 'Q8_0': .*; there are tiny-Q8_0.gguf, tiny-UD-Q8_0.gguf$",
        ),
        (REPOSITORY, "owner/name", r"has 6 GGUF models: name one as .*, tiny-Q4_0.gguf,"),
        (("README.md",), "owner/name:Q4_0", "has no GGUF models 'Q4_0': it has no GGUF files at all"),
        (("a-Q4_0-00001-of-00002.gguf",), "owner/name:Q4_0", "a-Q4_0-00002-of-00002.gguf.* is missing"),
        ((), "owner/other:Q4_0", "'owner/other:Q4_0' is not on this machine, and HF_HUB_OFFLINE forbids"),
        ((), "/no/such:Q4_0", "there is no such directory"),
    ],
)
def test_no_or_several_gguf_files(names: Sequence[str], model: str, words: str, cache: Path) -> None:
    fill(cache, names)
    with pytest.raises(ModelLoadError, match=words):
        resolve_model_dir(model, None, str(cache.parents[2]))


def test_a_repository_with_one_gguf_model_is_that_model(cache: Path) -> None:
    fill(cache, ("config.json", "mmproj-F16.gguf", "tiny-Q4_0.gguf"))
    assert resolve_model_dir("owner/name", None, str(cache.parents[2])) == cache / "tiny-Q4_0.gguf"
    fill(cache, ("model.safetensors",))
    assert resolve_model_dir("owner/name", None, str(cache.parents[2])) == cache


def test_exactly_the_parts_of_a_gguf_model_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: list[str] = []

    def fake_download(model: str, *, dry_run: bool = False, allow_patterns: list[str], **options: Any) -> Any:
        if dry_run:
            return [SimpleNamespace(filename=name) for name in REPOSITORY if name.endswith(".gguf")]
        patterns.extend(allow_patterns)
        fill(tmp_path, [name for name in REPOSITORY if name in allow_patterns])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    assert (
        resolve_model_dir("owner/name:F16", None, None) == tmp_path / "F16" / "tiny-F16-00001-of-00002.gguf"
    )
    assert patterns == [name for name in REPOSITORY if name.startswith("F16/")]
    patterns.clear()
    resolve_model_dir("owner/name:Q4_0", None, None)
    assert patterns == ["tiny-Q4_0.gguf", next(name for name in REPOSITORY if "mmproj" in name)]
