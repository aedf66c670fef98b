# SPDX-License-Identifier: Apache-2.0
"""Experts of families with one tensor for a layer's experts, in checkpoints that split or rename it.

Invariant: torch-free; only names are read from the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from quire.config.arch import ExpertsArch, ExpertStack, ModelArch

_ONE_OF_MANY = re.compile(r"\.experts\.\d+\.")
_IN_A_STACK = re.compile(r"\.experts\.gate_up_proj$")
"""Form that transformers computes with, and stores on demand."""
_OF_A_LIST = re.compile(r"\.experts\.\w+_projs\.\d+\.")
_FULL_NAME = re.compile(r"\.experts\.\w+_proj_weight_\w+$")


def as_stored(arch: ModelArch, names: Sequence[str]) -> ModelArch:
    """Return the model with its experts in stacks or one by one, as tensors of these names have them."""
    experts = arch.experts
    if experts is None:
        return arch
    if experts.stack is None:
        if not any(_IN_A_STACK.search(name) for name in names):
            return arch
        return replace(arch, experts=replace(experts, stack=ExpertStack(gate_up="gate_up_proj", weight="")))
    if any(_ONE_OF_MANY.search(name) for name in names):
        return replace(arch, experts=replace(experts, stack=None))
    if experts.alternates and any(_OF_A_LIST.search(name) for name in names):
        return _in_lists(arch, experts, names)
    full_names = any(_FULL_NAME.search(name) for name in names)
    return replace(arch, experts=replace(experts, stack=replace(experts.stack, full_names=full_names)))


def _in_lists(arch: ModelArch, experts: ExpertsArch, names: Iterable[str]) -> ModelArch:
    """Return the model with Unsloth's lists of experts and linear routers; adapters use transformers' names."""
    called, router = arch.names, arch.names.renamed.get("gate", "gate")
    if any(f".{router}.linear.weight" in name for name in names):
        renamed = {**called.renamed, "gate": f"{router}.linear"}
        called = replace(called, renamed=renamed, adapters=called.adapters or called)
    return replace(arch, names=called, experts=replace(experts, stack=None, listed=True))
