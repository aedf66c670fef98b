# SPDX-License-Identifier: Apache-2.0
"""Resolution of the user's model name to a local directory or GGUF file, and its config.

Invariant: resolved once, at start-up; config, tokenizer and weights are all opened from the one path returned here, so
they always belong together.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quire.config import ASSETS, BUNDLED_MODELS
from quire.config.arch import ModelArch
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import has_file
from quire.models.gguf.config import read_gguf_config
from quire.models.gguf.model import gguf_in, is_gguf, part_paths
from quire.models.hf_config import read_hf_config
from quire.models.hub import HubModel, cached_ids


def resolve_model_dir(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the directory of a local path, of a bundled model, or of a Hugging Face id, downloaded if necessary.

    A GGUF model is returned as its file, or the first file of a split one, also if a directory contains nothing else,
    or if the id names it as described in `HubModel`.

    Raises:
        ModelLoadError: there is no such directory, file or id, or it cannot be fetched.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        path = path.resolve()
        return path if has_file(path / "config.json") else gguf_in(path) or path
    if model in BUNDLED_MODELS:
        return _bundled(model)
    if path.is_file():
        if is_gguf(path):
            return part_paths(path.absolute())[0]
        raise ModelLoadError(
            f"model {model!r} is a file; it must be a directory with config.json and *.safetensors, or a *.gguf file"
        )
    if not model or path.is_absolute() or model.startswith(".") or model.partition(":")[0].count("/") > 1:
        raise ModelLoadError(
            f"model {model!r}: there is no such {'file' if is_gguf(path) else 'directory'}"
            f"{_nearest(path, download_dir) or _FORMS}"
        )
    name, _, gguf = model.partition(":")
    if gguf and "/" not in name:
        raise ModelLoadError(
            f"model {model!r} is one of Ollama's names, which are not known here; give a *.gguf file, or a Hugging "
            "Face id with the quantization, such as bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"
        )
    if "/" not in name and (near := _close(name, BUNDLED_MODELS)):
        raise ModelLoadError(f"there is no model {model!r}; did you mean {near!r}?")
    try:
        return HubModel(name, gguf or None, revision, download_dir).find()
    except ModelLoadError as error:
        hint = _nearest(Path(name), download_dir)
        raise ModelLoadError(f"{error}{hint}") if hint else error from error.__cause__


_FORMS = (
    "; a model is a directory, a *.gguf file, a Hugging Face id (owner/name, of GGUF owner/name:Q4_K_M), or "
    f"one of {', '.join(BUNDLED_MODELS)}"
)


def _nearest(model: Path, download_dir: str | None) -> str:
    """Return the words that name a model of this machine whose name is close in spelling; nothing if there is none."""
    siblings = [path for path in model.parent.glob("*") if path.is_dir() or is_gguf(path)]
    names = [*BUNDLED_MODELS, *cached_ids(download_dir), *map(str, siblings)]
    near = _close(str(model), names)
    return f"; did you mean {near!r}?" if near else ""


def _close(name: str, names: Sequence[str]) -> str:
    """Return the name that is close in spelling; empty if there is none, or `name` is one of them."""
    near = [] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return near[0] if near else ""


def read_model_config(
    model_dir: Path, overrides: dict[str, Any], model_impl: str = "auto", download_dir: str | None = None
) -> ModelArch:
    """Return the arch of the model found by `resolve_model_dir`; see `read_hf_config`, `read_gguf_config`.

    Checkpoints that it names for its parts are resolved as models are, `download_dir` included.
    """
    if is_gguf(model_dir):
        return read_gguf_config(model_dir, overrides, model_impl)
    find = partial(resolve_model_dir, revision=None, download_dir=download_dir)
    return read_hf_config(model_dir, overrides, model_impl, find)


def _bundled(model: str) -> Path:
    directory = ASSETS / model
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{model} is not part of this installation: {directory} has no config.json")
    return directory
