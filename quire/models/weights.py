# SPDX-License-Identifier: Apache-2.0
"""Loading of a model's parameters from checkpoint files.

Invariant: every part of every checkpoint tensor goes to exactly one slot or is skipped on purpose (by the model, or
left to another rank), and every slot is filled. This is checked from the file headers before any data is read.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire.config.arch import Multimodal
from quire.errors import ModelLoadError
from quire.layers.embedding import VocabEmbedding
from quire.layers.slot import Slot, sizes, uncovered_reason
from quire.models.base import CausalLM
from quire.models.expert_counts import differences
from quire.models.gguf.model import is_gguf
from quire.models.gguf.tensors import gguf_tensor_files
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorFile, TensorInfo
from quire.models.weight_files import all_weight_files
from quire.progress import Progress

logger = logging.getLogger(__name__)

_MAX_NAMED = 8
"""Mismatched tensors named in one message."""
_UNTIED = (
    " (if the output head is the token embedding, give --hf-overrides '{\"tie_word_embeddings\": true}')"
)
_LEGACY_ENDS = {"gamma": "weight", "beta": "bias"}
_LEGACY_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
"""Names of norms in checkpoints converted from TensorFlow, including BERT's own."""
"""A prime, so that no two rows of a weight repeat numbers at the same columns."""


NoteBytes = Callable[[int, int], None]
"""Receives the bytes read so far and altogether."""


class Weights(Protocol):
    """Source of a model's tensors."""

    def fill(self, slots: Iterable[tuple[str, Slot]]) -> None:
        """Copy a layer's tensors, by name, into their slots, visible to later device computation."""

    def end_layer(self) -> None:
        """Release the tensors of the filled layer."""


class TensorReader(Protocol):
    """Transfer of file tensors to the model's device."""

    def fill(self, parts: Iterable[tuple[TensorFile, TensorInfo, Slot]]) -> None:
        """See `Weights.fill`."""

    def close(self) -> None:
        """Finish; nothing is filled afterwards."""


class MappedCopy:
    """Reader for slots on the host: copies straight from the mapped file."""

    def fill(self, parts: Iterable[tuple[TensorFile, TensorInfo, Slot]]) -> None:
        for file, info, slot in parts:
            slot.fill(file.part(info, slot.source.box))

    def close(self) -> None:
        """Do nothing: no resources are held."""


@dataclass(frozen=True)
class _TensorSource:
    file: TensorFile
    info: TensorInfo
    slots: list[Slot]

    @property
    def num_bytes(self) -> int:
        """Bytes read of it."""
        return sum(_num_bytes(self.info, slot) for slot in self.slots)


class CheckpointWeights:
    """Tensors of the checkpoint in `model_dir`, each checked against the model's slots of its name.

    Raises:
        ModelLoadError: no weight file; a corrupt file; tensors that are missing, left over, stored twice, or of the
            wrong shape or dtype; parts that are read twice or not at all. One message names all files and tensors.
    """

    def __init__(
        self,
        model: CausalLM,
        model_dir: Path,
        reader: TensorReader,
        *,
        show_progress: bool,
        note: NoteBytes | None = None,
    ) -> None:
        files = open_files(model_dir, model.folders, model.config.arch.part_of)
        self._sources = _plan(model, files, model_dir)
        self._num_slots_left = sum(len(source.slots) for source in self._sources.values())
        total = sum(source.num_bytes for source in self._sources.values())
        self._progress = (
            Progress(total, "Loading weights", "GB", per_unit=1e9, ends=False, say=logger.info)
            if show_progress
            else None
        )
        self._note, self._done, self._total = note, 0, total
        self._reader = reader
        self._in_use: list[tuple[TensorFile, TensorInfo, Slot]] = []

    def names(self) -> list[str]:
        """Return the names of all tensors that the model reads, as in its slots."""
        return list(self._sources)

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor, by its slot name."""
        return name in self._sources

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor, without a copy if the file stores it in this form."""
        source = self._sources[name]
        return source.file.part(source.info, tuple(slice(0, size) for size in source.info.shape))

    def stored_name(self, name: str) -> str:
        """Return the tensor's name in the file."""
        return self._sources[name].info.name

    def fill(self, slots: Iterable[tuple[str, Slot]]) -> None:
        sources = [(self._sources[name], slot) for name, slot in slots]
        parts = [(source.file, source.info, slot) for source, slot in sources]
        self._in_use += parts
        self._reader.fill(part for part in parts if _num_bytes(*part[1:]))

    def end_layer(self) -> None:
        for file, info, slot in self._in_use:
            file.release(info)
            self._done += _num_bytes(info, slot)
            if self._progress is not None:
                self._progress.update(_num_bytes(info, slot))
        if self._note is not None:
            self._note(self._done, self._total)
        self._num_slots_left -= len(self._in_use)
        self._in_use.clear()
        if not self._num_slots_left:
            if self._progress is not None:
                self._progress.close()
            self._reader.close()


def _num_bytes(info: TensorInfo, slot: Slot) -> int:
    """Return the bytes that a slot reads of a tensor."""
    return math.prod(sizes(slot.source.box)) * info.dtype.itemsize


def open_files(
    model_dir: Path, folders: Iterable[str] = (), part_of: Multimodal | None = None
) -> Sequence[TensorFile]:
    """Open and check the checkpoint's files, of a language model or of the multimodal model that contains it.

    Files of a further checkpoint of this part are among them.

    Names of tensors in a folder begin with it and a slash. Raises as `CheckpointWeights` does.
    """
    if is_gguf(model_dir):
        return gguf_tensor_files(model_dir)

    def called(folder: str, name: str) -> str:
        name = _LEGACY_NORM.sub(lambda match: _LEGACY_ENDS[match[1]], name)
        if folder:
            return f"{folder}/{name}"
        return name if part_of is None else part_of.name_alone(name)

    places = all_weight_files(model_dir, folders)
    if part_of is not None and part_of.further_dir:
        places += all_weight_files(Path(part_of.further_dir))
    return [SafetensorsFile(path, partial(called, folder)) for folder, path in places]


def _plan(model: CausalLM, files: Sequence[TensorFile], model_dir: Path) -> dict[str, _TensorSource]:
    """Match tensors with slots; return slot name -> source."""
    slots = model.checkpoint_slots()
    prefix = _missing_prefix(model, files)
    moved = _table_from_head(model, files, slots) or {"lm_head.weight": _head_name(model)}
    moved |= _table_elsewhere(model, files, slots)
    sources: dict[str, _TensorSource] = {}

    def called(own_name: str) -> str:
        own_name = own_name if own_name in slots else moved.get(own_name, own_name)
        return own_name if own_name in slots else prefix + own_name

    counts = differences(slots, (called(name) for file in files for name in file.tensors))
    wrong = [f"{model_dir}: {each}" for each in counts]
    for file in files:
        for own_name, stored in file.tensors.items():
            name = called(own_name)
            at = f"{file.path}: tensor {stored.name!r}"
            if name in sources:
                wrong.append(f"{at} is also in {sources[name].file.path}")
            elif name in slots:
                info = stored if stored.dtype in slots[name][0].dtypes else file.in_floats(stored)
                sources[name] = _TensorSource(file, _as_taken(info, slots[name]), slots[name])
                wrong += (f"{at} {reason}" for reason in _why_unfit(info, slots[name]))
            elif not model.leaves_out(name) and not any(each.explains(name) for each in counts):
                wrong.append(f"{at} has no place in {type(model).__name__}")
    head = _head_name(model)
    wrong += (
        f"{model_dir}: tensor {name!r} is in none of the files{_UNTIED if name == head else ''}"
        for name in slots
        if name not in sources and not any(each.explains(name) for each in counts)
    )
    if wrong:
        raise ModelLoadError(_in_one_sentence(wrong))
    return sources


def _head_name(model: CausalLM) -> str:
    return f"{model.renamed.get('lm_head', 'lm_head')}.weight"


def _table_from_head(
    model: CausalLM, files: Sequence[TensorFile], slots: Mapping[str, list[Slot]]
) -> dict[str, str]:
    """Map a stored head to the token embedding's name if the two are tied and only the head is stored."""
    head, stored = _head_name(model), {name for file in files for name in file.tensors}
    if not model.config.arch.tie_word_embeddings or head not in stored or head in slots or model.also_tables:
        return {}
    tables = [
        f"{name}.weight"
        for names, layer in model.checkpoint_layers()
        if isinstance(layer, VocabEmbedding) and not layer.only_looked_up
        for name in names
    ]
    is_stored = any(name in stored or name.removeprefix(model.base_prefix) in stored for name in tables)
    return {} if is_stored or len(tables) != 1 else {head: tables[0]}


def _table_elsewhere(
    model: CausalLM, files: Sequence[TensorFile], slots: Mapping[str, list[Slot]]
) -> dict[str, str]:
    """Map the stored one of the model's `also_tables` to the token embedding's name, unless that is stored."""
    if not model.also_tables:
        return {}
    stored = {name for file in files for name in file.tensors}
    tables = (names[0] for names, layer in model.checkpoint_layers() if isinstance(layer, VocabEmbedding))
    table = f"{next(tables)}.weight"
    others = (f"{name}.weight" for name in model.also_tables)
    found = next((name for name in others if name in stored and name not in slots), None)
    return {} if found is None or table in stored else {found: table}


def _as_taken(info: TensorInfo, slots: list[Slot]) -> TensorInfo:
    """Return the tensor's info with the shape that its slots use."""
    source = slots[0].source
    return replace(info, shape=source.shape) if info.shape == source.stored_shape else info


def _in_one_sentence(wrong: list[str]) -> str:
    more = len(wrong) - _MAX_NAMED
    return "; ".join([*wrong[:_MAX_NAMED], *([f"and {more} more such tensors"] if more > 0 else [])])


def _missing_prefix(model: CausalLM, files: Sequence[TensorFile]) -> str:
    present = any(name.startswith(model.base_prefix) for file in files for name in file.tensors)
    return "" if present else model.base_prefix


def _why_unfit(info: TensorInfo, slots: list[Slot]) -> Iterator[str]:
    """Yield why a tensor does not fit its slots: one phrase, or none."""
    for slot in slots:
        if info.shape != slot.source.stored_shape:
            yield f"has shape {list(info.shape)}, config.json implies {list(slot.source.stored_shape)}"
            return
        if info.dtype not in slot.dtypes:
            yield f"is {_text(info.dtype)}; expected {' or '.join(_text(dtype) for dtype in slot.dtypes)}"
            return
    regions = [slot.source.region for slot in slots if not slot.shared]
    reason = uncovered_reason(slots[0].source.shape, regions) if regions else None
    if reason is not None:
        yield f"does not go into the model once: {reason}"


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
