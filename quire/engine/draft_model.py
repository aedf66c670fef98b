"""Which model is to guess for another, and whether it fits: it has the same tokens under the same ids."""

from __future__ import annotations

import dataclasses
import hashlib

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
    """Refuse a model that says nothing, or says it in other tokens.

    Args:
        config, drafts: of the model, and of the one that is to guess for it.
        own, other: their tokenizers; where none is loaded, the sizes have to do.

    Raises:
        ConfigError: it does not fit.
    """
    if drafts.pooling is not None:
        raise ConfigError("it is pooled, and says nothing")
    sizes = drafts.arch.vocab_size, config.arch.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"its vocabulary has {sizes[0]} tokens, and that of {config.model.model} {sizes[1]}"
        )
    if own is not None and other is not None and fingerprint(own) != fingerprint(other):
        raise ConfigError(
            f"its vocabulary is not that of {config.model.model}: other tokens have the same ids"
        )


def fingerprint(tokenizer: Tokenizer) -> str:
    """Of its tokens and their ids, in whatever way it cuts a text into them."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.vocabulary().items()):
        digest.update(f"{token_id} {token}\0".encode())
    return digest.hexdigest()
