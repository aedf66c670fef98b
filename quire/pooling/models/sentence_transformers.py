# SPDX-License-Identifier: Apache-2.0
"""Reads sentence-transformers files beside a model: modules, prompts and maximal length.

Invariant: torch-free. Every setting is honored or refused. The modules must be a model, at most one pooling (without
one each token keeps its vector), dense layers, and at most one norm. `late_interaction` masks may follow anywhere.
Alternatives are a masked language model with SPLADE pooling, and a language model with token scores.

`read_model_input` and what follows read how texts are passed to the model: length limit and preprocessing. Settings
that would change a text's tokens, or read other outputs than hidden states or classes, are refused by file and key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.pooling import HeadLayer
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import MODULES, has_file
from quire.models.json_object import JsonObject, optional_json_object, read_json_object, read_json_objects
from quire.pooling.models import heads
from quire.pooling.models.heads import MASK, LateInteraction, read_late_interaction

_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
SPLADE = "SpladePooling"
ANSWER = "LogitScore"
_SPLADE_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}
"""SPLADE activations, each followed by a logarithm; the second is OpenSearch's (arXiv:2504.14839)."""
_KINDS = (*_ORDER, MASK, SPLADE, ANSWER)
_ALSO_CALLED = {"MLMTransformer": "Transformer"}
_POOLINGS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_FLAGS = {
    f"pooling_mode_{word}": pooling
    for word, pooling in {
        "cls_token": "cls",
        "max_tokens": "max",
        "mean_tokens": "mean",
        "mean_sqrt_len_tokens": "mean_sqrt_len",
        "weightedmean_tokens": "weighted_mean",
        "lasttoken": "last",
    }.items()
}
"""Their order is that of the concatenated vectors, if several are true."""
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True)
class SentenceTransformer:
    """Settings after a model; None or empty if not given."""

    pooling: str
    pooling_file: str
    """File that gives the pooling."""
    head: tuple[HeadLayer, ...] = ()
    normalizes: bool = False
    max_seq_length: int | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    include_prompt: bool = True
    similarity: str = "cosine"
    class_function: str = ""
    """Activation of a cross-encoder, by its name in torch."""
    skipped_words: tuple[str, ...] = ()
    side_lengths: tuple[int | None, int | None] = (None, None)
    word_activation: str = ""
    """Activation of vocabulary weights, if these are pooled instead of vectors."""

    template_options: tuple[tuple[str, Any], ...] | None = None
    """See `PoolingSpec`."""
    answers: tuple[int, ...] = ()
    """Token ids that a language model scores by: no and yes, or yes alone."""

    @property
    def weighs_vocabulary(self) -> bool:
        """True if vocabulary weights are pooled."""
        return bool(self.word_activation)


@dataclass(frozen=True)
class _Modules:
    """Folders of a model's modules."""

    dense: tuple[str, ...]
    pooling: str | None
    norm: str | None
    mask: str | None
    splade: str | None
    answer: str | None = None


def read_sentence_transformer(model_dir: Path) -> SentenceTransformer | None:
    """Read the files in `model_dir`; return None if it is not a sentence-transformers model.

    Raises:
        ModelLoadError: a file is malformed.
        UnsupportedModelError: a setting is not supported; the message names file and key.
    """
    if not has_file(model_dir / MODULES):
        return None
    modules = _checked(model_dir / MODULES, _modules(model_dir / MODULES))
    about = optional_json_object(model_dir / "config_sentence_transformers.json")
    for key in ("truncate_dim", "max_active_dims"):
        about.only(key)
    pooling, where, include_prompt = _pooling_module(model_dir, modules.pooling)
    word_activation = ""
    if modules.splade is not None:
        splade = read_json_object(model_dir / modules.splade / "config.json")
        pooling, word_activation, where = *_splade(splade), splade.where
    last = (
        FILL_MASK_TASKS
        if modules.splade is not None
        else GENERATION_TASKS
        if modules.answer is not None
        else None
    )
    model_input = read_model_input(model_dir, *([] if last is None else [last]))
    prompts, source = _prompts(about), "sentence_embedding"
    matched = LateInteraction(prompts, False)
    if pooling == "all":
        source = "token_embeddings"
        matched = read_late_interaction(model_dir, about, prompts, modules.mask)
    if modules.norm is not None:
        _check_place(optional_json_object(model_dir / modules.norm / "config.json"), source)
    return SentenceTransformer(
        pooling=pooling,
        pooling_file=where,
        head=tuple(_dense(model_dir, folder, source) for folder in modules.dense),
        normalizes=modules.norm is not None or matched.is_normalized,
        max_seq_length=model_input.max_seq_length,
        prompts=matched.prompts,
        default_prompt=_default_prompt(about, matched.prompts),
        include_prompt=include_prompt,
        similarity=_similarity(about, pooling, "cosine" if modules.splade is None else "dot"),
        class_function=about.text("activation_fn", ""),
        skipped_words=matched.skipped_words,
        side_lengths=matched.side_lengths,
        word_activation=word_activation,
        template_options=model_input.template_options,
        answers=() if modules.answer is None else _answers(model_dir / modules.answer / "config.json"),
    )


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return kind and folder of each module, in order; a kind is the last part of a class name."""
    found = []
    for module in read_json_objects(path):
        kind, folder = module.text("type").rpartition(".")[2], module.text("path", "")
        kind = _ALSO_CALLED.get(kind, kind)
        if kind not in _KINDS:
            raise module.unsupported("type", f"one of {', '.join(_KINDS)}")
        if folder != Path(folder).name:
            raise module.wrong("path", "the name of a folder beside this file")
        found.append((kind, folder))
    return found


def _checked(path: Path, modules: list[tuple[str, str]]) -> _Modules:
    """Return the modules, which must be a supported chain."""
    kinds = [kind for kind, _ in modules]
    if kinds == ["Transformer", SPLADE]:
        return _Modules((), None, None, None, modules[1][1])
    if kinds == ["Transformer", ANSWER]:
        return _Modules((), None, None, None, None, modules[1][1])
    places = [_ORDER.index(kind) for kind in kinds if kind in _ORDER]
    is_once = all(kinds.count(kind) == 1 for kind in {"Transformer", *kinds} - {"Dense"})
    if (
        places != sorted(places)
        or not is_once
        or {SPLADE, ANSWER} & {*kinds}
        or {MASK, "Pooling"} <= {*kinds}
    ):
        raise ModelLoadError(
            f"{path}: the modules are {', '.join(kinds)}; they must be a Transformer, then at most one Pooling, then "
            f"Dense layers, then at most one Normalize, and without a Pooling at most one {MASK}; or a Transformer "
            f"and a {SPLADE} or {ANSWER}"
        )
    folders = {kind: folder for kind, folder in modules if kind != "Dense"}
    if folders["Transformer"]:
        raise ModelLoadError(
            f"{path}: the model is in the folder {folders['Transformer']!r}; it must be beside this file"
        )
    dense = tuple(folder for kind, folder in modules if kind == "Dense")
    return _Modules(dense, *(folders.get(kind) for kind in ("Pooling", "Normalize", MASK, SPLADE)))


def _pooling_module(model_dir: Path, folder: str | None) -> tuple[str, str, bool]:
    """Return the pooling, its file, and whether prompts are pooled."""
    if folder is None:
        return "all", str(model_dir / MODULES), True
    config = read_json_object(model_dir / folder / "config.json")
    pooling, include_prompt = _pooling(config), config.flag("include_prompt", True)
    if not include_prompt and "weighted_mean" in pooling:
        raise config.unsupported("include_prompt", "true where tokens are weighted by their positions")
    return pooling, config.where, include_prompt


def _pooling(config: JsonObject) -> str:
    """Return the pooling as in `PoolingSpec`, from either form of the file: a word, or a flag for each."""
    if "pooling_mode" in config:
        mode = config.get("pooling_mode")
        modes = mode if isinstance(mode, list) else [mode]
        if modes and all(isinstance(one, str) and one in _POOLINGS for one in modes):
            return "+".join(_POOLINGS[one] for one in modes)
        raise config.unsupported("pooling_mode", f"one of {', '.join(_POOLINGS)}, or a list of them")
    return "+".join(_FLAGS[key] for key in _FLAGS if config.flag(key, False)) or "mean"


def _splade(config: JsonObject) -> tuple[str, str]:
    """Return the pooling over tokens and the activation of vocabulary weights."""
    activation = config.choice("activation_function", tuple(_SPLADE_ACTIVATIONS), "relu")
    return config.choice("pooling_strategy", ("max", "sum"), "max"), _SPLADE_ACTIVATIONS[activation]


def _answers(path: Path) -> tuple[int, ...]:
    config = read_json_object(path)
    config.only("module_input_name", "causal_logits")
    answers = [key for key in ("false_token_id", "true_token_id") if config.get(key) is not None]
    if "true_token_id" not in answers:
        raise config.wrong("true_token_id", "the id of a token")
    return tuple(config.integer(key, low=0) for key in answers)


def _dense(model_dir: Path, folder: str, source: str) -> HeadLayer:
    config = read_json_object(model_dir / folder / "config.json")
    config.only("use_residual", False)
    _check_place(config, source)
    activation = config.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise config.unsupported("activation_function", f"one of torch's {', '.join(_ACTIVATIONS)}")
    return HeadLayer(
        name=f"{folder}/linear",
        inputs=config.integer("in_features", high=1 << 20),
        outputs=config.integer("out_features", high=1 << 20),
        bias=config.flag("bias", True),
        activation=_ACTIVATIONS[activation],
    )


def _check_place(config: JsonObject, source: str) -> None:
    """Check that a module reads and replaces the output of the one before."""
    config.only("module_input_name", source)
    config.only("module_output_name", source)


def _similarity(about: JsonObject, pooling: str, default: str) -> str:
    """Return the similarity of two texts; settings for single vectors do not apply to token vectors."""
    if pooling != "all":
        return about.choice("similarity_fn_name", SIMILARITIES, default)
    said = about.text("similarity_fn_name", "").lower()
    known = heads.SIMILARITIES
    if said not in ("", *known, *SIMILARITIES):
        raise about.unsupported("similarity_fn_name", f"one of {', '.join(known)}")
    return said if said in known else known[0]


def _prompts(about: JsonObject) -> tuple[tuple[str, str], ...]:
    """Return the prompts; null is ignored."""
    prompts = about.child("prompts")
    return tuple((name, prompts.text(name, "")) for name in prompts.values)


def _default_prompt(about: JsonObject, prompts: tuple[tuple[str, str], ...]) -> str | None:
    name = about.text("default_prompt_name") if "default_prompt_name" in about else None
    if name is not None and name not in dict(prompts):
        raise about.wrong("default_prompt_name", f"one of the prompts' names: {', '.join(dict(prompts))}")
    return name


_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TASKS = ("feature-extraction", "sequence-classification")
FILL_MASK_TASKS, GENERATION_TASKS = ("fill-mask",), ("text-generation",)
"""Tasks of models that predict masked tokens, and of language models."""
_NOT_OF_TEMPLATES = ("max_length", "padding", "return_tensors", "truncation")
_NO_LENGTH = 10**9  # tokenizers without a limit give a number above this


@dataclass(frozen=True)
class ModelInput:
    """Preprocessing of texts.

    Attributes:
        max_seq_length: tokens to which texts are truncated; None: not given.
        template_options: variables of the chat template that joins two texts; None: there is no template.
    """

    max_seq_length: int | None
    template_options: tuple[tuple[str, Any], ...] | None = None


def read_model_input(model_dir: Path, tasks: tuple[str, ...] = _TASKS) -> ModelInput:
    """Read the files beside a model that serves one of these tasks.

    Raises:
        ModelLoadError: a file is malformed.
        UnsupportedModelError: a setting is not supported.
    """
    name = next((name for name in _FILES if has_file(model_dir / name)), _FILES[0])
    about, tokenizer = (optional_json_object(model_dir / file) for file in (name, "tokenizer_config.json"))
    if about.flag("do_lower_case", False) and not tokenizer.flag("do_lower_case", False):
        raise about.unsupported("do_lower_case", "false where tokenizer_config.json does not say true")
    about.choice("transformer_task", tasks, tasks[0])
    longest = about.optional_integer("max_seq_length") or _max_length(tokenizer)
    return ModelInput(longest, _template_options(about, tasks))


def _template_options(about: JsonObject, tasks: tuple[str, ...]) -> tuple[tuple[str, Any], ...] | None:
    if "message" not in about.child("modality_config"):
        about.only("processing_kwargs", {})
        return None
    if tasks != GENERATION_TASKS:
        raise about.unsupported("modality_config", "without message: a chat template is put around no text")
    given = about.child("processing_kwargs")
    for key in given.values:
        if key != "chat_template":
            given.only(key, {})
    options = given.child("chat_template")
    for key in _NOT_OF_TEMPLATES:
        options.only(key)
    return tuple((key, value) for key, value in options.values.items() if key != "restore_suffix")


def _max_length(tokenizer: JsonObject) -> int | None:
    most = tokenizer.get("model_max_length")
    is_number = isinstance(most, int | float) and not isinstance(most, bool)
    return int(most) if is_number and 1 <= most < _NO_LENGTH else None
