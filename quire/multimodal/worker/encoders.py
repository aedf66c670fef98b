# SPDX-License-Identifier: Apache-2.0
"""Store of embeddings by digest, and their computation in slices.

Invariant: an item is computed once while the store has it, alone, and in an order of operations that depends on
nothing else. A bad item costs itself: the reason is in the progress, and nothing is raised.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path

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
from quire.multimodal.towers.base import Tower, TowerState
from quire.multimodal.towers.load import has_tower, load_tower, warm_up
from quire.plugins import import_place
from quire.worker.media_rows import Embeddings

logger = logging.getLogger(__name__)

_VALUES = "values"  # of an item of kind "embeds"
_NUM_RECENT = 8
"""Slices whose longest one the next slice is expected to take."""


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
        self._begun: dict[bytes, TowerState] = {}
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
        with library.as_in_kernels():
            for item in items:
                while item.digest not in self._done and item.digest not in failed:
                    began = time.monotonic()
                    if not is_first and began + max(self._recent_s) >= until:
                        return self._progress(items, failed)
                    is_first = False
                    reason = self._advance(item)
                    self._recent_s.append(time.monotonic() - began)
                    if reason is not None:
                        failed[item.digest] = reason
                        self._begun.pop(item.digest, None)
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

    def _advance(self, item: MediaItem) -> str | None:
        """Compute one slice of an item; return why it cannot be encoded, or None."""
        try:
            return self._slice(item)
        except (QuireError, ValueError, KeyError, IndexError, TypeError, OSError) as error:
            logger.warning("an item of kind %s cannot be encoded: %s", item.kind, error)
            return f"it cannot be encoded: {error}"
        except RuntimeError as error:  # torch's, for arrays of a shape that the tower cannot take
            logger.exception("an item of kind %s cannot be encoded", item.kind)
            return f"it cannot be encoded: {error}"

    def _slice(self, item: MediaItem) -> str | None:
        if item.kind == "embeds":
            file = SafetensorsFile(Path(item.path))
            return self._keep(item, Embeddings(file.tensor(file.tensors[_VALUES]).clone()))
        if self._tower is None:
            return "the model has no encoder for it"
        state = self._begun.get(item.digest)
        if state is None:
            state = self._begun[item.digest] = self._tower.begin(self._arrays(item))
        if not self._tower.advance(state):
            return None
        del self._begun[item.digest]
        return self._keep(item, self._tower.finish(state))

    def _arrays(self, item: MediaItem) -> dict[str, NDArray[np.generic]]:
        if item.kind == "text":
            ids: dict[str, NDArray[np.generic]] = {"token_ids": np.asarray(item.token_ids, dtype=np.int64)}
            return ids | self._floats(_read(item.path)) if item.path else ids
        return self._floats(_read(item.path))

    def _floats(self, arrays: dict[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Return what the tower takes of the arrays in a file."""
        whole = self._config.arch.part_of
        assert whole is not None, "there is a tower"
        floats: dict[str, NDArray[np.generic]] = import_place(FAMILIES[whole.architecture].processor).floats(
            arrays
        )
        return floats

    def _keep(self, item: MediaItem, found: Embeddings) -> str | None:
        """Store embeddings of the right shape; return why they are not."""
        want = [item.num_embeddings, self._config.arch.media_size]
        if [*found.values.shape] != want:
            return f"it has embeddings {[*found.values.shape]}, and its positions take {want}"
        self._done[item.digest] = Embeddings(
            self._on_host(found.values), tuple(map(self._on_host, found.deepstack))
        )
        return None

    def _on_host(self, values: Tensor) -> Tensor:
        return values.to("cpu", self._dtype).contiguous()


def _num_bytes(found: Embeddings) -> int:
    return sum(each.nbytes for each in (found.values, *found.deepstack))


def _read(path: str) -> dict[str, NDArray[np.generic]]:
    """Return all arrays of a safetensors file.

    Raises:
        ModelLoadError: it is missing or malformed.
    """
    file = SafetensorsFile(Path(path))
    return {name: file.tensor(info).clone().numpy() for name, info in file.tensors.items()}
