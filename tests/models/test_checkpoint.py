"""What the user calls a model, and the directory it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

import quire
from quire.config import DEMO_MODEL
from quire.errors import ModelLoadError
from quire.models.checkpoint import resolve_model_dir


def test_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model_dir(str(tmp_path), None, None) == tmp_path.resolve()
    assert resolve_model_dir("owner/name", None, None) == (tmp_path / "owner" / "name").resolve()


def test_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire, "__path__", [str(tmp_path)])
    with pytest.raises(ModelLoadError, match="quire-demo is not part of this installation"):
        resolve_model_dir(DEMO_MODEL, None, None)
    directory = tmp_path / "assets" / DEMO_MODEL
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert resolve_model_dir(DEMO_MODEL, None, None) == directory


@pytest.mark.parametrize("model", ["/no/such", "./no/such", "a/b/c", ""])
def test_neither_directory_nor_id(model: str) -> None:
    with pytest.raises(ModelLoadError, match="is no directory, no Hugging Face id"):
        resolve_model_dir(model, None, None)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="is a file; it must be a directory"):
        resolve_model_dir(str(tmp_path / "model.bin"), None, None)


def test_hugging_face_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

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
