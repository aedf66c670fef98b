"""What an architecture was made for, and which of those in the table computes it.

Invariant: torch-free. A family has one row, that of its language model; its other forms differ in what stands behind
the last norm, which their names' ends say.
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
"""End of an architecture's name -> what it is for."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
_ENDS = dict.fromkeys(_LANGUAGE_MODELS, GENERATES) | KINDS


class Made(NamedTuple):
    """Of an architecture that a checkpoint names."""

    served_as: str
    """The architecture whose row, or class of transformers, computes its hidden states."""
    kind: str
    """One of `KINDS`, or "generate"."""
    is_whole: bool = False
    """Whether its row is its own, and no language model's: it brings what stands behind its hidden states."""


def made_for(architecture: str, model_impl: str = "auto") -> Made:
    """What a checkpoint of this architecture was made for; `model_impl` is that of `ModelConfig`.

    A name that nobody knows is returned as it is: whoever looks it up says so.
    """
    end, kind = next((item for item in _ENDS.items() if architecture.endswith(item[0])), ("", GENERATES))
    if ModelRegistry.has_row(architecture):
        pools = ModelRegistry.pools(architecture)
        return Made(architecture, kind if pools else GENERATES, is_whole=pools)
    stem = architecture.removesuffix(end)
    candidates = [stem + suffix for suffix in _LANGUAGE_MODELS] if kind != GENERATES else []
    for candidate in [*filter(ModelRegistry.has_row, candidates), *candidates]:
        if ModelRegistry.has(candidate, model_impl):
            return Made(candidate, kind)
    return Made(architecture, kind)
