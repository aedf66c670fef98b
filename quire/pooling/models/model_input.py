# SPDX-License-Identifier: Apache-2.0
"""Reads how sentence-transformers passes texts to the model: length limit and preprocessing.

Invariant: torch-free. Settings that would change a text's tokens, or read other outputs than hidden states or classes,
are refused by file and key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.models.checkpoint_files import has_file
from quire.models.json_object import JsonObject, optional_json_object

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
