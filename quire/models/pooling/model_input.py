"""Reads how sentence-transformers gives texts to the model itself: how long they may be, what is done to them first.

Invariant: torch-free. What would change a text's tokens, or take other numbers of the model than its hidden states or
its classes, is refused by file and key.
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
TASKS_OF_WORDS, TASKS_OF_ANSWERS = ("fill-mask",), ("text-generation",)
"""Of models whose guesses of masked tokens are wanted, and of those whose next ones are."""
_NOT_OF_TEMPLATES = ("max_length", "padding", "return_tensors", "truncation")
_NO_LENGTH = 10**9
"""Tokenizers that know no limit say a number above this."""


@dataclass(frozen=True)
class ModelInput:
    """What is done to texts.

    Attributes:
        max_seq_length: tokens to which a text is cut; None: no file says so.
        template_options: what the chat template that makes a prompt of two texts is told; None: none does.
    """

    max_seq_length: int | None
    template_options: tuple[tuple[str, Any], ...] | None = None


def read_model_input(model_dir: Path, tasks: tuple[str, ...] = _TASKS) -> ModelInput:
    """What the files beside a model say that is wanted for one of these tasks.

    Raises:
        ModelLoadError: a file is malformed.
        UnsupportedModelError: something is asked for that is not done.
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
    if tasks != TASKS_OF_ANSWERS:
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
