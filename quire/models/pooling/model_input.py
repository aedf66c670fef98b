"""Reads how sentence-transformers gives texts to the model itself: how long they may be, what is done to them first.

Invariant: torch-free. What would change a text's tokens, or take other numbers of the model than its hidden states or
its classes, is refused by file and key.
"""

from __future__ import annotations

from pathlib import Path

from quire.models.json_object import JsonObject, optional_json_object

_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TASKS = ("feature-extraction", "sequence-classification")
_OF_VOCABULARY = ("fill-mask",)
_NO_LENGTH = 10**9
"""Tokenizers that know no limit say a number above this."""


def read_max_seq_length(model_dir: Path, *, weighs_vocabulary: bool = False) -> int | None:
    """Tokens to which a text is cut; None: no file says so.

    weighs_vocabulary: whether the model's guesses of masked tokens are wanted.

    Raises:
        ModelLoadError: a file is malformed.
        UnsupportedModelError: something is asked for that is not done.
    """
    name = next((name for name in _FILES if (model_dir / name).is_file()), _FILES[0])
    about, tokenizer = (optional_json_object(model_dir / file) for file in (name, "tokenizer_config.json"))
    _check(about, tokenizer, _OF_VOCABULARY if weighs_vocabulary else _TASKS)
    return about.optional_integer("max_seq_length") or _max_length(tokenizer)


def _check(about: JsonObject, tokenizer: JsonObject, tasks: tuple[str, ...]) -> None:
    if about.flag("do_lower_case", False) and not tokenizer.flag("do_lower_case", False):
        raise about.unsupported("do_lower_case", "false where tokenizer_config.json does not say true")
    about.choice("transformer_task", tasks, tasks[0])
    about.only("processing_kwargs", {})
    if "message" in about.child("modality_config"):
        raise about.unsupported("modality_config", "without message: a chat template is put around no text")


def _max_length(tokenizer: JsonObject) -> int | None:
    most = tokenizer.get("model_max_length")
    is_number = isinstance(most, int | float) and not isinstance(most, bool)
    return int(most) if is_number and 1 <= most < _NO_LENGTH else None
