# SPDX-License-Identifier: Apache-2.0
"""Error by quantized activations: as checkpoints ask for it, and as quire does it instead.

    python -m benchmarks.activations [MODEL] [--num-sequences 4] [--num-tokens 48]

Weights stay floats, in transformers, and what linear layers but the head read is rounded by each formula; printed is
the relative error of the logits, ||rounded - exact|| / ||exact||, on text that is drawn from the model. Static scales
are those of the largest magnitude in the same text, so they clip nothing, which is the best that they can be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.accuracy import reference
from quire.config import DEMO_MODEL
from quire.kernels import reference as kernels
from quire.kernels.linear import WeightScheme
from quire.models.checkpoint import resolve_model_dir

Rounding = Callable[[Tensor, Tensor], Tensor]
"""Activations [T, K], and the largest magnitude that their layer was seen to read -> what is multiplied."""


def int8(x: Tensor, largest: Tensor) -> Tensor:
    """By compressed-tensors' formula: half of 255 steps are as long as the largest."""
    scale = largest / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def e4m3(x: Tensor, largest: Tensor) -> Tensor:
    """By the same."""
    scale = largest / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _of_token(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def _ours(kind: str, group: int) -> Rounding:
    """As products with such weights round them in the fast mode."""
    weight = kernels.pack_weight(torch.ones(1, 64), WeightScheme(kind, group))
    return lambda x, _largest: kernels.quantized_input(weight, x)


ROUNDINGS: Mapping[str, Rounding] = {
    "int8, a scale per token": lambda x, _largest: int8(x, _of_token(x)),
    "int8, static": int8,
    "E4M3, a scale per token": lambda x, _largest: e4m3(x, _of_token(x)),
    "E4M3, static": e4m3,
    "quire with int8 weights": _ours("int8", 0),
    "quire with int4 weights": _ours("int4", 32),
}


def measure(model: str, num_sequences: int, num_tokens: int) -> dict[str, float]:
    """The error of each rounding."""
    ids, exact = reference(model, num_sequences, num_tokens)
    factory: Any = AutoModelForCausalLM
    directory = resolve_model_dir(model, None, None)
    network = factory.from_pretrained(directory, dtype=torch.bfloat16).float().eval()
    layers = [
        each for name, each in network.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"
    ]
    largest = dict.fromkeys(layers, torch.zeros(()))

    def logits(rounding: Rounding) -> Tensor:
        def read(layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            assert isinstance(layer, nn.Linear)
            return (rounding(args[0], largest[layer]),)

        hooks = [layer.register_forward_pre_hook(read) for layer in layers]
        try:
            with torch.inference_mode():
                return torch.stack([network(row[None]).logits[0] for row in ids])
        finally:
            for hook in hooks:
                hook.remove()

    def note(layer: nn.Linear, args: tuple[Tensor]) -> None:
        largest[layer] = torch.maximum(largest[layer], args[0].abs().max())

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    logits(lambda x, _largest: x)
    for hook in hooks:
        hook.remove()
    return {
        name: float((logits(rounding) - exact).norm() / exact.norm()) for name, rounding in ROUNDINGS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEMO_MODEL)
    parser.add_argument("--num-sequences", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=48, help="of each sequence")
    args = parser.parse_args()
    for name, error in measure(args.model, args.num_sequences, args.num_tokens).items():
        print(f"{name:28}{error:10.2e}")


if __name__ == "__main__":
    main()
