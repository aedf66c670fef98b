"""Rewards that a language model says by its own output head: how likely some tokens are behind each step.

Math-Shepherd (Wang et al., 2023, arXiv:2312.08935) is such a model: of a token for a good step and one for a bad one.
Invariant: torch-free.
"""

from __future__ import annotations

from typing import Any

from quire.config.arch import ModelArch
from quire.config.pooling import HeadLayer, PoolingSpec
from quire.errors import ConfigError
from quire.pooling_params import TOKEN_CLASSIFY

_KEY = "returned_token_ids"


def by_output_head(arch: ModelArch, pooler_config: dict[str, Any]) -> tuple[PoolingSpec, dict[str, Any]]:
    """Classes that are tokens, and what else a user says.

    Raises:
        ConfigError: they are no tokens of the model, or its logits are more than a product and a bias.
    """
    tokens = pooler_config[_KEY]
    is_list = isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)
    if not is_list or not all(0 <= token < arch.vocab_size for token in tokens):
        raise ConfigError(
            f"--pooler-config: {_KEY} must be a list of token ids in [0, {arch.vocab_size - 1}], got {tokens!r:.80}"
        )
    if arch.logits_multiplier != 1.0 or arch.final_logit_softcap is not None or arch.head_of_unit_rows:
        raise ConfigError(
            f"--pooler-config: {_KEY} needs logits that are a plain product, and {arch.architecture}'s are scaled"
        )
    head = HeadLayer(
        _name_of(arch),
        arch.word_embed_proj_dim or arch.hidden_size,
        len(tokens),
        bias=arch.head_bias and not arch.tie_word_embeddings,
        rows=tuple(tokens),
        num_stored=arch.vocab_size,
    )
    labels = tuple(map(str, tokens))
    spec = PoolingSpec((TOKEN_CLASSIFY,), "all", len(tokens), labels, "softmax", head=(head,))
    return spec, {key: value for key, value in pooler_config.items() if key != _KEY}


def _name_of(arch: ModelArch) -> str:
    """What the checkpoint calls the output head, or the table that is it."""
    renamed = arch.names.renamed
    parts = ("model", "embed_tokens") if arch.tie_word_embeddings else ("lm_head",)
    return ".".join(filter(None, (renamed.get(part, part) for part in parts)))
