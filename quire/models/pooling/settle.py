"""Whether a checkpoint's prompts become tokens or numbers, and which: by its files, the options, or a stated default.

Invariant: torch-free. What the files leave open is decided here alone, and the reason is told.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config import EngineConfig
from quire.config.arch import ModelArch
from quire.config.pooling import HeadLayer, PoolingSpec
from quire.errors import ConfigError, ModelLoadError
from quire.models.checkpoint_files import has_file
from quire.models.gguf.model import GgufModel, is_gguf, stated_pooling
from quire.models.hf_config import architecture_of, config_json
from quire.models.json_object import JsonObject
from quire.models.pooling.architectures import GENERATES, Made, made_for
from quire.models.pooling.forms import in_form
from quire.models.pooling.heads import classes, head_of
from quire.models.pooling.output_head import TOKENS, IdOf, by_answers, by_output_head, by_tokens
from quire.models.pooling.overrides import overridden
from quire.models.pooling.sentence_transformers import (
    ANSWER,
    MODULES,
    SentenceTransformer,
    read_sentence_transformer,
)
from quire.models.pooling.stored_heads import has_head
from quire.models.pooling.vocabulary_head import with_vocabulary_head
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED

logger = logging.getLogger(__name__)

_CLASSIFIERS: dict[str, tuple[str, str]] = {
    "classify": (CLASSIFY, "last"),
    "token_classify": (TOKEN_CLASSIFY, "all"),
    "reward": (TOKEN_CLASSIFY, "all"),
    "process_reward": (TOKEN_CLASSIFY, "step"),
}
"""What a model with a head is for -> what requests want of it, and how it pools."""
_BOTH_WAYS = "is_causal: false (its tokens see those behind them)"


def _file_of(config: EngineConfig, model_dir: Path) -> JsonObject:
    """config.json, or of a model in GGUF, which says nothing of pooling, what its architecture would have there."""
    if is_gguf(model_dir):
        return JsonObject(str(model_dir), {"architectures": [config.arch.architecture]})
    return config_json(model_dir, config.model.hf_overrides)


@dataclass(frozen=True)
class Settled:
    """What was found, and why."""

    runner: str
    runner_reason: str
    convert: str
    convert_reason: str
    spec: PoolingSpec | None = None
    pooling_reason: str = ""
    max_seq_length: int | None = None
    """The longest input for which the checkpoint says it was made."""
    arch: ModelArch | None = None
    """With the head that the model gets, if it pools."""


def settle_pooling(config: EngineConfig, id_of: IdOf) -> Settled:
    """What a model does; `config` knows its directory and its shape.

    Raises:
        ConfigError: `--runner`, `--convert` or `--pooler-config` asks for what the model is not.
        ModelLoadError: a file is malformed.
        UnsupportedModelError: a file asks for something that is not done.
    """
    model_dir, asked = Path(config.model_dir), config.model
    file = _file_of(config, model_dir)
    architecture = architecture_of(file)
    made = made_for(architecture, asked.model_impl)
    layout = read_sentence_transformer(model_dir) if asked.runner != "generate" else None
    stated = stated_pooling(GgufModel(model_dir)) if is_gguf(model_dir) else None
    if layout is not None and layout.answers and made.kind != GENERATES:
        raise ModelLoadError(f"{layout.pooling_file}: {ANSWER} is for language models, not {architecture}")
    runner, reason = _runner(config, architecture, made, layout, stated)
    if runner == "generate":
        return Settled(runner, reason, "none", "it generates")
    target, target_reason = _target(asked.convert, made, layout)
    arch = in_form(config.arch, file, made, target)
    if layout is not None and layout.weighs_vocabulary and target == "embed":
        arch = with_vocabulary_head(arch, file)
    said = asked.pooler_config
    if target == "embed":
        spec, why = _embedder(file, made, arch, model_dir, layout)
    elif target == "reward" and made.kind == GENERATES and "returned_token_ids" in said:
        (spec, said), why = (
            by_output_head(arch, said),
            "as --pooler-config says, by the model's own output head",
        )
    else:
        spec, why = _classifier(file, made, arch, target, layout, id_of)
        spec = replace(spec, head_of_adapters=_leaves_head_to_adapters(config, made, model_dir))
    if stated is not None and target == "embed":
        spec, why = overridden(spec, {"pooling_type": stated}), "as pooling_type in the file says"
    if said:
        spec, why = overridden(spec, said), "as --pooler-config says"
    longest = None if layout is None else layout.max_seq_length
    return Settled(runner, reason, _CONVERTS.get(target, target), target_reason, spec, why, longest, arch)


_CONVERTS = {"token_classify": "classify", "process_reward": "reward"}
"""What `--convert` calls some of them."""


def _runner(
    config: EngineConfig,
    architecture: str,
    made: Made,
    layout: SentenceTransformer | None,
    stated: str | None,
) -> tuple[str, str]:
    """ "generate" or "pooling", and why."""
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
        raise ConfigError(f"--runner is generate, but {architecture} has no output head: it pools")
    if asked == "generate" and config.arch.bidirectional:
        raise ConfigError(
            f"--runner is generate, but config.json says of {architecture} {_BOTH_WAYS}: it pools"
        )
    if asked == "generate" and pools_by_option:
        raise ConfigError(f"{pools_by_option[0]} is for models that pool, and --runner is generate")
    if asked != "auto":
        return asked, "as --runner says"
    if pools_by_option:
        return "pooling", f"{pools_by_option[0]} is given"
    if made.kind != GENERATES:
        return "pooling", f"{architecture} has no output head"
    if layout is not None:
        return "pooling", f"the checkpoint has {MODULES}"
    if stated is not None:
        return "pooling", f"the file says how it pools ({stated})"
    if config.arch.bidirectional:
        return "pooling", f"config.json says {_BOTH_WAYS}"
    return "generate", f"{architecture} is a language model"


def _target(convert: str, made: Made, layout: SentenceTransformer | None) -> tuple[str, str]:
    """What the model is for: "embed" or one of `_CLASSIFIERS`; and why."""
    if convert == "none" and made.kind == GENERATES:
        raise ConfigError(
            "--convert is none, and the model generates; to pool it must become something: embed, classify or reward"
        )
    if convert in ("auto", "none"):
        if layout is not None and layout.answers:
            return "classify", f"the checkpoint's {MODULES} says by which tokens it scores"
        generates = made.kind == GENERATES
        reason = "what a language model becomes by default" if generates else "what it was made for"
        return "embed" if generates else made.kind, reason
    if _CONVERTS.get(made.kind, made.kind) == convert:
        return made.kind, "what it was made for"
    return convert, "as --convert says"


def _embedder(
    file: JsonObject, made: Made, arch: ModelArch, model_dir: Path, layout: SentenceTransformer | None
) -> tuple[PoolingSpec, str]:
    """A model of embeddings, and why it pools as it does."""
    width = _width(arch)
    own_heads = _own_heads(model_dir, width)
    joined = width if layout is None else width * len(layout.pooling.split("+"))
    size = layout.head[-1].outputs if layout is not None and layout.head else joined
    matryoshka = _matryoshka(file, size)
    if layout is None and architecture_of(file).endswith(("ForMaskedLM", "ForPreTraining")):
        logger.warning(
            "%s without %s: embeddings are made of hidden states, %d numbers each, and its output head is left out; "
            "for weights of words (SPLADE), %s must name SpladePooling",
            architecture_of(file),
            MODULES,
            width,
            MODULES,
        )
    if layout is None or layout.answers:
        pooling = "mean" if made.is_whole or arch.bidirectional else "last"
        spec = PoolingSpec((EMBED, TOKEN_EMBED), pooling, size, activation="normalize", matryoshka=matryoshka)
        return spec, f"the default, with vectors of length 1, because no {MODULES} says how"
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
        return spec, f"as {layout.pooling_file} says, of each word of the vocabulary"
    tasks = (TOKEN_EMBED,) if layout.pooling == "all" else (EMBED, TOKEN_EMBED)
    if joined > width:
        tasks = (EMBED,)  # what follows is not made for vectors of tokens
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
                f"{layer.folder}/config.json: in_features is {layer.inputs}, and what comes before gives {inputs}"
            )
    return spec, f"as {layout.pooling_file} says"


_HEADS_OF_TOKENS = {
    "sparse_linear": (TOKEN_CLASSIFY, 1, "relu"),
    "colbert_linear": (TOKEN_EMBED, 0, "identity"),
}
"""Folder -> task, numbers (0: as many as hidden states have) and function of what BGE-M3 makes of tokens (Chen et al.,
2024, arXiv:2402.03216): the weight of each token's word, and a vector of it."""


def _own_heads(model_dir: Path, width: int) -> tuple[tuple[str, tuple[HeadLayer, ...]], ...]:
    """Those that lie beside the model; as pickles, which are not read, they are but named."""
    found = []
    for folder, (task, size, activation) in _HEADS_OF_TOKENS.items():
        if has_file(model_dir / folder / "model.safetensors"):
            layer = HeadLayer(f"{folder}/linear", width, size or width, activation=activation)
            found.append((task, (layer,)))
        elif (model_dir / f"{folder}.pt").is_file():
            logger.warning(
                "%s.pt is a pickle, which is not read: see docs/pooling.md#words-and-their-weights", folder
            )
    return tuple(found)


def _matryoshka(file: JsonObject, size: int) -> tuple[int, ...]:
    """Sizes to which an embedding may be cut (Kusupati et al., 2022, arXiv:2205.13147), as `PoolingSpec` has them."""
    if "matryoshka_dimensions" not in file:
        return (0,) if file.flag("is_matryoshka", False) else ()
    sizes = file.numbers("matryoshka_dimensions")
    if not sizes or not all(one == int(one) and 0 < one <= size for one in sizes):
        raise file.wrong("matryoshka_dimensions", f"a list of sizes of 1 to {size}")
    return tuple(sorted(map(int, sizes)))


def _classifier(
    file: JsonObject,
    made: Made,
    arch: ModelArch,
    target: str,
    layout: SentenceTransformer | None,
    id_of: IdOf,
) -> tuple[PoolingSpec, str]:
    """A model with a head: its own, or that of a language model in another form."""
    # Of a model with a head of its own, that says what is pooled, and how many numbers there are.
    own = None if arch.head is None else "token_classify" if arch.head.of_tokens else "classify"
    function = "" if layout is None else layout.class_function
    of_tokens, answers = None, () if layout is None else layout.answers
    if target == "classify" and not made.is_whole and (answers or TOKENS in file):
        of_tokens = by_answers(arch, answers) if answers else by_tokens(arch, file, id_of)
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
        return spec, f"what {target} needs"
    written = replace(spec, prompts=layout.prompts, default_prompt=layout.default_prompt)
    return replace(written, template_options=layout.template_options), f"what {target} needs"


def _leaves_head_to_adapters(config: EngineConfig, made: Made, model_dir: Path) -> bool:
    """Whether a checkpoint that was made for something else has no head, and adapters may bring one."""
    has_none = made.kind in (GENERATES, "embed") and config.load.load_format != "dummy"
    return config.lora.enable_lora and has_none and not has_head(model_dir)


def _width(arch: ModelArch) -> int:
    """Of hidden states."""
    return arch.word_embed_proj_dim or arch.hidden_size
