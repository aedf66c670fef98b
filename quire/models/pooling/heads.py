"""Heads that stand behind a language model in its other forms: their classes, what is applied to them, their layers.

Invariant: torch-free. Only models whose row is that of a language model have such heads; others bring their own.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.config.pooling import HeadLayer
from quire.errors import ModelLoadError
from quire.models.json_object import JsonObject

MAX_CLASSES = 1 << 20

_CLASSES_BY_DEFAULT = {"reward": 1, "process_reward": 2}
"""Where config.json has neither num_labels nor id2label; transformers takes two classes for all others."""
_BY_PROBLEM = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
_BY_FUNCTION = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_CLASSIFIERS = ("GPT2", "GPTBigCode", "GPTNeo", "GPTNeoX", "Bloom", "Falcon", "Mpt")
"""Families whose token classifiers are not called `score`."""


def classes(file: JsonObject, target: str, function: str = "") -> tuple[tuple[str, ...], str]:
    """The names of a head's classes, and what is applied to their numbers.

    function: what is applied, if another file says it, as torch calls it.
    """
    names = file.child("id2label")
    count = file.integer(
        "num_labels", len(names.values) or _CLASSES_BY_DEFAULT.get(target, 2), high=MAX_CLASSES
    )
    if names.values and names.values.keys() != {str(index) for index in range(count)}:
        raise ModelLoadError(f"{file.where}: id2label must name the classes 0 to {count - 1}")
    labels = tuple(names.text(str(index)) if names.values else f"LABEL_{index}" for index in range(count))
    return labels, "none" if target == "reward" else _activation(file, count, function)


def _activation(file: JsonObject, count: int, function: str) -> str:
    own = file.child("sentence_transformers").text("activation_fn", "")
    function = function or own or file.text("sbert_ce_default_activation_function", "")
    if function:
        name = function.rpartition(".")[2]
        if name not in _BY_FUNCTION:
            raise ModelLoadError(
                f"{file.where}: the cross-encoder's function is {function!r}; it must be torch's "
                f"{', '.join(_BY_FUNCTION)}"
            )
        return _BY_FUNCTION[name]
    if "problem_type" in file:
        return _BY_PROBLEM[file.choice("problem_type", tuple(_BY_PROBLEM))]
    return "sigmoid" if count == 1 else "softmax"


Head = tuple[HeadLayer, ...]


def _two_layers(width: int, count: int) -> Head:
    """Qwen 2.5's rewards (Yang et al., 2024, arXiv:2409.12122)."""
    return (HeadLayer("score.0", width, width, activation="relu"), HeadLayer("score.2", width, count))


def _value(width: int, count: int) -> Head:
    """InternLM 2's rewards (Cai et al., 2024, arXiv:2403.17297)."""
    return (HeadLayer("v_head", width, count, bias=False),)


_OWN: dict[str, Callable[[int, int], Head]] = {
    "Qwen2ForRewardModel": _two_layers,
    "Qwen2ForProcessRewardModel": _two_layers,
    "InternLM2ForRewardModel": _value,
}


def head_of(architecture: str, target: str, width: int, count: int) -> Head:
    """The layers from hidden states [N, width] to `count` numbers, under the checkpoint's names."""
    if architecture in _OWN:
        return _OWN[architecture](width, count)
    if target == "token_classify":
        stem = architecture.removesuffix("ForTokenClassification")
        return (HeadLayer("classifier" if stem in _CLASSIFIERS else "score", width, count),)
    return (HeadLayer("score", width, count, bias=False),)
