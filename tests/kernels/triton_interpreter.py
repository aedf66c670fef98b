"""Runs the GPU kernels on a CPU, in Triton's interpreter."""

import pytest

from quire.kernels import cpu, ops, triton


def use_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the table of ops choose, for tensors on the CPU, what it chooses on a GPU."""
    monkeypatch.setattr(triton, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(cpu, "supports", lambda dtype: False)
    for op in ops.TABLE.values():
        monkeypatch.setattr(op, "_functions", {})


def use_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the table choose the oracle of every op."""
    use_gpu_kernels(monkeypatch)
    monkeypatch.setattr(triton, "DEVICE_TYPES", ())
