"""Faster import of torch, for quire's own processes.

`import torch` runs code that inference never reaches, and maps a library of 400 MB while nothing else runs. Here a
thread maps the library, and modules in `DEFERRED` run later: on use, on import of a module that may rely on them, or
at `import_deferred`.
Invariant: torch-free. An access to a deferred module finds all its attributes.
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

# Not among them are the Python meta kernels: `torch.Generator` needs a module that they import.
DEFERRED = ("torch.export",)
_AT_EASE = frozenset({"torch.utils._device"})
"""Modules that torch imports itself when used, without need of the deferred ones."""
_USERS = frozenset({"torch", "torchvision", "transformers", "triton"})
"""Packages whose modules may trace, or compute with meta tensors."""
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


def defer_modules() -> None:
    """Make the next `import torch` skip the modules of `DEFERRED`; no effect if torch is imported."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Deferring())


def import_deferred() -> None:
    """Run the deferred modules, if any."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Deferring)]:
        finder.end()


class _Deferring(MetaPathFinder):
    """Finder of deferred modules, until they run."""

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
        """Remove this finder, as the modules import others, and run them."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._modules:
            _run(self._modules.pop(0))

    def _deferred(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferredLoader(spec.loader, self._modules)
        return spec


class _DeferredLoader(Loader):
    """Loader that creates a module, which its own loader runs later."""

    def __init__(self, own: Loader, modules: list[ModuleType]) -> None:
        self.own = own
        self._modules = modules

    def create_module(self, spec: ModuleSpec) -> None:
        """Use Python's default module."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _DeferredModule
        self._modules.append(module)


class _DeferredModule(ModuleType):
    """Module that runs at the first access to a missing attribute."""

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
    """Return whether a module is in a deferred package, or is imported after torch and may trace."""
    if name.rpartition(".")[0] in DEFERRED:
        return True
    torch = sys.modules.get("torch")
    is_there = torch is not None and not getattr(torch.__spec__, "_initializing", False)
    return is_there and name.partition(".")[0] in _USERS and name not in _AT_EASE
