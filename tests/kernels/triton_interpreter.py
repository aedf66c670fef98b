"""Runs the GPU kernels on a CPU: to be imported before any module of `quire.kernels.triton`."""

import os

os.environ["TRITON_INTERPRET"] = "1"
