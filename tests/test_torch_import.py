# SPDX-License-Identifier: Apache-2.0
"""torch imported in less time is the same torch: what was deferred runs when it is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import torch_import
from tests.fixtures.tiny_families import TINY_FAMILIES

ROOT = Path(__file__).parents[1]
DEFER = "from quire import torch_import; torch_import.preload_library(); torch_import.defer_modules(); import sys; "
RAN = "; print(*[type(sys.modules[name]).__name__ for name in torch_import.DEFERRED], flush=True)"
NUM = len(torch_import.DEFERRED)
LATER, NOW = " ".join(["_DeferredModule"] * NUM), " ".join(["module"] * NUM)


def run(program: str, *args: str) -> list[str]:
    """Lines that a fresh process prints."""
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("use", "state"),
    [
        ("torch_import.import_deferred()", NOW),
        pytest.param("torch.export.export", NOW, marks=pytest.mark.more),
        ("import torch.export", LATER),
        pytest.param("import torch.export.graph_signature", NOW, marks=pytest.mark.more),
        pytest.param("torch.Generator().manual_seed(1)", NOW, marks=pytest.mark.more),
        pytest.param("torch._refs.abs", NOW, marks=pytest.mark.more),
        ("hasattr(torch, '__path__'); torch.empty(2, device='meta') + 1", LATER),
        ("from quire.plugins import import_place; import_place('json:dumps')", NOW),
    ],
)
def test_deferred_modules_run_when_they_are_used(use: str, state: str) -> None:
    assert run(f"{DEFER}import torch{RAN}; {use}{RAN}") == [LATER, state]


def test_deferred_torch_ends_as_any_other() -> None:
    names = (
        "; print(sorted(vars(torch)), torch.__getattr__.__module__, torch.export.__spec__.loader.__class__)"
    )
    assert run(f"{DEFER}import torch; torch_import.import_deferred(){names}") == run(f"import torch{names}")


def test_meta_kernels_in_python_are_there_on_demand() -> None:
    program = "print(torch.linalg.eigvals(torch.ones(2, 2, device='meta')).shape)"
    assert run(f"{DEFER}import torch; torch_import.import_deferred(); {program}") == ["torch.Size([2])"]


def test_several_threads_may_need_deferred_modules() -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print(*pool.map(lambda seed: torch.Generator().manual_seed(seed).initial_seed(), range(4)))
"""
    assert run(f"{DEFER}import torch\n{program}") == ["0 1 2 3"]


ALL_FAMILIES = """
from quire import LLM, SamplingParams
for model in sys.argv[1:]:
    llm = LLM(model, skip_tokenizer_init=True, device="cpu", max_model_len=64, kv_cache_memory_bytes=2**22)
    (output,) = llm.generate([{"prompt_token_ids": [5, 9, 100, 3]}], SamplingParams(max_tokens=3, logprobs=1))
    print(output.outputs[0].token_ids, output.outputs[0].logprobs)
    llm.shutdown()
"""


@pytest.mark.more
def test_no_family_needs_deferred_modules(tiny_model: Callable[[str], Path]) -> None:
    models = [str(tiny_model(name)) for name in TINY_FAMILIES]
    deferring = run(f"{DEFER}{ALL_FAMILIES}{RAN[2:]}", *models)
    assert deferring == [*run(f"import sys{ALL_FAMILIES}", *models), LATER]


def test_end_before_torch_defers_nothing() -> None:
    assert run(f"{DEFER}torch_import.import_deferred(); import torch{RAN}") == [NOW]


def test_torch_that_is_imported_is_left_alone() -> None:
    before = list(sys.meta_path)
    import torch  # noqa: F401

    torch_import.defer_modules()
    assert sys.meta_path == before
    assert torch_import._library() is None


@pytest.mark.parametrize("name", torch_import._OTHER_DEVICES)
def test_library_of_another_device_is_not_preloaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "lib" / torch_import._LIBRARY).write_text("")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torch_import._library() == package / "lib" / torch_import._LIBRARY
    (package / "lib" / name).write_text("")
    assert torch_import._library() is None


def test_library_that_cannot_be_mapped_costs_nothing(tmp_path: Path) -> None:
    torch_import._map_library(tmp_path / "libtorch_cpu.so")
