# SPDX-License-Identifier: Apache-2.0
"""Faster import of torch, for quire's own processes: a thread maps its library of 400 MB while other modules load.

Invariant: torch-free.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.machinery import PathFinder
from pathlib import Path

_LIBRARY = "libtorch_cpu.so"
_OTHER_DEVICES = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


def preload_library() -> None:
    """Start to map torch's library in a thread; `import torch` waits for the rest of it.

    Applies to CPU builds only: others first load more libraries, in their own order. The process does not end before
    the thread, as static objects must not be created and destroyed at the same time.
    """
    library = _library()
    if library is not None:
        threading.Thread(target=_map_library, args=(library,), name="quire-torch-library").start()


def _library() -> Path | None:
    spec = None if "torch" in sys.modules else PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent / "lib"
    if any((directory / name).exists() for name in _OTHER_DEVICES):
        return None
    library = directory / _LIBRARY
    return library if library.exists() else None


def _map_library(path: Path) -> None:
    """Call dlopen as a foreign function, so that other threads run Python; torch reports a failure."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(os.fsencode(path), os.RTLD_NOW)
