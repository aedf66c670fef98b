# SPDX-License-Identifier: Apache-2.0
"""Fixtures that all tests share, and a fair share of the machine for each of the processes that run tests."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

# Until all tests are collected: the collector would walk all modules again and again, and free almost nothing.
if gc.isenabled():
    gc.disable()
# Before torch is imported: OpenMP threads that spin while they wait starve the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

import httpx
import pytest

if not __debug__:  # what tests stand on has asserts that must count, as those of the tests themselves do
    folders = ("end_to_end", "engine", "entrypoints", "fixtures", "kv_cache", "reliability", "scheduler")
    pytest.register_assert_rewrite(*(f"tests.{folder}" for folder in folders))

from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.fixtures import invariants as begun
from tests.fixtures.entry_points import offer as offer
from tests.fixtures.invariants import invariants as invariants
from tests.fixtures.invariants import last_look as last_look
from tests.fixtures.pooling import pair_model_dir as pair_model_dir
from tests.fixtures.pooling import pools as pools
from tests.fixtures.threads import restore_threads as restore_threads
from tests.fixtures.tiny_encoders import write_tiny_encoder
from tests.fixtures.tiny_models import write_tiny_model
from tests.kernels import triton_interpreter

collect_ignore = ["clients"]  # needs packages of its own: `make clients`
triton_interpreter.start()
begun.watch()
# The same examples in every run, however slow the machine; a test that wants more than these says so.
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("quick")
# Hypothesis also draws numbers and texts that it finds in the sources of loaded modules. Which modules a process has
# loaded depends on the tests that it ran before, so without this the examples would differ from run to run.
assert callable(providers._get_local_constants), "Hypothesis takes constants from elsewhere now: pin those"
providers._get_local_constants = lambda: providers._local_constants
# A busy machine answers late: where a test gives no timeout, httpx's 5 s shall not be its deadline.
_PATIENCE = httpx._config.DEFAULT_TIMEOUT_CONFIG
_PATIENCE.connect = _PATIENCE.read = _PATIENCE.write = _PATIENCE.pool = 300.0
assert httpx.Client().timeout == httpx.Timeout(300.0), "httpx takes its default from elsewhere now: set that"
# A shell gives its background jobs an ignored Ctrl-C, which tests of interrupts cannot do with.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        gc.enable()  # other processes collect and run the tests


def pytest_collection_finish() -> None:
    """Exempt the objects that exist after collection from garbage collections, such as each sleep of an engine runs.

    Automatic ones are rarer than by default, as they took up to a tenth of the processor time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    """Extensions say at the end what of theirs is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A test that sets up the log, as a command does, leaves it as it was for those that run after it."""
    log = logging.getLogger("quire")
    level, handlers = log.level, log.handlers[:]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of `TINY_MODELS` -> directory of that checkpoint, written once in a run; do not change its files."""
    return _written_once(tmp_path_factory, "tiny-models", write_tiny_model)


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same for `TINY_ENCODERS`."""
    return _written_once(tmp_path_factory, "tiny-encoders", write_tiny_encoder)


def _written_once(
    factory: pytest.TempPathFactory, folder: str, write: Callable[[str, Path], Path]
) -> Callable[[str], Path]:
    """Return a function that gives a checkpoint's directory; the first process that asks for one writes it."""
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / folder
    shared.mkdir(exist_ok=True)

    def directory(name: str) -> Path:
        finished = shared / f"{name}.finished"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            if not finished.exists():
                write(name, shared / name)
                finished.touch()
        return shared / name

    return directory
