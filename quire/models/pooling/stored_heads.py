"""Whether a checkpoint has a head behind what is pooled, found out where torch is not imported.

Invariant: files are read as far as their lists of tensors; whoever loads the tensors checks them.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire.errors import ModelLoadError
from quire.models.checkpoint_files import has_file, size_of
from quire.models.gguf.model import is_gguf
from quire.models.json_object import read_json_object

HEADS = ("score", "classifier", "pre_classifier", "v_head")
"""What heads are called."""
_INDEX, _MAX_HEADER_BYTES = "model.safetensors.index.json", 100_000_000


def has_head(model_dir: Path) -> bool:
    """Whether any tensor is of a head; of a model in GGUF that is not asked.

    Raises:
        ModelLoadError: a list of tensors is malformed.
    """
    if is_gguf(model_dir):
        return True
    return any(name.partition(".")[0] in HEADS for name in _tensor_names(model_dir))


def _tensor_names(model_dir: Path) -> set[str]:
    if has_file(model_dir / _INDEX):
        return {*read_json_object(model_dir / _INDEX).child("weight_map").values}
    return {name for path in model_dir.glob("*.safetensors") for name in _names_in(path)}


def _names_in(path: Path) -> set[str]:
    """Those of a safetensors file: 8 bytes with the size of a JSON object, which follows and has them as keys."""
    size_of(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: its list of tensors cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path}: its list of tensors is no JSON object")
    return {*header}
