# SPDX-License-Identifier: Apache-2.0
"""Calls of an executor that features make, beside steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from quire.adapters import AdapterRequest
from quire.errors import ConfigError, ValidationError
from quire.kv_cache.rows import STORE, RowAction, RowResult, RowStoreInfo
from quire.media import EncodeProgress, MediaItem
from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import Vocabulary

Result = TypeVar("Result")


class FeatureCalls(ABC):
    """Base of `Executor`: calls that most executors answer, without effect or with an error where they cannot."""

    def take_part(self) -> None:
        """Take part in a step of other replicas that share experts, without tokens of this replica.

        Called in place of a step; returns when it is done.
        """
        raise NotImplementedError("replicas share no experts in this executor")

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Free the memory of the KV cache, whose content is lost, and at level 2 also that of the weights.

        At level 1 weights are kept in host memory. Parts that sleep as deep already are left alone.
        """

    @abstractmethod
    def wake_up(self, tag: str) -> None:
        """Restore the "weights" or the "kv_cache" (of the same size, empty); the cache after the weights.

        Raises:
            StartupError: they cannot be loaded, or memory does not suffice; they stay asleep.
        """

    def prepare_weights(self, model_dir: str) -> None:
        """Load the weights of another directory beside those in use, on all workers or on none.

        Raises:
            StartupError: they do not fit the model, are damaged, or there is no memory for both.
            ValidationError: this executor cannot.
        """
        raise ValidationError(
            f"{type(self).__name__} cannot replace weights; start the server again with them"
        )

    def commit_weights(self, *, keeps_cache: bool = False) -> None:
        """Use the prepared weights from now on. No step is in flight and there is no row.

        Args:
            keeps_cache: whether requests go on with blocks of the old weights, whose bytes must stay; else the cache
                is empty.
        """
        raise NotImplementedError("prepare_weights() comes first")

    def drop_weights(self) -> None:
        """Drop prepared weights, if there are any."""
        return None

    def call_workers(self, name: str, args: Sequence[Any]) -> list[Any]:
        """Return the result of a feature's function (`quire.features.WORKER_CALLS`) on each worker, as plain data.

        Raises:
            ValidationError: this executor has no worker.
        """
        raise ValidationError(f"{type(self).__name__} has no worker that could be called")

    def use_vocabulary(self, source: Callable[[], Vocabulary]) -> None:
        """Set the source of the model's vocabulary, for requests with a grammar."""
        return None

    def prepare_grammar(self, params: StructuredOutputsParams) -> Future[None]:
        """Compile a constraint in the background; done when a step with it would not block, possibly at once.

        An invalid constraint completes as well, and fails the requests that use it.
        """
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def prepare_adapter(self, request: AdapterRequest) -> Future[None]:
        """Load an adapter in the background; done when a step with it would not block, possibly at once.

        An unusable adapter completes with a ValidationError.
        """
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def drop_adapter(self, key: str) -> None:
        """Unload a prepared adapter everywhere, once the submitted steps have run.

        This includes an unusable one, which some ranks may have.
        """
        return None

    def encode_media(self, items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        """Compute embeddings in this order, once the submitted steps have run, for about `budget_s` seconds.

        Each call gets on by one slice at least; an item may take several calls. The embeddings are kept by digest until
        `drop_media`. An item that cannot be encoded costs only itself.
        """
        return EncodeProgress([], {item.digest: "this executor has no encoder" for item in items}, {})

    def drop_media(self, digests: Sequence[bytes]) -> None:
        """Drop embeddings and unfinished encodings, once the submitted steps have run; unknown digests are ignored."""
        return None

    def open_row_store(self) -> RowStoreInfo:
        """Open the configured store of KV cache rows, and what other engines need, once the cache is allocated.

        Further calls return the same.

        Raises:
            ConfigError: this executor has none, or the store cannot be opened.
        """
        raise ConfigError("--kv-store: this executor cannot move KV cache blocks to a store and back")

    def move_rows(
        self, action: RowAction, rows: Sequence[tuple[bytes, int]], place: str = STORE
    ) -> Future[RowResult]:
        """Start an action on rows of a sequence, (name, host block), head first.

        Actions at one place run in order, beside steps; a `find` may be done at once. A row is done if all ranks found,
        loaded or have stored it.

        Args:
            place: `STORE`, `OFFERS`, or the address of an engine to load from.
        """
        raise NotImplementedError("open_row_store() comes first")

    def run_on_worker(self, function: Callable[[Any], Result]) -> Result:
        """Return the result of a function of the caller's with the worker, between steps.

        What it raises is raised here, and leaves the worker as it was.

        Raises:
            ValidationError: the workers are in other processes.
        """
        raise ValidationError(
            "a function can be called on the worker only if it is in this process (one rank)"
        )
