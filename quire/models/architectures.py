# SPDX-License-Identifier: Apache-2.0
"""Purpose of an architecture by its name, and the registered architecture that computes it.

Invariant: torch-free. A family has one row, its language model's; other forms differ only after the last norm, as
their suffix says.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.models.registry import ModelRegistry

GENERATES = "generate"
KINDS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForProcessRewardModel": "process_reward",
    "ForRewardModel": "reward",
    "ForMaskedLM": "embed",
    "ForPreTraining": "embed",
    "Model": "embed",
}
"""Suffix of an architecture's name -> purpose."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
_ENDS = (
    dict.fromkeys((*_LANGUAGE_MODELS, "MTModel", "EncoderDecoderModel", "UltravoxModel"), GENERATES) | KINDS
)


class ArchitectureKind(NamedTuple):
    """Purpose of an architecture named by a checkpoint."""

    served_as: str
    """Architecture whose row, or transformers class, computes its hidden states."""
    kind: str
    """One of the values of `KINDS`, or "generate"."""
    is_whole: bool = False
    """True if it has a row of its own, which includes everything after the hidden states."""


def architecture_kind(architecture: str, model_impl: str = "auto") -> ArchitectureKind:
    """Return the purpose of an architecture; `model_impl` is that of `ModelConfig`.

    An unknown name is returned as it is; its lookup reports it.
    """
    end, kind = next((item for item in _ENDS.items() if architecture.endswith(item[0])), ("", GENERATES))
    if ModelRegistry.has_row(architecture):
        pools = ModelRegistry.pools(architecture)
        return ArchitectureKind(architecture, kind if pools else GENERATES, is_whole=pools)
    stem = architecture.removesuffix(end)
    candidates = [stem + suffix for suffix in _LANGUAGE_MODELS] if kind != GENERATES else []
    for candidate in [*filter(ModelRegistry.has_row, candidates), *candidates]:
        if ModelRegistry.has(candidate, model_impl):
            return ArchitectureKind(candidate, kind)
    return ArchitectureKind(architecture, kind)
