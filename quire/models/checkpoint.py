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
from quire.models.gguf.config import read_gguf_config
from quire.models.gguf.model import gguf_in, is_gguf, part_paths
from quire.models.hf_config import read_hf_config

# No pickled weights and no code: only what quire can read.
_WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def resolve_model_dir(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The directory of a local path, of a model in the box, or of a Hugging Face id, which is downloaded if need be.

    Of a model in GGUF it is the file, or the first one of a split, also where a directory has nothing else.

    Raises:
        ModelLoadError: there is no such directory, file or id, or it cannot be fetched.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        path = path.resolve()
        return path if (path / "config.json").exists() else gguf_in(path) or path
    if model in IN_THE_BOX:
        return _in_the_box(model)
    if path.is_file():
        if is_gguf(path):
            return part_paths(path.absolute())[0]
        raise ModelLoadError(
            f"model {model!r} is a file; it must be a directory with config.json and *.safetensors, or a *.gguf file"
        )
    if not model or path.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise ModelLoadError(
            f"model {model!r} is no directory, no Hugging Face id (owner/name) and not {' or '.join(IN_THE_BOX)}"
        )
    return _downloaded(model, revision, download_dir)


def read_model_config(model_dir: Path, overrides: dict[str, Any], model_impl: str = "auto") -> ModelArch:
    """The shape and options of the model that `resolve_model_dir` found; see `read_hf_config`, `read_gguf_config`."""
    read = read_gguf_config if is_gguf(model_dir) else read_hf_config
    return read(model_dir, overrides, model_impl)


def _in_the_box(model: str) -> Path:
    directory = Path(quire.__path__[0]) / "assets" / model
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{model} is not part of this installation: {directory} has no config.json")
    return directory


def _downloaded(model: str, revision: str | None, download_dir: str | None) -> Path:
    # Imported here: it costs a tenth of a second that local models need not spend.
    from huggingface_hub import errors, snapshot_download

    reasons = (
        (errors.HFValidationError, "is neither a directory nor a valid Hugging Face id"),
        (errors.LocalEntryNotFoundError, "is not on this machine, and Hugging Face cannot be reached"),
        (errors.GatedRepoError, "is gated: ask for access on its Hugging Face page and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "is neither a directory nor a public model on Hugging Face"),
        (errors.RevisionNotFoundError, "is on Hugging Face, but not in this revision"),
    )
    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, allow_patterns=list(_WANTED_FILES)
            )
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        what = f"model {model!r}" + (f" at revision {revision!r}" if revision else "")
        reason = next(
            (text for kind, text in reasons if isinstance(error, kind)), f"cannot be fetched: {error}"
        )
        raise ModelLoadError(f"{what} {reason}") from error
