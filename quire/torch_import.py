# SPDX-License-Identifier: Apache-2.0
"""Faster import of torch, for quire's own processes.

`import torch` maps a library of 400 MB while nothing else runs, and runs modules that only tracing and meta tensors of
some operators need. Here a thread maps the library, and the modules in `DEFERRED` run later: on use, on import of a
module that may rely on them, before the code of a plug-in, or at `import_deferred`.
Invariant: torch-free. An access to a deferred module, or to a name that they add to torch, finds it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from quire.processes import uncollected

DEFERRED = ("torch._meta_registrations", "torch.export", "torchgen.model")
"""Modules that run later. The first imports the operators, decompositions and meta kernels written in Python."""
_GENERATOR = "Generator"
"""Class of torch that cannot be called before modules that the Python operators import have run."""
_AT_EASE = frozenset({"torch.utils._device"})
"""Modules that torch imports itself when used, without need of the deferred ones."""
_USERS = frozenset({"torch", "torchvision", "transformers", "triton"})
"""Packages whose modules may trace, or compute with meta tensors."""
_OTHER_LIBRARIES = (
    *("asyncio", "hashlib", "mmap", "multiprocessing.connection", "queue", "statistics"),
    *("msgspec", "numpy", "tokenizers", "zmq"),
)
"""Modules with libraries that quire imports before torch."""
_RUNNING = threading.RLock()
"""Held while deferred modules run."""
_LIBRARY = "libtorch_cpu.so"
_OTHER_DEVICES = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


@contextmanager
def hastened_import() -> Iterator[None]:
    """Import torch and what stands on it in less time; for quire's own processes, as no garbage is collected.

    No effect if torch is imported: then a program calls the command.
    """
    if "torch" in sys.modules:
        yield
        return
    with uncollected():
        begin_torch()
        yield


def begin_torch() -> None:
    """Map torch's library in a thread, and defer modules of `import torch`; no effect if torch is imported.

    The other libraries that quire needs come first: the loader has one lock, which they would wait for.
    """
    if "torch" not in sys.modules:
        for name in _OTHER_LIBRARIES:
            import_module(name)
        preload_library()
        defer_modules()


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
    """Run the deferred modules, if any; a thread that needs them while another runs them waits."""
    with _RUNNING:
        for finder in [finder for finder in sys.meta_path if isinstance(finder, _Deferring)]:
            finder.end()


class _Deferring(MetaPathFinder):
    """Finder of deferred modules, until they run."""

    def __init__(self) -> None:
        self._modules: list[ModuleType] = []
        self._restore: Callable[[], None] = _nothing

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in DEFERRED:
            return self._wrapped(name, path, self._modules.append)
        if name == "torch":
            return self._wrapped(name, path, self._torch_imported)
        if _relies_on_deferred(name) and not _is_initializing("torch"):  # a build for GPUs looks for triton
            import_deferred()
        return None

    def end(self) -> None:
        """Remove this finder, as the modules import others, and run them."""
        sys.meta_path.remove(self)
        for module in self._modules:
            _run(module)
        self._restore()

    def _wrapped(
        self, name: str, path: Sequence[str] | None, then: Callable[[ModuleType], None]
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _WrappedLoader(spec.loader, then, runs=name == "torch")
        return spec

    def _torch_imported(self, torch: ModuleType) -> None:
        """Take names out of torch that need the deferred modules, until they run."""
        names = vars(torch)
        own, generator = names.get("__getattr__"), names.pop(_GENERATOR)

        def get(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(f"module 'torch' has no attribute {name!r}")
            import_deferred()
            if name == _GENERATOR:
                return generator
            if name not in names and own is not None:
                return own(name)
            return names[name]

        def restore() -> None:
            names[_GENERATOR] = generator
            if own is None:
                del names["__getattr__"]
            else:
                names["__getattr__"] = own

        names["__getattr__"], self._restore = get, restore


def _nothing() -> None:
    """Do nothing."""


class _WrappedLoader(Loader):
    """Loader that runs a module and hands it on, or one that hands it on to be run later by its own loader."""

    def __init__(self, own: Loader, then: Callable[[ModuleType], None], *, runs: bool) -> None:
        self.own = own
        self._then = then
        self._runs = runs

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._runs:
            _adopt(module)
            self.own.exec_module(module)
        else:
            module.__class__ = _DeferredModule
        self._then(module)


class _DeferredModule(ModuleType):
    """Module that runs at the first access to a missing attribute."""

    def __getattr__(self, name: str) -> object:
        if not name.startswith("__"):
            with _RUNNING:
                import_deferred()
                _run(self)  # if another one that is running needs it
            if type(self) is ModuleType:
                return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _run(module: ModuleType) -> None:
    """Run a deferred module, unless it was begun."""
    loader = module.__loader__
    if isinstance(loader, _WrappedLoader):
        _adopt(module)
        loader.own.exec_module(module)
        module.__class__ = ModuleType


def _adopt(module: ModuleType) -> None:
    """Give a module its own loader back, which also finds its source and resources."""
    spec = module.__spec__
    assert spec is not None
    assert isinstance(spec.loader, _WrappedLoader)
    spec.loader = module.__loader__ = spec.loader.own


def _relies_on_deferred(name: str) -> bool:
    """Return whether a module is in a deferred package, or in one that may trace and is not being imported itself."""
    package = name.partition(".")[0]
    if name.rpartition(".")[0] in DEFERRED or package in _USERS:
        return name not in _AT_EASE and not _is_initializing(package)
    return False


def _is_initializing(package: str) -> bool:
    module = sys.modules.get(package)
    return module is not None and getattr(module.__spec__, "_initializing", False)
