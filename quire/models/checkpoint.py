"""Turns what the user calls a model into a directory on this machine, or a file in GGUF, and reads what it is.

Invariant: resolved once, at start-up; config, tokenizer and weights are all opened from the one path returned here, so
they always belong together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import quire
from quire.config import IN_THE_BOX
from quire.config.arch import ModelArch
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import has_file
from quire.models.gguf.config import read_gguf_config
from quire.models.gguf.model import gguf_in, is_gguf, part_paths
from quire.models.hf_config import read_hf_config
from quire.models.hub import HubModel


def resolve_model_dir(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The directory of a local path, of a model in the box, or of a Hugging Face id, which is downloaded if need be.

    Of a model in GGUF it is the file, or the first one of a split, also where a directory has nothing else, or where
    the id names it as `HubModel` says.

    Raises:
        ModelLoadError: there is no such directory, file or id, or it cannot be fetched.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        path = path.resolve()
        return path if has_file(path / "config.json") else gguf_in(path) or path
    if model in IN_THE_BOX:
        return _in_the_box(model)
    if path.is_file():
        if is_gguf(path):
            return part_paths(path.absolute())[0]
        raise ModelLoadError(
            f"model {model!r} is a file; it must be a directory with config.json and *.safetensors, or a *.gguf file"
        )
    if not model or path.is_absolute() or model.startswith(".") or model.partition(":")[0].count("/") > 1:
        raise ModelLoadError(
            f"model {model!r} is no directory, no Hugging Face id (owner/name, of GGUF owner/name:Q4_K_M) "
            f"and not {' or '.join(IN_THE_BOX)}"
        )
    name, _, gguf = model.partition(":")
    return HubModel(name, gguf or None, revision, download_dir).find()


def read_model_config(model_dir: Path, overrides: dict[str, Any], model_impl: str = "auto") -> ModelArch:
    """The shape and options of the model that `resolve_model_dir` found; see `read_hf_config`, `read_gguf_config`."""
    read = read_gguf_config if is_gguf(model_dir) else read_hf_config
    return read(model_dir, overrides, model_impl)


def _in_the_box(model: str) -> Path:
    directory = Path(quire.__path__[0]) / "assets" / model
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{model} is not part of this installation: {directory} has no config.json")
    return directory
