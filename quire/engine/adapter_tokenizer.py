"""The tokenizer and chat templates that an adapter's directory brings along.

Invariant: token ids mean what they mean in the model's tokenizer, whose tokens all are there; an adapter only adds
some. So whatever goes by ids (grammars, drafts, cached prefixes) is right for all requests.
"""

from __future__ import annotations

import copy
import filecmp
from pathlib import Path

from quire.engine.tokenizer import Tokenizer
from quire.engine.tokenizer_files import (
    TOKENIZER_NAME,
    literal_in,
    read_backend,
    read_chat_templates,
    read_settings,
)
from quire.errors import ModelLoadError


def own_tokenizer(model: Tokenizer, directory: Path, vocab_size: int) -> Tokenizer:
    """The model's tokenizer with what is in an adapter's directory: the same object if that is nothing else.

    What the directory does not have is the model's. Without tokenizer.json, the tokenizer itself is.

    Args:
        vocab_size: ids that the model has.

    Raises:
        ModelLoadError: a file cannot be read, or an id does not mean what it means to the model.
    """
    settings, own = read_settings(directory), copy.copy(model)
    file = directory / TOKENIZER_NAME
    if file.is_file() and (model.file is None or not filecmp.cmp(file, model.file, shallow=False)):
        own = Tokenizer(read_backend(directory), settings, file=file)
        _check(own, model, file, vocab_size)
    own.bos_token = literal_in(settings, "bos_token") or model.bos_token
    own.eos_token = literal_in(settings, "eos_token") or model.eos_token
    own.chat_templates = read_chat_templates(directory, settings) or model.chat_templates
    return model if _is_same(own, model) else own


def _is_same(own: Tokenizer, model: Tokenizer) -> bool:
    facts = [(one.file, one.bos_token, one.eos_token, one.chat_templates) for one in (own, model)]
    return facts[0] == facts[1]


def _check(own: Tokenizer, model: Tokenizer, file: Path, vocab_size: int) -> None:
    """Raise ModelLoadError unless ids mean the same in both, and there are no more than the model has."""
    known, found = model.vocabulary(), own.vocabulary()
    for token, token_id in known.items():
        if found.get(token) != token_id:
            there = f"is {found[token]}" if token in found else "is missing"
            raise ModelLoadError(f"{file}: {token!r:.100} {there}; to the model it is {token_id}")
    if not own.spells_as(model):
        raise ModelLoadError(f"{file}: its decoder is not that of the model's tokenizer")
    taken = set(known.values())
    for token in found.keys() - known.keys():
        token_id = found[token]
        if token_id in taken or token_id >= vocab_size:
            limit = (
                "which is another token's" if token_id in taken else f"and the model has {vocab_size} tokens"
            )
            raise ModelLoadError(f"{file}: the added token {token!r:.100} is {token_id}, {limit}")
