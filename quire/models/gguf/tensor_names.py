"""What GGUF calls tensors, and where these are in our tree of modules.

Invariant: data only. All architectures share most names, so none of a family's own names is needed for such files: what
differs from `SHARED` stands with the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Place:
    """Where a tensor goes, if it is not as the files of a family have it."""

    name: str
    flat: bool = False
    """Whether GGUF has more than one dimension and the family one."""
    new_axis: int | None = None
    """A dimension of 1 that GGUF leaves out, and put in when it is flat."""
    rows: bool = False
    """Whether GGUF has a matrix for each head, and the family all their rows in one."""
    made_by: str | None = None
    """What made the file's numbers of the family's; a key of `tensors.UNDONE`."""
    apart: bool = False
    """Whether GGUF has in one tensor what the family has in several, whose numbers stand for `{}` in the name."""

    @property
    def module(self) -> str:
        """What modules of the family the tensor is of: a regular expression."""
        name = re.escape(self.name.removesuffix(".weight"))
        return name.replace(re.escape("{}"), r"\d+") if self.apart else name

    def member(self, number: int) -> Place:
        """One of what GGUF has in one tensor."""
        return replace(self, name=self.name.format(number), apart=False)


Places = Mapping[str, str | Place]
Listed = Mapping[str, tuple[str, tuple[int, ...]]]
"""A key of the metadata, whose list has a number for each layer -> the parameter, less its layer, and its shape."""

SHARED: Places = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": Place("mlp.shared_expert_gate", flat=True, new_axis=0),
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""A tensor, less its layer and ".weight" or ".bias" -> its module, less the layer."""

SANDWICH: Places = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of blocks with norms around attention and around the MLP."""

AROUND: Places = {"post_attention_norm": "post_attention_layernorm"}
"""Of blocks whose second norm has that name, though it stands before the MLP."""
MERGED_MLP: Places = {"ffn_up": "mlp.gate_up_proj"}

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_PARAMETER = re.compile(r"(.+)(\.weight|\.bias)")


def place_of(name: str, own: Places) -> Place:
    """Where a tensor goes, by an architecture's own places and those that all share; under its own name, if nowhere."""
    match = _LAYER.fullmatch(name)
    around, inner = (f"model.layers.{match[1]}.", match[2]) if match else ("", name)
    parameter = _PARAMETER.fullmatch(inner)
    module, suffix = (parameter[1], parameter[2]) if parameter else (inner, "")
    for key, ending in ((inner, ""), (module, suffix)):
        found = own.get(key, SHARED.get(key))
        if found is not None:
            place = Place(found) if isinstance(found, str) else found
            return replace(place, name=around + place.name + ending)
    return Place(name)
