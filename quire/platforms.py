"""Which kinds of devices this machine has that the installed torch can use, found out without importing torch.

Invariant: a kind is offered only if its driver shows a device and torch was built for it. Whether the driver really
works is seen when the worker starts the device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Platform(NamedTuple):
    """One kind of device, under torch's name for it."""

    name: str
    builds: tuple[str, ...]
    """Fields of torch/version.py, one of which is set in a build for this kind."""
    device_files: tuple[str, ...]
    """Patterns below the root directory, one of which matches if there is a device."""
    visibility: tuple[str, ...]
    """Environment variables that can hide the devices."""


GPUS = (
    Platform(
        "cuda",
        ("cuda", "hip"),
        ("dev/nvidia[0-9]*", "dev/dxg", "dev/kfd"),
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    ),
    Platform("xpu", ("xpu",), ("dev/dri/renderD*",), ("ZE_AFFINITY_MASK",)),
)
"""In the order in which `auto` prefers them; before the CPU. ROCm calls itself cuda in torch."""


def choose_device(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ, torch_dir: Path | None = None
) -> tuple[str, str]:
    """The kind of device that `auto` stands for, and the reason.

    Args:
        root: where /dev is; tests put their own there.
        torch_dir: the torch package; None: the installed one.
    """
    builds = _torch_builds(torch_dir or _installed_torch())
    reasons = []
    for platform in GPUS:
        if not any(True for pattern in platform.device_files for _ in root.glob(pattern)):
            continue
        hidden = [name for name in platform.visibility if environ.get(name, "0") in ("", "-1")]
        if hidden:
            reasons.append(f"{hidden[0]} hides the {platform.name} devices")
        elif not builds & set(platform.builds):
            reasons.append(f"torch was built without {platform.name}")
        else:
            return platform.name, "the driver shows a device, and torch was built for it"
    return "cpu", "; ".join(reasons) or "no GPU was found"


def _installed_torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None, "torch is a dependency of quire"
    assert spec.origin is not None, "torch is no namespace package"
    return Path(spec.origin).parent


def _torch_builds(torch_dir: Path) -> set[str]:
    """Fields of torch/version.py that name what it was built for: lines such as `cuda: Optional[str] = '13.0'`."""
    text = (torch_dir / "version.py").read_text()
    return {match[1] for match in re.finditer(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]", text, re.MULTILINE)}
