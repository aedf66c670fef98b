# SPDX-License-Identifier: Apache-2.0
"""Worker with what it does beside steps: media, stores of rows, sleep, and new weights.

Invariant: sleep frees memory and wake-up allocates as much again, or lets steps do so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quire.config import EngineConfig
from quire.features import MEDIA_ENCODER, PARKED_WEIGHTS, ROW_MOVER, WORKER_CALLS
from quire.kv_cache.rows import RowMover, RowStoreInfo
from quire.layers.kv_cache import bind_kv_cache
from quire.layers.shard import WHOLE, Shard
from quire.media import EncodeProgress, MediaItem
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.models.stages import ALL, Stage
from quire.plugins import import_place
from quire.processes import collect_garbage
from quire.worker.devices import Device
from quire.worker.media_rows import MediaEncoder
from quire.worker.step_worker import StepWorker, enough_memory, refused_memory


class Dropped:
    """Objects and tensors that are about to be dropped; they are not kept."""

    def __init__(self, objects: Iterable[object], tensors: Iterable[Tensor] = ()) -> None:
        self._objects = [weakref.ref(each) for each in objects if each is not None]
        self._storages = [
            StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            for tensor in tensors
        ]

    @property
    def are_left(self) -> bool:
        """True if one is still there, such as in a cycle."""
        if any(each() is not None for each in self._objects):
            return True
        return not all(storage.expired() for storage in self._storages)  # type: ignore[no-untyped-call]


class LoadedModels(NamedTuple):
    """Models with weights of one checkpoint; calling `uses` gives features what they loaded beside."""

    config: EngineConfig
    model: CausalLM
    encoder: MediaEncoder | None
    uses: list[Callable[[], None]]


class ParkedModels(Protocol):
    """Models whose weights are on the host."""

    def restore(self) -> None:
        """Copy the weights back to the device."""


class Worker(StepWorker):
    """Loads a model, sizes and allocates its KV cache, and runs steps.

    Args:
        config: prepared.
        shard: tensor-parallel shard of each layer; the draft model is not sharded.
        stage: pipeline stage, which decides the layers.
    """

    def __init__(
        self, config: EngineConfig, device: Device, shard: Shard = WHOLE, stage: Stage = ALL
    ) -> None:
        super().__init__(config, device, shard, stage)
        self._parked: ParkedModels | None = None
        self._beside: LoadedModels | None = None  # New weights, until they are committed or dropped.

    def open_row_store(self) -> RowStoreInfo:
        """Open the configured store of KV cache rows, between which and the host tier rows can move from now on.

        Further calls return the same.

        Raises:
            ConfigError: it cannot be opened, or holds rows of another model or configuration.
        """
        assert self._copier is not None, "open_row_store before initialize_kv_cache"
        assert self._kv_config is not None
        if self._rows is None:
            self._rows = import_place(ROW_MOVER)(self._config, self._kv_config, self._shard, self._stage)
            self.rows.use(self._copier.host, self._tensors)
        return self.rows.info

    def encode_media(self, items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        """Compute embeddings of items for about `budget_s` seconds; see `MediaEncoder.encode`.

        A stage after the first needs none, and has them all at once.
        """
        if not self._stage.is_first:
            return EncodeProgress([item.digest for item in items], {}, {})
        if self._encoder is None:
            return EncodeProgress([], {item.digest: "the model takes no media" for item in items}, {})
        return self._encoder.encode(items, budget_s)

    def drop_media(self, digests: Sequence[bytes]) -> None:
        """Drop embeddings that no request needs."""
        if self._encoder is not None:
            self._encoder.drop(digests)

    @property
    def rows(self) -> RowMover:
        """Mover of rows; exists once a store is open."""
        assert self._rows is not None, "open_row_store() comes first"
        return self._rows

    def sleep(self, level: int) -> None:
        """Free the KV cache, and park (level 1) or drop (level 2) the weights. All rows are lost.

        At level 1 a device that can keeps the addresses of the cache, with the runner and the graphs that have them.
        """
        if self._runner is not None:
            self._runner.read_all()
        if level == 1 and self._device.memory.discard(self._cache_memory()):
            return
        dropped = Dropped([self._runner, self._copier, self._model if level == 2 else None], self._tensors)
        if self._runner is not None:
            self._runner = self._copier = None
            self._tensors = ()
            if self._rows is not None:
                self._rows.use([])
            self._bind_minimal_cache()
        if level == 2:
            self._model = self._parked = None
            for feature in self.features.values():
                feature.unload()
        elif self._model is not None and self._parked is None and self._device.parks_weights:
            self._parked = import_place(PARKED_WEIGHTS)([*self._models()], self._device.transfers)
        self._give_back(dropped)

    def _cache_memory(self) -> tuple[Tensor, ...]:
        """Return the tensors of the KV cache and of its host tier; none if they are not allocated."""
        return self._tensors if self._copier is None else (*self._tensors, *self._copier.host)

    def _give_back(self, dropped: Dropped) -> None:
        """Return unused memory to the system; a collection of garbage takes a tenth of a second, so only if needed."""
        if dropped.are_left:
            collect_garbage()
        self._device.memory.give_back()

    def wake_up(self, tag: str) -> None:
        """Restore the weights or the KV cache.

        Raises:
            StartupError: loading failed or memory does not suffice; the engine stays asleep.
        """
        WAKERS[tag](self)

    def _wake_weights(self) -> None:
        if self._model is None:
            self._load_model()
        if self._parked is not None:
            with enough_memory("the weights"):
                self._parked.restore()
            self._parked = None

    def _wake_cache(self) -> None:
        assert self._kv_config is not None, "wake_up of a KV cache that was never initialized"
        if self._runner is None:
            self.initialize_kv_cache(self._kv_config)

    def prepare_weights(self, model_dir: str) -> None:
        """Load the weights of another directory beside those in use, which go on to be used.

        Raises:
            StartupError: they do not fit the model, are damaged, or there is no memory for both.
        """
        self._beside = None
        with refused_memory("a second copy of the weights", "free memory, or reduce --kv-cache-memory-bytes"):
            config, encoder = self._config.with_weights(model_dir), None
            model = load_model(config, self._shard, self._stage)
            if model.takes_media and self._stage.is_first:
                encoder = import_place(MEDIA_ENCODER)(config)
            uses = [feature.prepare(config, model) for feature in self.features.values()]
            self._beside = LoadedModels(config, model, encoder, uses)

    def commit_weights(self, *, keeps_cache: bool = False) -> None:
        """Use the prepared weights from now on; no step is in flight and there is no row. The KV cache stays allocated.

        Everything that was computed from the old ones, or has their addresses, goes with them, but for blocks of the
        cache with `keeps_cache`.
        """
        beside, self._beside = self._beside, None
        assert beside is not None, "commit_weights() without prepare_weights()"
        dropped = Dropped([self._runner, self._model])
        if self._runner is not None:
            self._runner.read_all()
            self._runner = None
        self._config, self._model, self._encoder, uses = beside
        for use in uses:
            use()
        del beside
        self._give_back(dropped)
        if self._rows is not None:  # its store holds rows of the old weights
            self._rows.close()
            self._rows = import_place(ROW_MOVER)(self._config, self._kv_config, self._shard, self._stage)
            self.rows.use([] if self._copier is None else self._copier.host, self._tensors)
        if self._copier is None:
            self._bind_minimal_cache()
        else:
            assert self._kv_config is not None
            bind_kv_cache(self._models(), self._kv_config, self._tensors)
            self._make_runner(self._kv_config, writes_cache=not keeps_cache)

    def drop_weights(self) -> None:
        """Drop prepared weights, if there are any."""
        self._beside = None
        collect_garbage()
        self._device.memory.give_back()

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """Return the result of a feature's function (`quire.features.WORKER_CALLS`) with this worker."""
        return import_place(WORKER_CALLS[name])(self, *args)

    @property
    def rank(self) -> int:
        """Number among the ranks of its replica."""
        return self._stage.index * self._shard.of + self._shard.rank

    @property
    def shard(self) -> Shard:
        """Tensor-parallel shard."""
        return self._shard

    @property
    def model(self) -> CausalLM:
        """Loaded model."""
        return self._loaded()

    @property
    def encoder(self) -> MediaEncoder | None:
        """Encoder of media with its store; None: the model takes none, or sleeps."""
        return self._encoder

    def shutdown(self) -> None:
        self._beside = None
        super().shutdown()


WAKERS: dict[str, Callable[[Worker], None]] = {
    "weights": Worker._wake_weights,
    "kv_cache": Worker._wake_cache,
}  # wake-up tag -> function
