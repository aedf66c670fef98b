# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and chat templates of an adapter's directory.

Invariant: ids stand for the same tokens as in the model's tokenizer, all of whose tokens are present; an adapter only
adds tokens. So whatever goes by ids (grammars, drafts, cached prefixes) is right for all requests.
"""

from __future__ import annotations

import copy
import filecmp
from pathlib import Path

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.added_tokens import TokenizerSettings, read_settings
from quire.engine.tokenizer import Tokenizer
from quire.engine.tokenizer_cache import TokenizerContext
from quire.engine.tokenizer_files import TOKENIZER_NAME, read_backend, read_chat_templates
from quire.errors import ModelLoadError, StartupError, ValidationError
from quire.lora.peft_config import directory_of
from quire.models.checkpoint_files import has_file


def adapter_context(config: EngineConfig, model: TokenizerContext, adapter: LoRARequest) -> TokenizerContext:
    """Return the tokenizer context of an adapter; the model's if its files change nothing.

    Raises:
        ValidationError: the adapter's tokenizer does not fit the model's; names the file.
    """
    tokenizer, directory = model.tokenizer, directory_of(adapter.lora_path)
    assert tokenizer is not None, "adapters need the model's tokenizer"
    try:
        vocab_size = config.arch.vocab_size
        own = own_tokenizer(tokenizer, directory, vocab_size + config.max_added_tokens)
        if config.pooling is not None:
            return _of_pooling(own, model)
        if own is tokenizer:
            return model
        return TokenizerContext.create(config, own, max(vocab_size, own.num_ids))
    except StartupError as error:
        problem = str(error).replace(f"{directory}/", "")  # clients must not see its path
        raise ValidationError(f"adapter {adapter.lora_name!r}: {problem}", param="lora_request") from None
    except OSError as error:  # invalid path
        problem = error.strerror or "its files cannot be read"
        raise ValidationError(f"adapter {adapter.lora_name!r}: {problem}", param="lora_request") from None


def _of_pooling(own: Tokenizer, model: TokenizerContext) -> TokenizerContext:
    """Return the model's context, which also tokenizes the adapters' texts for pooling."""
    assert model.tokenizer is not None
    if own.vocab_size > model.tokenizer.vocab_size:
        raise ModelLoadError(f"{own.file}: adds tokens, which adapters of a pooling model cannot")
    return model


def own_tokenizer(model: Tokenizer, directory: Path, max_ids: int) -> Tokenizer:
    """Return the model's tokenizer changed by the files of an adapter's directory; the same object if they change
    nothing.

    What the directory lacks is the model's.

    Args:
        max_ids: most token ids, those added by an adapter included.

    Raises:
        ModelLoadError: a file cannot be read, or an id stands for another token than in the model's tokenizer.
    """
    settings, own = read_settings(directory), copy.copy(model)
    file = directory / TOKENIZER_NAME
    if has_file(file) and not _is_models(file, settings, model):
        own = Tokenizer(read_backend(directory, settings), {}, file=file)
        _check(own, model, file, max_ids)
    own.named_tokens = model.named_tokens | settings.literals
    own.chat_templates = read_chat_templates(directory, settings.file) or model.chat_templates
    return model if _is_same(own, model) else own


def _is_models(file: Path, settings: TokenizerSettings, model: Tokenizer) -> bool:
    """Return whether the file equals the model's, and no file beside it adds a token."""
    is_copy = model.file is not None and filecmp.cmp(file, model.file, shallow=False)
    return is_copy and settings.all_in(model.vocabulary())


def _is_same(own: Tokenizer, model: Tokenizer) -> bool:
    facts = [(one.file, one.named_tokens, one.chat_templates) for one in (own, model)]
    return facts[0] == facts[1]


def _check(own: Tokenizer, model: Tokenizer, file: Path, max_ids: int) -> None:
    """Raise ModelLoadError unless ids mean the same in both and are within the limit."""
    known, found = model.vocabulary(), own.vocabulary()
    for token, token_id in known.items():
        if found.get(token) != token_id:
            there = f"is {found[token]}" if token in found else "is missing"
            raise ModelLoadError(f"{file}: {token!r:.100} {there}; in the model's tokenizer it is {token_id}")
    if not own.spells_as(model):
        raise ModelLoadError(f"{file}: its decoder differs from that of the model's tokenizer")
    taken = set(known.values())
    for token in found.keys() - known.keys():
        token_id = found[token]
        if token_id in taken:
            raise ModelLoadError(
                f"{file}: the added token {token!r:.100} has id {token_id}, which is another token's"
            )
        if token_id >= max_ids:
            limit = f"ids end at {max_ids - 1} (--lora-extra-vocab-size)"
            raise ModelLoadError(f"{file}: the added token {token!r:.100} has id {token_id}, and {limit}")
