"""Reads what sentence-transformers keeps beside a model: which modules follow it, its prompts, its maximal length.

Invariant: torch-free. What the files ask for is done or refused; the chain of modules must be a model, then one way of
pooling (or none: each token keeps its own vector), then dense layers, then perhaps a norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.config.pooling import HeadLayer
from quire.errors import ModelLoadError
from quire.models.json_object import JsonObject, read_json_object, read_json_objects

MODULES = "modules.json"
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
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
"""In the order in which their vectors are joined, if several are true."""
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
    """What follows a model; None or empty where nothing is said."""

    pooling: str
    pooling_file: str
    """Where that is said."""
    head: tuple[HeadLayer, ...] = ()
    normalizes: bool = False
    max_seq_length: int | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    include_prompt: bool = True
    similarity: str = "cosine"


def read_sentence_transformer(model_dir: Path) -> SentenceTransformer | None:
    """What the files in `model_dir` say; None if it is no model of sentence-transformers.

    Raises:
        ModelLoadError: a file is malformed.
        UnsupportedModelError: they ask for something that is not done; the message names file and key.
    """
    if not (model_dir / MODULES).is_file():
        return None
    modules = _modules(model_dir / MODULES)
    kinds = [kind for kind, _ in modules]
    places = [_ORDER.index(kind) for kind in kinds]
    if places != sorted(places) or any(
        kinds.count(kind) != 1 for kind in {"Transformer", *kinds} - {"Dense"}
    ):
        raise ModelLoadError(
            f"{model_dir / MODULES}: the modules are {', '.join(kinds)}; they must be a Transformer, then at most one "
            "Pooling, then Dense layers, then at most one Normalize"
        )
    folders = {kind: folder for kind, folder in modules if kind != "Dense"}
    if folders["Transformer"]:
        raise ModelLoadError(
            f"{model_dir / MODULES}: the model is in the folder {folders['Transformer']!r}; it must be beside this file"
        )
    pooling, where, include_prompt = "all", str(model_dir / MODULES), True
    if "Pooling" in folders:
        config = read_json_object(model_dir / folders["Pooling"] / "config.json")
        pooling, where = _pooling(config), config.where
        include_prompt = config.flag("include_prompt", True)
        if not include_prompt and "weighted_mean" in pooling:
            raise config.unsupported("include_prompt", "true where tokens are weighted by their positions")
    about = _optional(model_dir / "config_sentence_transformers.json")
    default_prompt = about.text("default_prompt_name") if "default_prompt_name" in about else None
    prompts = _prompts(about)
    if default_prompt is not None and default_prompt not in dict(prompts):
        raise about.wrong("default_prompt_name", f"one of the prompts' names: {', '.join(dict(prompts))}")
    return SentenceTransformer(
        pooling=pooling,
        pooling_file=where,
        head=tuple(_dense(model_dir, folder) for kind, folder in modules if kind == "Dense"),
        normalizes="Normalize" in kinds,
        max_seq_length=_max_seq_length(model_dir),
        prompts=prompts,
        default_prompt=default_prompt,
        include_prompt=include_prompt,
        similarity=about.choice("similarity_fn_name", SIMILARITIES, "cosine"),
    )


def _modules(path: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module, in order; a kind is the last part of a class's name."""
    found = []
    for module in read_json_objects(path):
        kind, folder = module.text("type").rpartition(".")[2], module.text("path", "")
        if kind not in _ORDER:
            raise module.unsupported("type", f"one of {', '.join(_ORDER)}")
        if folder != Path(folder).name:
            raise module.wrong("path", "the name of a folder beside this file")
        found.append((kind, folder))
    return found


def _optional(path: Path) -> JsonObject:
    """A file that may be absent."""
    return read_json_object(path) if path.is_file() else JsonObject(str(path), {})


def _pooling(config: JsonObject) -> str:
    """As `quire.config.pooling.PoolingSpec` has it, from either form of the file: a word, or a flag for each."""
    if "pooling_mode" in config:
        mode = config.get("pooling_mode")
        modes = mode if isinstance(mode, list) else [mode]
        if modes and all(isinstance(one, str) and one in _POOLINGS for one in modes):
            return "+".join(_POOLINGS[one] for one in modes)
        raise config.unsupported("pooling_mode", f"one of {', '.join(_POOLINGS)}, or a list of them")
    return "+".join(_FLAGS[key] for key in _FLAGS if config.flag(key, False)) or "mean"


def _dense(model_dir: Path, folder: str) -> HeadLayer:
    config = read_json_object(model_dir / folder / "config.json")
    config.only("use_residual", False)
    config.only("module_output_name", None, config.get("module_input_name"))
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


def _max_seq_length(model_dir: Path) -> int | None:
    for name in _LENGTH_FILES:
        if (model_dir / name).is_file():
            config = read_json_object(model_dir / name)
            if config.flag("do_lower_case", False) and not _optional(
                model_dir / "tokenizer_config.json"
            ).flag("do_lower_case", False):
                raise config.unsupported(
                    "do_lower_case", "false where tokenizer_config.json does not say true"
                )
            return config.optional_integer("max_seq_length")
    return None


def _prompts(about: JsonObject) -> tuple[tuple[str, str], ...]:
    prompts = about.child("prompts")
    return tuple((name, prompts.text(name)) for name in prompts.values)
