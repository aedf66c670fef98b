# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint that are no regular files, or hold something else than they must: named at start."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.config import EngineConfig
from quire.engine.startup import load_tokenizer, prepare
from quire.errors import ModelLoadError, StartupError
from quire.models.checkpoint_files import has_file, read_text
from quire.models.safetensors_file import SafetensorsFile
from quire.models.weight_files import StoredTensors, weight_files
from tests.fixtures.folded import folded

DEMO = Path(quire.__path__[0]) / "assets" / "quire-demo"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "sparse_linear/model.safetensors",
)


def dangle(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


KINDS: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "dangling link": dangle,
    "loop": lambda path: path.symlink_to(path),
}


def start(directory: Path) -> None:
    """Read all that a start reads before weights are loaded, and the head of each tensor file."""
    config = prepare(EngineConfig.from_args(model=str(directory), runner="pooling"), "offline")
    load_tokenizer(config)
    for path in weight_files(directory):
        SafetensorsFile(path)


def copy_demo(directory: Path, name: str) -> Path:
    """Fill a directory with all files of a model but one; return that one's path."""
    for path in DEMO.iterdir():
        (directory / path.name).symlink_to(path)
    if "sentence" in name:  # read beside this file only
        modules = '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]'
        (directory / "modules.json").write_text(modules)
    if "index" in name:  # read where the one file is not there
        (directory / "model.safetensors").unlink()
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    return path


@folded("kind", KINDS)
@folded("name", FILES)
def test_checkpoint_name_that_is_no_file_is_named(name: str, kind: str, tmp_path: Path) -> None:
    path = copy_demo(tmp_path, name)
    KINDS[kind](path)
    with pytest.raises(StartupError) as error:
        start(tmp_path)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)


@folded("content", [b"", b"{", b"[]", b"\xff\xfe", b"3", b'{"a":' * 100_000])
@folded("name", [name for name in FILES if name.endswith(".json")])
def test_checkpoint_json_damaged_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    copy_demo(tmp_path, name).write_bytes(content)
    if name == "modules.json" and content == b"[]":
        return  # a list is what it must be
    with pytest.raises(StartupError, match=name.replace(".", r"\.")) as error:
        start(tmp_path)
    assert "\n" not in str(error.value)


def test_has_file_distinguishes_absent_from_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert has_file(tmp_path / "file")
    assert has_file(tmp_path / "link")
    assert not has_file(tmp_path / "none")
    assert not has_file(tmp_path / "file" / "below")
    with pytest.raises(ModelLoadError, match="is no file but a directory; it must be a regular file"):
        has_file(tmp_path)


def test_read_text_bounds_its_size(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("abcd")
    with pytest.raises(ModelLoadError, match="has 4 bytes, more than the limit of 3"):
        read_text(tmp_path / "x", 3)


def test_weights_that_may_not_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    own = Path.open

    def refuse(self: Path, *args: Any, **options: Any) -> Any:  # a superuser may read any file
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return own(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read: Permission denied"):
        _ = StoredTensors(tmp_path).names
