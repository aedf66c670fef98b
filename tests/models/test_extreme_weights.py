# SPDX-License-Identifier: Apache-2.0
"""Weights of any magnitude, and some that are no numbers, rounded while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelLoadError
from quire.models.weight_files import SINGLE_NAME
from tests.models.harness import load_tiny, logits_of

SEQUENCES = [[1, 5, 9, 3, 7, 2, 8], [4, 4, 6]]
UP, DOWN = "mlp.up_proj.weight", "mlp.down_proj.weight"
Change = Callable[[str, Tensor], Tensor]


def changed(source: Path, target: Path, change: Change) -> Path:
    """Return a copy of a checkpoint, with its tensors as `change` makes them of their names and values."""
    target.mkdir()
    for path in source.iterdir():
        if path.name != SINGLE_NAME:
            (target / path.name).write_bytes(path.read_bytes())
    tensors = {name: change(name, tensor) for name, tensor in load_file(source / SINGLE_NAME).items()}
    save_file(tensors, target / SINGLE_NAME)
    return target


def logits(model_dir: Path, **options: object) -> Tensor:
    """Return the logits of all positions of both sequences: [10, V]."""
    return torch.cat(logits_of(load_tiny(model_dir, **options), SEQUENCES, chunk_sizes=[4]))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("exponent", [-60, -30, 30, 60])
def test_int_weights_of_any_magnitude_answer_as_usual_ones(
    quantization: str, exponent: int, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """A power of two that one matrix gains and the next one loses changes nothing in float32."""
    factors = {UP: 2.0**exponent, DOWN: 2.0**-exponent}

    def scaled(name: str, tensor: Tensor) -> Tensor:
        return tensor * factors.get(".".join(name.split(".")[-3:]), 1.0)

    plain = tiny_model("llama")
    extreme = changed(plain, tmp_path / "extreme", scaled)
    truth = logits(plain)
    torch.testing.assert_close(logits(extreme), truth, rtol=1e-4, atol=1e-5)
    usual, found = (logits(each, quantization=quantization) for each in (plain, extreme))
    error = (usual - truth).norm()
    assert (found - truth).norm() < 1.1 * error
    assert (
        found - usual
    ).norm() < 0.75 * error  # scales of extreme weights have a wider type, with fewer digits


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["layers.1.self_attn.k_proj.weight", "layers.0.mlp.down_proj.weight"])
def test_int_weights_that_are_not_finite_are_refused(
    quantization: str, bad: float, where: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    def spoilt(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(where):
            tensor[3, 5] = bad
        return tensor

    broken = changed(tiny_model("llama"), tmp_path / "broken", spoilt)
    with pytest.raises(ModelLoadError, match=rf"{where} holds NaN, infinity or numbers too large for int\d"):
        load_tiny(broken, quantization=quantization)


def test_experts_of_which_one_has_tiny_weights_answer_as_usual(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """Kernels read scales of one type, which is that of the expert that needs the widest."""

    def scaled(name: str, tensor: Tensor) -> Tensor:
        return tensor * (
            2.0**-30 if ".experts.1.up_proj" in name else 2.0**30 if ".experts.1.down" in name else 1
        )

    plain = tiny_model("qwen3moe")
    extreme = changed(plain, tmp_path / "extreme", scaled)
    truth, usual, found = (
        logits(plain),
        logits(plain, quantization="int8"),
        logits(extreme, quantization="int8"),
    )
    assert (found - truth).norm() < 1.5 * (usual - truth).norm()
