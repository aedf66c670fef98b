# SPDX-License-Identifier: Apache-2.0
"""Resolves `--runner`, `--convert` and `--pooler-config`: whether a model generates or pools, and how.

Invariant: torch-free. What the files leave open is decided only here, and the reason is logged. Whether an encoder's
checkpoint has the head of another form shows when its tensors are loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.config.arch import ModelArch
from quire.config.pooling import CLASS_TASKS, POOLINGS, HeadLayer, PoolingSpec
from quire.engine.start_feature import AutomaticValue, Resolution, StartFeature
from quire.errors import ConfigError, ModelLoadError
from quire.models.architectures import GENERATES, KINDS, ArchitectureKind, architecture_kind
from quire.models.checkpoint_files import MODULES, has_file
from quire.models.gguf.model import GgufModel, is_gguf, stated_pooling
from quire.models.hf_config import architecture_of, config_json, read_config
from quire.models.json_object import JsonObject
from quire.models.registry import ModelRegistry
from quire.pooling.models.heads import (
    TOKENS,
    IdOf,
    classes,
    classes_of_output_head,
    has_head,
    head_of,
    head_of_answers,
    head_of_tokens,
    with_vocabulary_head,
)
from quire.pooling.models.sentence_transformers import ANSWER, SentenceTransformer, read_sentence_transformer
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, PoolingParams

_FORMS = {"embed": "Model", "classify": "ForSequenceClassification", "reward": "ForTokenClassification"}
"""Value of `--convert` -> suffix of the encoder's architecture."""


def converted(arch: ModelArch, file: JsonObject, made: ArchitectureKind, target: str) -> ModelArch:
    """Return the architecture in the form for `target`; models on a language model's row get their heads elsewhere.

    Any head also serves rewards.

    Raises:
        ConfigError: quire does not serve that form.
    """
    is_fine = made.kind == target or (target == "reward" and made.kind != "embed")
    if not made.is_whole or is_fine:
        return arch
    architecture = architecture_of(file)
    end = next((end for end in KINDS if architecture.endswith(end)), "")
    form = architecture.removesuffix(end) + _FORMS[target]
    if not ModelRegistry.has_row(form):
        raise ConfigError(
            f"--convert {target} is not supported for {architecture}: quire does not serve {form}"
        )
    values = {**file.values, "architectures": [form]}
    read = read_config(JsonObject(file.where, values, refused=[]), "quire")
    return replace(arch, architecture=form, head=read.head, names=read.names)


_TOKEN_POOLINGS = ("all", "step")


def with_pooler_config(spec: PoolingSpec, pooler_config: dict[str, Any]) -> PoolingSpec:
    """Return the spec with `--pooler-config` applied.

    Raises:
        ConfigError: an unknown key or an invalid value.
    """
    for key, value in pooler_config.items():
        if key not in _KEYS:
            raise ConfigError(f"--pooler-config: {key!r} is unknown; known are {', '.join(_KEYS)}")
        spec = _KEYS[key](spec, key, value)
    return spec


def _pooling(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    """Set the pooling, of whole texts or of tokens; it decides the tasks."""
    pooling = str(value).lower()
    if pooling not in POOLINGS:
        raise _wrong(key, value, f"one of {', '.join(name.upper() for name in POOLINGS)}")
    if spec.weighs_vocabulary:
        raise ConfigError(
            f"--pooler-config: {key} cannot be changed for a model with vocabulary weights (SPLADE)"
        )
    if len(spec.poolings) > 1:
        raise ConfigError(f"--pooler-config: {key} cannot be changed, because the model joins {spec.pooling}")
    classifies = spec.tasks[0] in CLASS_TASKS
    if pooling in _TOKEN_POOLINGS:
        tasks: tuple[str, ...] = (TOKEN_CLASSIFY if classifies else TOKEN_EMBED,)
    else:
        tasks = (CLASSIFY,) if classifies else (EMBED, TOKEN_EMBED)
    return replace(spec, pooling=pooling, tasks=tasks)


def _activation(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return replace(spec, activation=spec.activation_of(PoolingParams(use_activation=value)))


def _step(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    if not _is_index(value):
        raise _wrong(key, value, "a token id")
    return replace(spec, step_token_id=value)


def _returned(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    classes = spec.size if spec.tasks[0] in CLASS_TASKS else 0
    if not (isinstance(value, list) and value and all(_is_index(one) and one < classes for one in value)):
        raise _wrong(key, value, f"a list of classes, of which the model has {classes}")
    return replace(spec, returned_token_ids=tuple(value))


def _matryoshka(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    sizes: list[Any] = value if isinstance(value, list) else []
    if not sizes or not all(_is_index(size) and 0 < size <= spec.size for size in sizes):
        raise _wrong(key, value, f"a list of sizes of 1 to {spec.size}")
    return replace(spec, matryoshka=tuple(sorted(sizes)))


_KEYS: dict[str, Callable[[PoolingSpec, str, Any], PoolingSpec]] = {
    "pooling_type": _pooling,
    "seq_pooling_type": _pooling,
    "tok_pooling_type": _pooling,
    "use_activation": _activation,
    "normalize": _activation,
    "softmax": _activation,
    "step_tag_id": _step,
    "returned_token_ids": _returned,
    "matryoshka_dimensions": _matryoshka,
}


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _wrong(key: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"--pooler-config: {key} must be {allowed}, got {json.dumps(value, default=repr)}")


logger = logging.getLogger(__name__)

_CLASSIFIERS: dict[str, tuple[str, str]] = {
    "classify": (CLASSIFY, "last"),
    "token_classify": (TOKEN_CLASSIFY, "all"),
    "reward": (TOKEN_CLASSIFY, "all"),
    "process_reward": (TOKEN_CLASSIFY, "step"),
}
"""Purpose of a model with a head -> task and pooling."""
_BIDIRECTIONAL = "is_causal: false (bidirectional attention)"


def _file_of(config: EngineConfig, model_dir: Path) -> JsonObject:
    """Return config.json; for GGUF, which lacks pooling settings, one with its architecture."""
    if is_gguf(model_dir):
        return JsonObject(str(model_dir), {"architectures": [config.arch.architecture]})
    return config_json(model_dir, config.model.hf_overrides)


@dataclass(frozen=True)
class ResolvedPooling:
    """Resolved settings, with reasons."""

    runner: str
    runner_reason: str
    convert: str
    convert_reason: str
    spec: PoolingSpec | None = None
    pooling_reason: str = ""
    max_seq_length: int | None = None
    """Longest input given by the checkpoint."""
    arch: ModelArch | None = None
    """Architecture with its pooling head, if the model pools."""


def resolve_pooling(config: EngineConfig, id_of: IdOf) -> ResolvedPooling:
    """Resolve what a model does; `config` has its directory and architecture.

    Raises:
        ConfigError: `--runner`, `--convert` or `--pooler-config` does not suit the model.
        ModelLoadError: a file is malformed.
        UnsupportedModelError: a setting of a file is not supported.
    """
    model_dir, asked = Path(config.model_dir), config.model
    file = _file_of(config, model_dir)
    architecture = architecture_of(file)
    made = architecture_kind(architecture, asked.model_impl)
    layout = read_sentence_transformer(model_dir) if asked.runner != "generate" else None
    stated = stated_pooling(GgufModel(model_dir)) if is_gguf(model_dir) else None
    if layout is not None and layout.answers and made.kind != GENERATES:
        raise ModelLoadError(f"{layout.pooling_file}: {ANSWER} is for language models, not {architecture}")
    runner, reason = _runner(config, architecture, made, layout, stated)
    if runner == "generate":
        return ResolvedPooling(runner, reason, "none", "the model generates")
    target, target_reason = _target(asked.convert, made, layout)
    arch = converted(config.arch, file, made, target)
    if layout is not None and layout.weighs_vocabulary and target == "embed":
        arch = with_vocabulary_head(arch, file)
    said = asked.pooler_config
    if target == "embed":
        spec, why = _embedder(file, made, arch, model_dir, layout)
    elif target == "reward" and made.kind == GENERATES and "returned_token_ids" in said:
        (spec, said), why = (
            classes_of_output_head(arch, said),
            "set by --pooler-config, with the model's output head",
        )
    else:
        spec, why = _classifier(file, made, arch, target, layout, id_of)
        spec = replace(spec, head_of_adapters=_leaves_head_to_adapters(config, made, model_dir))
    if stated is not None and target == "embed":
        spec, why = with_pooler_config(spec, {"pooling_type": stated}), "pooling_type of the file"
    if said:
        spec, why = with_pooler_config(spec, said), "set by --pooler-config"
    longest = None if layout is None else layout.max_seq_length
    return ResolvedPooling(
        runner, reason, _CONVERTS.get(target, target), target_reason, spec, why, longest, arch
    )


_CONVERTS = {"token_classify": "classify", "process_reward": "reward"}
"""Names of `--convert` for some purposes."""


def _runner(
    config: EngineConfig,
    architecture: str,
    made: ArchitectureKind,
    layout: SentenceTransformer | None,
    stated: str | None,
) -> tuple[str, str]:
    """Return "generate" or "pooling", and the reason."""
    asked, convert = config.model.runner, config.model.convert
    pools_by_option = [
        flag
        for flag, is_given in (
            (f"--convert {convert}", convert not in ("auto", "none")),
            ("--pooler-config", bool(config.model.pooler_config)),
        )
        if is_given
    ]
    if asked == "generate" and made.kind != GENERATES:
        raise ConfigError(f"--runner is generate, but {architecture} has no output head and only pools")
    if asked == "generate" and config.arch.bidirectional:
        raise ConfigError(
            f"--runner is generate, but config.json of {architecture} has {_BIDIRECTIONAL}; it only pools"
        )
    if asked == "generate" and pools_by_option:
        raise ConfigError(f"{pools_by_option[0]} is for pooling models, but --runner is generate")
    if asked != "auto":
        return asked, "set by --runner"
    if pools_by_option:
        return "pooling", f"{pools_by_option[0]} is given"
    if made.kind != GENERATES:
        return "pooling", f"{architecture} has no output head"
    if layout is not None:
        return "pooling", f"the checkpoint has {MODULES}"
    if stated is not None:
        return "pooling", f"the file gives a pooling type ({stated})"
    if config.arch.bidirectional:
        return "pooling", f"config.json has {_BIDIRECTIONAL}"
    return "generate", f"{architecture} is a language model"


def _target(convert: str, made: ArchitectureKind, layout: SentenceTransformer | None) -> tuple[str, str]:
    """Return the purpose, "embed" or one of `_CLASSIFIERS`, and the reason."""
    if convert == "none" and made.kind == GENERATES:
        raise ConfigError(
            "--convert is none, but the model generates; to pool, set --convert to embed, classify or reward"
        )
    if convert in ("auto", "none"):
        if layout is not None and layout.answers:
            return "classify", f"the checkpoint's {MODULES} names the tokens that it scores by"
        generates = made.kind == GENERATES
        reason = "the default for a language model" if generates else "the checkpoint's purpose"
        return "embed" if generates else made.kind, reason
    if _CONVERTS.get(made.kind, made.kind) == convert:
        return made.kind, "the checkpoint's purpose"
    return convert, "set by --convert"


def _embedder(
    file: JsonObject,
    made: ArchitectureKind,
    arch: ModelArch,
    model_dir: Path,
    layout: SentenceTransformer | None,
) -> tuple[PoolingSpec, str]:
    """Return the spec of an embedding model, and the reason for its pooling."""
    width = _width(arch)
    own_heads = _own_heads(model_dir, width)
    joined = width if layout is None else width * len(layout.pooling.split("+"))
    size = layout.head[-1].outputs if layout is not None and layout.head else joined
    matryoshka = _matryoshka_sizes(file, size)
    if layout is None and architecture_of(file).endswith(("ForMaskedLM", "ForPreTraining")):
        logger.warning(
            "%s without %s: embeddings are hidden states of size %d, and its output head is ignored; "
            "for SPLADE, %s must name SpladePooling",
            architecture_of(file),
            MODULES,
            width,
            MODULES,
        )
    if layout is None or layout.answers:
        pooling = "mean" if made.is_whole or arch.bidirectional else "last"
        spec = PoolingSpec((EMBED, TOKEN_EMBED), pooling, size, activation="normalize", matryoshka=matryoshka)
        return spec, f"the default, normalized, because there is no {MODULES}"
    if layout.weighs_vocabulary:
        spec = PoolingSpec(
            (EMBED,),
            layout.pooling,
            arch.vocab_size,
            activation=layout.word_activation,
            prompts=layout.prompts,
            default_prompt=layout.default_prompt,
            similarity=layout.similarity,
            weighs_vocabulary=True,
        )
        return spec, f"from {layout.pooling_file}, with vocabulary weights"
    tasks = (TOKEN_EMBED,) if layout.pooling == "all" else (EMBED, TOKEN_EMBED)
    if joined > width:
        tasks = (EMBED,)  # the following layers do not suit token vectors
    spec = PoolingSpec(
        tasks=tasks + tuple(task for task, _ in own_heads if task not in tasks),
        pooling=layout.pooling,
        size=size,
        activation="normalize" if layout.normalizes else "none",
        matryoshka=matryoshka,
        prompts=layout.prompts,
        default_prompt=layout.default_prompt,
        include_prompt=layout.include_prompt,
        similarity=layout.similarity,
        skipped_words=layout.skipped_words,
        side_lengths=layout.side_lengths,
        head=layout.head,
        own_heads=own_heads,
    )
    for layer, inputs in zip(layout.head, (joined, *(layer.outputs for layer in layout.head)), strict=False):
        if layer.inputs != inputs:
            raise ModelLoadError(
                f"{layer.folder}/config.json: in_features is {layer.inputs}, but its input has size {inputs}"
            )
    return spec, f"from {layout.pooling_file}"


_TOKEN_HEADS = {"sparse_linear": (TOKEN_CLASSIFY, 1, "relu"), "colbert_linear": (TOKEN_EMBED, 0, "identity")}
"""BGE-M3's heads (Chen et al., 2024, arXiv:2402.03216): folder -> task, size (0: hidden size), activation."""


def _own_heads(model_dir: Path, width: int) -> tuple[tuple[str, tuple[HeadLayer, ...]], ...]:
    """Return the heads stored beside the model; pickles are only logged."""
    found = []
    for folder, (task, size, activation) in _TOKEN_HEADS.items():
        if has_file(model_dir / folder / "model.safetensors"):
            layer = HeadLayer(f"{folder}/linear", width, size or width, activation=activation)
            found.append((task, (layer,)))
        elif (model_dir / f"{folder}.pt").is_file():
            logger.warning(
                "%s.pt is a pickle and was not loaded: see docs/pooling.md#words-and-their-weights", folder
            )
    return tuple(found)


def _matryoshka_sizes(file: JsonObject, size: int) -> tuple[int, ...]:
    """Return the sizes to which embeddings may be truncated (Kusupati et al., 2022, arXiv:2205.13147)."""
    if "matryoshka_dimensions" not in file:
        return (0,) if file.flag("is_matryoshka", False) else ()
    sizes = file.numbers("matryoshka_dimensions")
    if not sizes or not all(one == int(one) and 0 < one <= size for one in sizes):
        raise file.wrong("matryoshka_dimensions", f"a list of sizes of 1 to {size}")
    return tuple(sorted(map(int, sizes)))


def _classifier(
    file: JsonObject,
    made: ArchitectureKind,
    arch: ModelArch,
    target: str,
    layout: SentenceTransformer | None,
    id_of: IdOf,
) -> tuple[PoolingSpec, str]:
    """Return the spec of a model with a head: its own, or that of a language model in another form."""
    # A head of the model's own decides the pooling and the number of classes.
    own = None if arch.head is None else "token_classify" if arch.head.of_tokens else "classify"
    function = "" if layout is None else layout.class_function
    of_tokens, answers = None, () if layout is None else layout.answers
    if target == "classify" and not made.is_whole and (answers or TOKENS in file):
        of_tokens = head_of_answers(arch, answers) if answers else head_of_tokens(arch, file, id_of)
        count = 1 if of_tokens.activation == "excess" else of_tokens.outputs
        file = file.with_values(num_labels=count, id2label={})
    labels, activation = classes(file, own or target, function)
    task, pooling = _CLASSIFIERS[own or target]
    if arch.head is not None and task == CLASSIFY:
        pooling = arch.head.pooling
    if target == "reward":
        activation = "none"
    head = () if made.is_whole else head_of(architecture_of(file), target, _width(arch), len(labels))
    if of_tokens is not None:
        head = (of_tokens,)
    spec = PoolingSpec((task,), pooling, len(labels), labels, activation, head=head)
    if layout is None:
        return spec, f"the default of {target}"
    written = replace(spec, prompts=layout.prompts, default_prompt=layout.default_prompt)
    return replace(written, template_options=layout.template_options), f"the default of {target}"


def _leaves_head_to_adapters(config: EngineConfig, made: ArchitectureKind, model_dir: Path) -> bool:
    """Return whether a checkpoint has no head and adapters may supply one."""
    has_none = made.kind in (GENERATES, "embed") and config.load.load_format != "dummy"
    return config.serves_adapters and has_none and not has_head(model_dir)


def _width(arch: ModelArch) -> int:
    """Return the size of hidden states."""
    return arch.word_embed_proj_dim or arch.hidden_size


class PoolingStart(StartFeature):
    """Resolves what a model does."""

    def resolve(self, config: EngineConfig, id_of: Callable[[str], int | None]) -> Resolution:
        found = resolve_pooling(config, id_of)
        if found.spec is None:
            return Resolution(choices=[*_choices(config, found)], max_seq_length=found.max_seq_length)
        logger.info("pooling = %s: %s", found.spec.pooling, found.pooling_reason)
        changes = {"pooling": found.spec, "model_arch": found.arch}
        return Resolution(changes, [*_choices(config, found)], found.max_seq_length)


def _choices(config: EngineConfig, found: ResolvedPooling) -> Iterator[AutomaticValue]:
    """Choose the runner; disable prefix caching where a pooling needs every token to be computed."""
    if config.model.runner == "auto":
        yield AutomaticValue("runner", found.runner, found.runner_reason)
    if found.spec is None:
        return
    if config.model.convert != found.convert:
        yield AutomaticValue("convert", found.convert, found.convert_reason)
    if found.spec.always_reads_every_token and config.cache.enable_prefix_caching:
        reason = f"pooling {found.spec.pooling!r} needs every token of a prompt to be computed"
        yield AutomaticValue("enable_prefix_caching", False, reason)
