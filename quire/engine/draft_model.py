"""Config of a draft model, and the check that its tokens have the ids of the target's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.config import EngineConfig
from quire.config.device import ParallelConfig
from quire.config.lora import LoRAConfig
from quire.config.quantization import QuantizationConfig
from quire.config.speculative import MTP, SpeculativeConfig
from quire.engine.tokenizer import Tokenizer
from quire.errors import ConfigError


def check_guessing(config: EngineConfig) -> None:
    """Refuse a model, or heads, to guess where none is named.

    Raises:
        ConfigError: says so.
    """
    settings = config.speculative.settings
    if settings.model is None and settings.method != MTP:
        raise ConfigError(f'--speculative-config: method "{settings.method}" needs a "model", which guesses')


def draft_model_config(config: EngineConfig) -> EngineConfig:
    """How the model that is to guess would be asked for by itself, in an engine like this one."""
    settings = config.speculative.settings
    assert settings.model is not None, "it was checked"
    own = dataclasses.replace(
        config.model,
        model=settings.model,
        tokenizer=None,
        revision=None,
        served_model_name=(settings.model,),
        runner="auto",
        convert="auto",
        model_impl="auto",
        dtype="auto",
        hf_overrides={},
    )
    return dataclasses.replace(
        config,
        model=own,
        parallel=whole_on_each_rank(config.parallel),
        quantization=QuantizationConfig(settings.quantization),
        lora=LoRAConfig(),
        speculative=SpeculativeConfig(),
    )


def whole_on_each_rank(parallel: ParallelConfig) -> ParallelConfig:
    """Of what guesses: every rank of the last stage computes all of it, so none of its sums crosses ranks, and no bit
    depends on them.
    """
    return dataclasses.replace(
        parallel,
        tp_invariant=False,
        enable_expert_parallel=False,
        pipeline_parallel_size=1,
        pipeline_partition=None,
        nnodes=1,
        node_rank=0,
    )


def check_draft_model(
    config: EngineConfig, drafts: EngineConfig, own: Tokenizer | None, other: Tokenizer | None
) -> None:
    """Refuse a draft model that is pooled, or whose tokens have other ids.

    Tables may have different numbers of rows: rows without a token are padding.

    Args:
        config, drafts: of the target, and of the draft model.
        own, other: their tokenizers; where none is loaded, vocabularies must have the same size.

    Raises:
        ConfigError: the draft model does not fit.
    """
    if drafts.pooling is not None:
        raise ConfigError("it is pooled, and generates no tokens")
    if own is not None and other is not None:
        different = different_token(own.vocabulary(), other.vocabulary())
        if different is not None:
            raise ConfigError(f"its tokenizer does not fit that of {config.model.model}: {different}")
        return
    sizes = drafts.arch.vocab_size, config.arch.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"its vocabulary has {sizes[0]} tokens, and that of {config.model.model} {sizes[1]}; without tokenizers "
            "(--skip-tokenizer-init) the sizes must be equal"
        )


def different_token(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return how two vocabularies contradict each other; None if tokens of both have the same ids.

    Tokens that only one of the two has are no contradiction, as long as their ids are free in the other.
    """
    if own.keys().isdisjoint(other):
        return "they have no token in common"
    tokens = {token_id: token for token, token_id in own.items()}
    for token, token_id in other.items():
        if own.get(token, token_id) != token_id:
            return f"token {token!r} has id {token_id} in the draft model, and {own[token]} in the target"
        if tokens.get(token_id, token) != token:
            return f"id {token_id} is {token!r} in the draft model, and {tokens[token_id]!r} in the target"
    return None
