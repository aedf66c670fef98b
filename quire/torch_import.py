"""Import of torch in less time, for processes that are quire's own.

`import torch` runs code that inference never reaches, and maps a library of 400 MB while nothing else happens. Here the
library is mapped by a thread, and modules in `DEFERRED` run later: when one is used, when something is imported that
may rely on them, or at `import_deferred`.
Invariant: torch-free. Whoever looks at a deferred module finds all that is in it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

DEFERRED = ("torch._meta_registrations", "torch.export")
"""A fifth of the import: meta kernels written in Python, with the decompositions behind them, and `torch.export`."""
_AT_EASE = frozenset({"torch.utils._device"})
"""Modules that torch imports by itself when it is used, and that need nothing of the deferred ones."""
_USERS = frozenset({"torch", "torchvision", "transformers", "triton"})
"""Packages whose modules may trace, or compute with meta tensors."""
_LIBRARY = "libtorch_cpu.so"
_OTHER_DEVICES = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


def preload_library() -> None:
    """Begin to map torch's library in a thread; `import torch` waits for the rest of it.

    Only builds for CPUs: others load libraries of their own before, in an order that is theirs to say. The process
    does not end before the thread does, as static objects must not be made and destroyed at the same time.
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
    """Call dlopen as a foreign function, during which other threads run Python; a failure is torch's to report."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(os.fsencode(path), os.RTLD_NOW)


def defer_modules() -> None:
    """Let the next `import torch` leave out the modules of `DEFERRED`; without effect if torch is imported."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Deferring())


def import_deferred() -> None:
    """Run what was deferred, if anything was."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Deferring)]:
        finder.end()


class _Deferring(MetaPathFinder):
    """Finds deferred modules, until they run."""

    def __init__(self) -> None:
        self._modules: list[ModuleType] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in DEFERRED:
            return self._deferred(PathFinder.find_spec(name, path, target))
        if _relies_on_deferred(name):
            self.end()
        return None

    def end(self) -> None:
        """Run the modules; this finder is gone before, as they import others."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._modules:
            _run(self._modules.pop(0))

    def _deferred(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferredLoader(spec.loader, self._modules)
        return spec


class _DeferredLoader(Loader):
    """Makes a module and leaves it to be run later by its own loader."""

    def __init__(self, own: Loader, modules: list[ModuleType]) -> None:
        self.own = own
        self._modules = modules

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave that to Python."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _DeferredModule
        self._modules.append(module)


class _DeferredModule(ModuleType):
    """A module that has not run: it does when something is asked of it."""

    def __getattr__(self, name: str) -> object:
        import_deferred()
        _run(self)
        return getattr(self, name)


def _run(module: ModuleType) -> None:
    spec = module.__spec__
    if spec is not None and isinstance(spec.loader, _DeferredLoader):
        module.__class__ = ModuleType
        spec.loader = module.__loader__ = spec.loader.own
        spec.loader.exec_module(module)


def _relies_on_deferred(name: str) -> bool:
    """Whether it is a module of a deferred package, or is imported after torch was and may trace."""
    if name.rpartition(".")[0] in DEFERRED:
        return True
    torch = sys.modules.get("torch")
    is_there = torch is not None and not getattr(torch.__spec__, "_initializing", False)
    return is_there and name.partition(".")[0] in _USERS and name not in _AT_EASE
