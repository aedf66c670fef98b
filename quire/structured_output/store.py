# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled grammars by constraint.

Invariant: the cache is bounded in bytes, and recompiling gives the same grammar. One background thread compiles; a
constraint that cannot be compiled is cached like one that can.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from quire.structured_output.backend import Grammar, GrammarBackend, GrammarError, Matcher
from quire.structured_output.backends import resolve_backend
from quire.structured_output.vocabulary import MaskBudget
from quire.structured_outputs_params import MiB, StructuredOutputsParams, StructuredOutputsSettings
from quire.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

BASE_BYTES = 192 * 1024
BYTES_PER_BYTE = 64
"""Upper estimate of a compiled grammar's memory: a base, plus so much per byte of its text."""
COMPILE_NICENESS = 10


class GrammarStore:
    """Compiled grammars of one model.

    Args:
        settings: backend and cache size.
        limits_time: fail texts that spend their mask budget; at most one of the ranks that sample the same tokens may.
    """

    def __init__(self, settings: StructuredOutputsSettings, *, limits_time: bool = True) -> None:
        self._settings = settings
        self._limits_time = limits_time
        self._budgets: WeakValueDictionary[str, MaskBudget] = WeakValueDictionary()
        self._source: Callable[[], Vocabulary] | None = None
        self._backend: GrammarBackend | None = None
        self._kept: OrderedDict[bytes, Grammar | GrammarError] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._making_backend = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def use_vocabulary(self, source: Callable[[], Vocabulary]) -> None:
        """Set the source of the model's tokens, called when the first grammar needs them."""
        self._source = source

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of the cache."""
        return self._num_bytes

    def prepare(self, params: StructuredOutputsParams) -> Future[None]:
        """Compile in the background; done when `matcher` will be fast, perhaps at once."""
        done: Future[None] = Future()
        if self._find(params.key) is not None:
            done.set_result(None)
            return done
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "quire-grammars", initializer=_lower_priority)
        return self._thread.submit(self._prepare, params)

    def matcher(self, params: StructuredOutputsParams, *, shared: bool = True) -> Matcher:
        """Return a matcher at the start of a text.

        Raises:
            GrammarError: the constraint cannot be compiled.
        """
        return self._compiled(params).new_matcher(shared=shared)

    def budget(self, params: StructuredOutputsParams, request: str) -> MaskBudget | None:
        """Return the budget of the request of a new text; None: time is not limited here."""
        if not self._limits_time:
            return None
        account = self._budgets.get(request)
        if account is None:
            account = self._budgets[request] = MaskBudget(params, self._settings.mask_time_ms)
        account.add_text()
        return account

    def renew(self, params: StructuredOutputsParams) -> None:
        """Drop a grammar whose shared states are exhausted; its users keep it."""
        with self._lock:
            self._drop(params.key)

    def close(self) -> None:
        """Stop background compiling; idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, params: StructuredOutputsParams) -> None:
        try:
            self._compiled(params)
        except GrammarError as error:
            logger.info("cannot compile a grammar: %s", error)

    def _compiled(self, params: StructuredOutputsParams) -> Grammar:
        found = self._find(params.key)
        if found is None:
            found = self._compile(params)
            self._keep(params.key, found)
        if isinstance(found, GrammarError):
            raise found
        return found

    def _compile(self, params: StructuredOutputsParams) -> Grammar | GrammarError:
        try:
            return self._loaded_backend().compile(params)
        except GrammarError as error:
            return GrammarError(
                str(error), exhausted=error.exhausted
            )  # without the traceback, which keeps frames alive
        except Exception:  # fails the requests that need it, not the core
            logger.exception("compiling a grammar failed")
            return GrammarError("grammars cannot be compiled here; see the server's log")

    def _loaded_backend(self) -> GrammarBackend:
        with self._making_backend:
            if self._backend is None:
                assert self._source is not None, "use_vocabulary comes first"
                self._backend = resolve_backend(self._settings.backend)(self._source())
            return self._backend

    def _find(self, key: bytes) -> Grammar | GrammarError | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: bytes, found: Grammar | GrammarError) -> None:
        """Cache a result; the newest is always kept, whatever its size."""
        with self._lock:
            self._drop(key)
            self._kept[key] = found
            self._num_bytes += _cost(key)
            while self._num_bytes > self._settings.cache_mb * MiB and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: bytes) -> None:
        if self._kept.pop(key, None) is not None:
            self._num_bytes -= _cost(key)


def _cost(key: bytes) -> int:
    return BASE_BYTES + BYTES_PER_BYTE * len(key)


def _lower_priority() -> None:
    """Lower the priority of this thread, where the system supports it."""
    if hasattr(os, "setpriority"):
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
        except OSError as error:
            logger.debug("cannot lower the priority of the compile thread: %s", error)
