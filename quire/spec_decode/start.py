# SPDX-License-Identifier: Apache-2.0
"""Start of speculative decoding: checks of the method, and the draft model or heads, which must match the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from quire.config import EngineConfig
from quire.config.device import ParallelConfig
from quire.config.quantization import QuantizationConfig
from quire.config.speculative import MEDUSA, MTP, SpeculativeConfig
from quire.engine.file_states import states_of
from quire.engine.start_feature import StartFeature, Usage
from quire.engine.startup import load_tokenizer, prepare
from quire.engine.tokenizer import Tokenizer
from quire.errors import ConfigError, StartupError
from quire.models.built_in import DECODER
from quire.models.checkpoint import resolve_model_dir
from quire.spec_decode.drafter import MODEL_KEYS, check_speculation
from quire.spec_decode.models.reader import HEADS, read_draft_heads


def check_draft_source(config: EngineConfig) -> None:
    """Refuse a method that needs a draft model or heads if none is named.

    Raises:
        ConfigError: no model is named.
    """
    settings = config.speculative.settings
    if settings.model is None and settings.method != MTP:
        raise ConfigError(f'--speculative-config: method "{settings.method}" needs a "model"')


def draft_model_config(config: EngineConfig) -> EngineConfig:
    """Return the config of the draft model, as for an engine of its own."""
    settings = config.speculative.settings
    assert settings.model is not None, "checked by check_draft_source"
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
        config.without_adapters(),
        model=own,
        parallel=unsharded(config.parallel),
        quantization=QuantizationConfig(settings.quantization),
        speculative=SpeculativeConfig(),
    )


def unsharded(parallel: ParallelConfig) -> ParallelConfig:
    """Return a config without sharding: every rank of the last stage computes the whole draft model, without
    all-reduce.
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
    """Refuse a pooling model, or one whose token ids differ from the target's.

    Tables may differ in their numbers of rows: rows without a token are padding.

    Args:
        config, drafts: configs of the target and of the draft model.
        own, other: their tokenizers; without them the vocabularies must have the same size.

    Raises:
        ConfigError: the draft model does not fit.
    """
    if drafts.pooling is not None:
        raise ConfigError("it is a pooling model and generates no tokens")
    if own is not None and other is not None:
        different = different_token(own.vocabulary(), other.vocabulary())
        if different is not None:
            raise ConfigError(f"its tokenizer differs from that of {config.model.model}: {different}")
        return
    sizes = drafts.arch.vocab_size, config.arch.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"its vocabulary has {sizes[0]} tokens, and that of {config.model.model} has {sizes[1]}; without "
            "tokenizers (--skip-tokenizer-init) the sizes must be equal"
        )


def different_token(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return how two vocabularies contradict each other; None if common tokens have equal ids.

    A token in only one of them is no contradiction, as long as its id is free in the other.
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


def with_draft_heads(config: EngineConfig) -> EngineConfig:
    """Add the config of the draft heads to a prepared config; all but shape and weights is the target's.

    Raises:
        ConfigError: they do not match the model.
        ModelLoadError: they cannot be found or read.
        UnsupportedModelError: quire does not support their kind.
    """
    settings = config.speculative.settings
    method, model, quantization = settings.method, settings.model, settings.quantization
    assert method is not None, "checked by check_draft_source"
    if model is None:  # they are in the model's own checkpoint
        model_dir, quantization = Path(config.model_dir), quantization or config.quantization.quantization
    else:
        model_dir = resolve_model_dir(model, None, config.load.download_dir)
    if method != MEDUSA and config.model_class != f"quire.models.{DECODER}":
        raise ConfigError(
            f"{method} needs access to embeddings and layers, which {config.arch.architecture} does not give"
        )
    shape = read_draft_heads(method, model_dir, config.arch)
    assert shape.draft is not None, "draft heads have a DraftArch"
    heads = dataclasses.replace(
        config.without_adapters(),
        model=dataclasses.replace(config.model, model=model or config.model.model, revision=None),
        model_dir=str(model_dir),
        model_arch=shape,
        model_class=HEADS[method].model,
        parallel=unsharded(config.parallel),
        quantization=QuantizationConfig(quantization),
        speculative=SpeculativeConfig(),
    )
    heads = dataclasses.replace(heads, files=states_of(heads))
    arch = dataclasses.replace(config.arch, kept_layers=shape.draft.reads)
    return dataclasses.replace(config, model_arch=arch, draft=heads)


class DraftingStart(StartFeature):
    """Prepares drafting."""

    def check(self, config: EngineConfig) -> None:
        check_speculation(config)

    def complete(self, config: EngineConfig, usage: Usage) -> EngineConfig:
        """Return the config with its draft model, prepared as any other, or draft heads, if it has any."""
        settings = config.speculative.settings
        if settings.method not in MODEL_KEYS:
            return config
        check_draft_source(config)
        try:
            return with_draft_heads(config) if settings.method in HEADS else _with_draft_model(config, usage)
        except StartupError as error:
            model = settings.model or config.model.model
            raise ConfigError(f"--speculative-config: model {model!r}: {error}") from error


def _with_draft_model(config: EngineConfig, usage: Usage) -> EngineConfig:
    if config.parallel.nnodes > 1:  # a model not sharded is the same on all hosts
        usage = "server"
    found = prepare(draft_model_config(config), usage)
    check_draft_model(config, found, load_tokenizer(config), load_tokenizer(found))
    return dataclasses.replace(config, draft=found)
