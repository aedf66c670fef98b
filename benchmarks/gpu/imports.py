"""Which packages a run needs and does not find, said before the first second of a GPU is spent."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

KERNELS = ("torch", "triton", "numpy")
MODELS = (*KERNELS, "tqdm", "tokenizers", "transformers", "safetensors")
ENGINE = (*KERNELS, "tqdm", "tokenizers", "huggingface_hub", "msgspec", "zmq")
ADAPTERS = (*ENGINE, "safetensors")
_DISTRIBUTIONS = {"zmq": "pyzmq"}
"""Of packages that are installed by another name."""


def missing(packages: Sequence[str]) -> list[str]:
    """Those that cannot be imported; nothing is imported to find out."""
    return [package for package in packages if find_spec(package) is None]


def advice(packages: Sequence[str]) -> str:
    """How to get them, for people."""
    names = " ".join(_DISTRIBUTIONS.get(package, package) for package in packages)
    return f"missing: {names}. Install them, or put their wheels on PYTHONPATH: pip install --target site {names}"
