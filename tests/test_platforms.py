# SPDX-License-Identifier: Apache-2.0
"""Tests of the device that `auto` resolves to, from the files of a driver and the build of torch."""

from __future__ import annotations

from pathlib import Path

from quire.platforms import choose_device
from tests.fixtures.folded import folded

CUDA = "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
ROCM = "cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\nxpu: Optional[str] = None\n"
XPU = "cuda: Optional[str] = None\nhip = None\nxpu: Optional[str] = '20250000'\n"
CPU = "debug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = None\n"


@folded(
    ("files", "build", "environ", "device", "reason"),
    [
        ([], CUDA, {}, "cpu", "no GPU was found"),
        (["dev/nvidia0", "dev/nvidiactl"], CUDA, {}, "cuda", "torch was built for it"),
        (["dev/nvidiactl"], CUDA, {}, "cpu", "no GPU was found"),
        (["dev/nvidia3"], CPU, {}, "cpu", "torch was built without cuda"),
        (["dev/nvidia0"], CUDA, {"CUDA_VISIBLE_DEVICES": ""}, "cpu", "CUDA_VISIBLE_DEVICES hides"),
        (["dev/nvidia0"], CUDA, {"CUDA_VISIBLE_DEVICES": "1"}, "cuda", "torch was built for it"),
        (["dev/kfd", "dev/dri/renderD128"], ROCM, {}, "cuda", "torch was built for it"),
        (["dev/dri/renderD128"], XPU, {}, "xpu", "torch was built for it"),
        (["dev/dri/renderD128"], CPU, {}, "cpu", "torch was built without xpu"),
    ],
)
def test_device(
    files: list[str], build: str, environ: dict[str, str], device: str, reason: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "version.py").write_text(build)
    chosen, why = choose_device(tmp_path, environ, tmp_path)
    assert chosen == device
    assert reason in why


def test_the_installed_torch_is_read() -> None:
    assert choose_device()[0] in ("cpu", "cuda", "xpu")
