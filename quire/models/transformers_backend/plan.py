"""How several ranks share a model of transformers: by the plan that transformers keeps for its modules.

A plan names modules, and parameters, with `*` for numbers, and says of each how it is cut. Two ways cut a matrix: by
outputs, and by inputs. In the others a rank has all of it, which is what its code computes with by itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from transformers import PreTrainedModel

from quire.layers.shard import Cut, Span

_BY_OUTPUT, _BY_INPUT = {"colwise", "packed_colwise"}, {"rowwise"}
_WHOLE = {
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
    "rowwise_rep",
    "rowwise_split_input",
}
"""Ways in which what goes in and what comes out is all there, or of modules that have no tensor of their own."""


class Plan:
    """What each matrix of one model states about ranks.

    `attends` has the key-value heads of each module that attends, under its path, once they have been found: what is
    made for such a module is cut by them, and so queries stay with the keys that they read.
    """

    def __init__(self, ways: Mapping[str, str]) -> None:
        self._ways = dict(ways)
        self.attends: dict[str, int] = {}
        self._cut: set[str] = set()

    @staticmethod
    def of(model: PreTrainedModel) -> Plan:
        """The plan of the installed version."""
        return Plan(model.tp_plan or {})

    def cut(self, path: str) -> Cut:
        """How the matrix of a module, or a parameter that is one, is cut; whoever asks sees to it."""
        way = self._ways.get(_generic(path))
        if way in _BY_OUTPUT | _BY_INPUT:
            self._cut.add(_generic(path))
        return "output" if way in _BY_OUTPUT else "input" if way in _BY_INPUT else "whole"

    def spans(self, path: str, spans: Sequence[Span]) -> list[Span]:
        """The outputs of a matrix in units that stay together."""
        heads = next((self.attends[parent] for parent in _parents(path) if parent in self.attends), 1)
        if heads == 1 or self.cut(path) != "output":
            return list(spans)
        return [Span(heads, span.size // heads) if span.size % heads == 0 else span for span in spans]

    def shares_heads(self, path: str) -> bool:
        """Whether ranks have some of the heads each of a module that attends."""
        inside = f"{_generic(path)}."
        return any(name.startswith(inside) and way in _BY_OUTPUT for name, way in self._ways.items())

    def why_not(self, held: Collection[str]) -> str | None:
        """What of the plan cannot be followed, for people, with these parameters kept whole; None: all can."""
        if not self._ways:
            return "the installed version has no plan by which its matrices are cut"
        known = _BY_OUTPUT | _BY_INPUT | _WHOLE
        unknown = sorted({way for way in self._ways.values() if way not in known})
        if unknown:
            return f"its plan cuts in ways that are not known here: {', '.join(unknown)}"
        whole = sorted({_generic(name) for name in held if self._is_cut(name)} - self._cut)
        if whole:
            return f"its plan cuts what is no matrix of ours: {', '.join(whole)}"
        return None

    def _is_cut(self, name: str) -> bool:
        """Whether it should be; experts that are computed by themselves are right as a whole, too."""
        module = name.rpartition(".")[0]
        ways = {self._ways.get(_generic(path)) for path in (name, module)}
        return bool(ways & (_BY_OUTPUT | _BY_INPUT)) and "moe_tp_experts" not in ways


def _generic(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _parents(path: str) -> list[str]:
    """The paths of the modules around one, innermost first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
