# SPDX-License-Identifier: Apache-2.0
"""Report of missing packages, before the first second of a GPU is spent."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

KERNELS = ("torch", "triton", "numpy")
MODELS = (*KERNELS, "tqdm", "tokenizers", "transformers", "safetensors")
ENGINE = (*KERNELS, "tqdm", "tokenizers", "huggingface_hub", "msgspec", "zmq")
ADAPTERS = (*ENGINE, "safetensors")
_DISTRIBUTIONS = {"zmq": "pyzmq"}
"""Of packages that are installed by another name."""
ORACLE = "5.23"
"""The version of transformers that models were compared with."""


def missing(packages: Sequence[str]) -> list[str]:
    """Those that cannot be imported; nothing is imported to find out."""
    return [package for package in packages if find_spec(package) is None]


def advice(packages: Sequence[str]) -> str:
    """Return a message that says how to install the packages."""
    names = " ".join(_DISTRIBUTIONS.get(package, package) for package in packages)
    return f"missing: {names}. Install them, or put their wheels on PYTHONPATH: pip install --target site {names}"


def older_oracle() -> str | None:
    """Return a warning if transformers is too old to be the oracle of some models, or else None."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return None
    from packaging.version import Version  # comes with transformers

    if Version(found) >= Version(ORACLE):
        return None
    return (
        f"transformers {found} is older than {ORACLE}, and so no oracle for models that it had otherwise or not: "
        "see whether what fails does so beside it on a CPU"
    )
