# SPDX-License-Identifier: Apache-2.0
"""Decision whether the output head is tied to the embedding, from the tensors of the checkpoint.

Invariant: torch-free. A stored head that differs from the embedding is used, whatever config.json says.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace

from quire.config.arch import ModelArch
from quire.models.weight_files import StoredTensors

logger = logging.getLogger(__name__)

TIE = "tie_word_embeddings"
TABLE = r"(.*\.)?(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings?)"
"""Names of token embeddings in checkpoints."""


def with_stored_head(arch: ModelArch, stored: StoredTensors, *, may_be_tied: bool) -> ModelArch:
    """Return the arch with `tie_word_embeddings` set to agree with the tensors.

    Args:
        may_be_tied: True if any part of config.json says tied, which counts if no head is stored.
    """
    if not (arch.tie_word_embeddings or arch.foreign_config or may_be_tied):
        return arch
    names = {_name_alone(arch, name): name for name in stored.names}
    head = _tensors_of(arch.names.renamed.get("lm_head", "lm_head"), names)
    table = _tensors_of(_table(names), names)
    if not head and table and may_be_tied and not arch.tie_word_embeddings:
        logger.warning("no output head is stored: the token embedding is used (%s)", TIE)
        return replace(arch, tie_word_embeddings=True)
    if not head or not table or _are_equal(head, table, stored):
        return arch
    if arch.tie_word_embeddings:
        logger.warning(
            "config.json says %s, but the checkpoint has an output head that differs from the embedding: "
            "the stored head is used",
            TIE,
        )
    foreign = arch.foreign_config
    if foreign:
        foreign = json.dumps(json.loads(foreign) | {TIE: False})
    return replace(arch, tie_word_embeddings=False, foreign_config=foreign)


def _name_alone(arch: ModelArch, name: str) -> str:
    return name if arch.part_of is None else arch.part_of.name_alone(name)


def _tensors_of(module: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return a weight's tensors without its bias: name after the module's name -> name in the files.

    Submodules' tensors, as in a head of several layers, are excluded.
    """
    prefix = f"{module}."
    leaves = {name.removeprefix(prefix): own for name, own in names.items() if name.startswith(prefix)}
    return {
        leaf: own
        for leaf, own in leaves.items()
        if module and leaf != "bias" and ("." not in leaf or leaf.startswith("weight."))
    }


def _table(names: Mapping[str, str]) -> str:
    """Return the module of the token embedding: of several candidates (MTP layers have one, too) the outermost."""
    modules = {name.rpartition(".")[0] for name in names if not name.endswith(".bias")}
    found = [module for module in modules if re.fullmatch(TABLE, module)]
    return min(found, key=lambda module: (module.count("."), module), default="")


def _are_equal(head: Mapping[str, str], table: Mapping[str, str], stored: StoredTensors) -> bool:
    if head.keys() != table.keys():
        return False
    pairs = [(stored.find(head[leaf]), stored.find(table[leaf])) for leaf in head]
    return all(one is not None and other is not None and one.equals(other) for one, other in pairs)
