# SPDX-License-Identifier: Apache-2.0
"""Store of embeddings by digest, and their computation in slices.

Invariant: an item is computed once while the store has it, and in an order of operations that depends on nothing else:
alone, or short texts together where each row has the same bits in any company. A bad item costs itself: the reason is
in the progress, and nothing is raised.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.kernels.cpu import library
from quire.layers.base import activation_dtype
from quire.media import EncodeProgress, MediaItem
from quire.models.safetensors_file import SafetensorsFile
from quire.multimodal.families import FAMILIES
from quire.multimodal.towers.base import LENGTHS, TOKEN_IDS, Tower, TowerState, torch_on_one_thread
from quire.multimodal.towers.load import has_tower, load_tower, warm_up
from quire.plugins import import_place
from quire.worker.media_rows import Embeddings

logger = logging.getLogger(__name__)

_VALUES = "values"  # of an item of kind "embeds"
_SPINNING = 2
"""Most threads of torch that are not used beside kernels.

An idle thread of torch spins on a core that kernels need: where a program has loaded OpenMP itself, for milliseconds.
More cores gain more from torch's threads than they lose so.
"""
_NUM_RECENT = 8
"""Slices whose longest one the next slice is expected to take."""
_MOST_JOINED = 512
"""Most rows of texts that are computed together: more are no faster, and all of them wait for the last."""


class _JointWork(NamedTuple):
    """Items that the tower is computing, of which several are texts."""

    items: list[MediaItem]
    state: TowerState


def open_encoder(config: EngineConfig) -> EncoderStore:
    """Return the store of a prepared config, with its tower's weights loaded if there is one.

    Raises:
        StartupError: the tower cannot be loaded.
    """
    tower = load_tower(config) if has_tower(config) else None
    if tower is not None:
        with library.as_in_kernels():
            warm_up(tower)
        logger.info("encoder: %s", type(tower).__name__)
    elif config.arch.part_of is not None:
        logger.warning(
            "%s: its language model is served; requests are text", config.arch.part_of.architecture
        )
    return EncoderStore(config, tower)


class EncoderStore:
    """`MediaEncoder` with a tower; without one it stores embeddings from files only.

    Embeddings are on the host in the dtype of activations.
    """

    def __init__(self, config: EngineConfig, tower: Tower | None) -> None:
        self._config = config
        self._tower = tower
        self._dtype = activation_dtype(config)
        self._done: dict[bytes, Embeddings] = {}
        self._begun: dict[bytes, _JointWork] = {}
        self._recent_s: deque[float] = deque([0.0], _NUM_RECENT)  # Seconds of the last slices.

    def embeddings(self, digest: bytes) -> Embeddings | None:
        """Return an item's embeddings; None: the store has none."""
        return self._done.get(digest)

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        """See `MediaEncoder.encode`."""
        until = time.monotonic() + budget_s
        failed: dict[bytes, str] = {}
        is_first = True
        with library.as_in_kernels(), torch_on_one_thread(_SPINNING):
            for place, item in enumerate(items):
                while item.digest not in self._done and item.digest not in failed:
                    began = time.monotonic()
                    if not is_first and began + max(self._recent_s) >= until:
                        return self._progress(items, failed)
                    is_first = False
                    failed |= self._advance(items[place:])
                    self._recent_s.append(time.monotonic() - began)
        return self._progress(items, failed)

    def compute(self, item: MediaItem) -> Generator[None, None, Embeddings]:
        """Return the embeddings of an item for a tower, stored ones if there are any; yields between slices.

        They are not stored. Raises whatever an unusable item causes.
        """
        if item.digest not in self._done and self._tower is not None:
            state = self._tower.begin(self._floats(_read(item.path)))
            while not self._tower.advance(state):
                yield
            return self._tower.finish(state)
        return self._done[item.digest]

    def drop(self, digests: Sequence[bytes]) -> None:
        """See `MediaEncoder.drop`."""
        for digest in digests:
            self._done.pop(digest, None)
            self._begun.pop(digest, None)

    def _progress(self, items: Sequence[MediaItem], failed: dict[bytes, str]) -> EncodeProgress:
        done = list(dict.fromkeys(item.digest for item in items if item.digest in self._done))
        return EncodeProgress(done, failed, {digest: _num_bytes(self._done[digest]) for digest in done})

    def _advance(self, items: Sequence[MediaItem]) -> dict[bytes, str]:
        """Compute one slice of the first item, perhaps with others of them; return why items cannot be encoded."""
        item = items[0]
        try:
            return self._slice(items)
        except (QuireError, ValueError, KeyError, IndexError, TypeError, OSError) as error:
            logger.warning("an item of kind %s cannot be encoded: %s", item.kind, error)
            reason = f"it cannot be encoded: {error}"
        except RuntimeError as error:  # torch's, for arrays of a shape that the tower cannot take
            logger.exception("an item of kind %s cannot be encoded", item.kind)
            reason = f"it cannot be encoded: {error}"
        work = self._begun.get(item.digest)
        return dict.fromkeys([item.digest] if work is None else self._ended(work), reason)

    def _slice(self, items: Sequence[MediaItem]) -> dict[bytes, str]:
        item = items[0]
        if item.kind == "embeds":
            file = SafetensorsFile(Path(item.path))
            return self._keep(item, Embeddings(file.tensor(file.tensors[_VALUES]).clone()))
        if self._tower is None:
            return {item.digest: "the model has no encoder for it"}
        work = self._begun.get(item.digest) or self._begin(items, self._tower)
        if not self._tower.advance(work.state):
            return {}
        failed: dict[bytes, str] = {}
        wanted = self._ended(work)
        for one, found in zip(work.items, _of_each(work.items, self._tower.finish(work.state)), strict=True):
            if one.digest in wanted:
                failed |= self._keep(one, found)
        return failed

    def _begin(self, items: Sequence[MediaItem], tower: Tower) -> _JointWork:
        joined = self._joined(items, tower)
        work = _JointWork(joined, tower.begin(self._arrays(joined)))
        self._begun |= {one.digest: work for one in joined}
        return work

    def _joined(self, items: Sequence[MediaItem], tower: Tower) -> list[MediaItem]:
        """Return the first item, and texts behind it that are computed together with it."""
        first, *others = items
        found, num_rows = [first], len(first.token_ids)
        if first.path or not tower.joins(first.token_ids):
            return found
        for one in others:
            is_new = one.digest not in self._done and one.digest not in self._begun
            if is_new and not one.path and tower.joins(one.token_ids):
                num_rows += len(one.token_ids)
                if num_rows > _MOST_JOINED:
                    break
                found.append(one)
        return found

    def _ended(self, work: _JointWork) -> set[bytes]:
        """Forget a work; return the digests for which it was done, those dropped meanwhile left out."""
        wanted = {one.digest for one in work.items if self._begun.get(one.digest) is work}
        for digest in wanted:
            del self._begun[digest]
        return wanted

    def _arrays(self, items: Sequence[MediaItem]) -> dict[str, NDArray[np.generic]]:
        item, ids = items[0], [one.token_ids for one in items]
        if item.kind != "text":
            return self._floats(_read(item.path))
        texts: dict[str, NDArray[np.generic]] = {
            TOKEN_IDS: np.concatenate([np.asarray(each, dtype=np.int64) for each in ids]),
            LENGTHS: np.array([*map(len, ids)]),
        }
        return texts | self._floats(_read(item.path)) if item.path else texts

    def _floats(self, arrays: dict[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Return what the tower takes of the arrays in a file."""
        whole = self._config.arch.part_of
        assert whole is not None, "there is a tower"
        floats: dict[str, NDArray[np.generic]] = import_place(FAMILIES[whole.architecture].processor).floats(
            arrays
        )
        return floats

    def _keep(self, item: MediaItem, found: Embeddings) -> dict[bytes, str]:
        """Store embeddings of the right shape; return why they are not."""
        want = [item.num_embeddings, self._config.arch.media_size]
        if [*found.values.shape] != want:
            have = [*found.values.shape]
            return {item.digest: f"it has embeddings {have}, and its positions take {want}"}
        self._done[item.digest] = Embeddings(
            self._on_host(found.values), tuple(map(self._on_host, found.deepstack))
        )
        return {}

    def _on_host(self, values: Tensor) -> Tensor:
        return values.to("cpu", self._dtype).contiguous()


def _of_each(items: Sequence[MediaItem], found: Embeddings) -> list[Embeddings]:
    """Return the embeddings of each of some texts, or of one item."""
    if len(items) == 1:
        return [found]
    lengths = [len(one.token_ids) for one in items]
    return [Embeddings(rows.clone()) for rows in found.values.split_with_sizes(lengths)]


def _num_bytes(found: Embeddings) -> int:
    return sum(each.nbytes for each in (found.values, *found.deepstack))


def _read(path: str) -> dict[str, NDArray[np.generic]]:
    """Return all arrays of a safetensors file.

    Raises:
        ModelLoadError: it is missing or malformed.
    """
    file = SafetensorsFile(Path(path))
    return {name: file.tensor(info).clone().numpy() for name, info in file.tensors.items()}
