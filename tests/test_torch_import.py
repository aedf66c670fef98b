# SPDX-License-Identifier: Apache-2.0
"""The library of torch is mapped beside imports, where there is one and it is for CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire import torch_import


def test_torch_after_its_library_was_preloaded_is_whole() -> None:
    program = (
        "from quire.torch_import import preload_library; preload_library(); import torch; "
        "print(torch.randn(2, generator=torch.Generator().manual_seed(1)).shape, torch.ones(2, device='meta').device)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "torch.Size([2]) meta\n"


def test_torch_that_is_imported_is_left_alone() -> None:
    import torch  # noqa: F401

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
