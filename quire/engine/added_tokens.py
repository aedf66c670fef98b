# SPDX-License-Identifier: Apache-2.0
"""Added and special tokens that a checkpoint keeps beside tokenizer.json.

Precedence is that of transformers: `added_tokens_decoder` of tokenizer_config.json goes before added_tokens.json and
special_tokens_map.json, which are not used then; without it, the map goes before the config. Named tokens
(`eos_token`) and extra ones that are no added tokens yet become such.
Invariant: a token has the id that the files give it, or the tokenizer is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire.errors import ModelLoadError
from quire.models.json_object import JsonObject, optional_json_object

logger = logging.getLogger(__name__)

CONFIG_NAME, ADDED_NAME, MAP_NAME = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
_DECODER, _EXTRA, _OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_FORM = "a string, or an object with content and flags"


@dataclass(frozen=True)
class TokenizerSettings:
    """Added tokens and settings of a tokenizer, from the files beside tokenizer.json.

    Attributes:
        file: tokenizer_config.json, empty if there is none.
        named: special tokens by the names that chat templates know them by.
        extra: further special tokens.
        listed: added tokens by id, from the file `listed_in`.
        unread: ids by token of added_tokens.json, if another file goes before it.
    """

    file: JsonObject
    named: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    listed: Mapping[int, AddedToken]
    listed_in: str
    unread: Mapping[str, Any] = field(default_factory=dict)

    @property
    def literals(self) -> dict[str, str]:
        """Named tokens: name -> literal."""
        return {name: token.content for name, token in self.named.items()}

    def all_in(self, vocabulary: Collection[str]) -> bool:
        """Return whether a vocabulary has all tokens of these files."""
        return all(
            token.content in vocabulary
            for token in (*self.listed.values(), *self.named.values(), *self.extra)
            if token.content
        )


def read_settings(directory: Path) -> TokenizerSettings:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json, of which all may be missing.

    Raises:
        ModelLoadError: a file cannot be read, or a token in it is malformed.
    """
    config = optional_json_object(directory / CONFIG_NAME)
    mapped, added = (optional_json_object(directory / name) for name in (MAP_NAME, ADDED_NAME))
    named, extra = _named(config), _extra(config, _EXTRA) or _extra(config, _OLD_EXTRA)
    if _DECODER in config:
        _warn_of_unread(mapped, named)
        entries = config.child(_DECODER)
        listed = {_id(entries, key): _token(entries, key) for key in entries.values}
        return TokenizerSettings(config, named, extra, listed, config.where, added.values)
    named = _merged(named, mapped)
    has_extra = _EXTRA in config.values and not isinstance(config.get(_EXTRA), dict)
    knows_extra = has_extra or _OLD_EXTRA in config.values or _EXTRA in mapped
    extra = () if isinstance(mapped.get(_EXTRA), dict) else extra
    extra += _extra(mapped, _EXTRA if knows_extra else _OLD_EXTRA)
    special = {named[name].content for name in _STANDARD if name in named} | {one.content for one in extra}
    return TokenizerSettings(config, named, extra, _old_listed(added, special), added.where)


def add_tokens(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Add to the tokenizer of tokenizer.json what the files beside it list.

    Raises:
        ModelLoadError: a token's id is another token's, or leaves a gap behind the vocabulary.
    """
    has = backend.get_added_tokens_decoder()
    for token_id, token in settings.listed.items():
        _check_id(backend, token_id, token.content, settings.listed_in)
    # Flags in added_tokens_decoder go before those in tokenizer.json; added_tokens.json has none.
    listed = settings.listed if _DECODER in settings.file else {**settings.listed, **has}
    known, names = {repr(token) for token in has.values()}, {*settings.literals.values()}
    new: dict[int, AddedToken] = {}
    for token_id, token in sorted(listed.items()):
        token.special = token.special or token.content in names
        if repr(token) not in known:
            new[token_id] = token
    backend.add_tokens([*new.values()])
    for token_id, token in new.items():
        given = backend.token_to_id(token.content)
        if given != token_id:
            raise ModelLoadError(
                f"{settings.listed_in}: gives {token.content!r:.100} the id {token_id}, and {given} is the next free "
                "one; added tokens must follow the vocabulary of tokenizer.json without a gap"
            )
    _add_special(backend, settings)
    lost = [token for token, token_id in settings.unread.items() if backend.token_to_id(token) != token_id]
    if lost:
        shown = ", ".join(f"{token!r:.100}" for token in lost[:8])
        logger.warning(
            "%s has %s, beside which %s does not count: %d of its tokens are not used: %s",
            settings.file.where,
            _DECODER,
            ADDED_NAME,
            len(lost),
            shown,
        )


def _check_id(backend: tokenizers.Tokenizer, token_id: int, content: str, where: str) -> None:
    """Raise ModelLoadError if tokenizer.json has the token or the id, and not both together."""
    has, holder = backend.token_to_id(content), backend.id_to_token(token_id)
    if has == token_id or (has is None and holder is None):
        return
    of_whom = "" if holder is None else f", which is that of {holder!r:.100} in tokenizer.json"
    elsewhere = "" if has is None else f"; tokenizer.json gives it {has}"
    raise ModelLoadError(f"{where}: gives {content!r:.100} the id {token_id}{of_whom}{elsewhere}")


def _add_special(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Make named and extra tokens special added tokens, unless they are added tokens already."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    every: dict[str, AddedToken] = {}
    for token in (*settings.named.values(), *settings.extra):
        every.setdefault(repr(token), token)  # of tokens with several sets of flags, the last counts
    missing = [token for token in every.values() if token.content and token.content not in added]
    contents = dict.fromkeys(token.content for token in missing)
    unknown = [content for content in contents if backend.token_to_id(content) is None]
    taken = set(backend.get_vocab(with_added_tokens=False).values()) if unknown else set()
    backend.add_tokens(missing)
    for content in unknown:
        given = backend.token_to_id(content)
        if given in taken:
            raise ModelLoadError(
                f"{settings.file.where}: {content!r:.100} is in no vocabulary and has no free id"
            )
        logger.warning(
            "%s: the special token %.100r is in no vocabulary and gets the next free id, %d",
            settings.file.where,
            content,
            given,
        )


def _old_listed(file: JsonObject, special: Collection[str]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, which maps them to ids, by id."""
    found: dict[int, AddedToken] = {}
    for content in file.values:
        token_id, is_special = file.integer(content, low=0), content in special
        if token_id in found:
            raise ModelLoadError(
                f"{file.where}: {found[token_id].content!r:.100} and {content!r:.100} both have the id {token_id}"
            )
        found[token_id] = AddedToken(content, special=is_special, normalized=not is_special)
    return found


def _id(entries: JsonObject, key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ModelLoadError(f"{entries.where}: the key {key!r:.100} must be a token id")
    return int(key)


def _token(file: JsonObject, key: str, *, special: bool = False) -> AddedToken:
    """Return a token that is written as a string, which makes it special, or as an object.

    Raises:
        ModelLoadError: it is neither, or its flags are not true or false.
    """
    content = _content(file.get(key))
    if content is None:
        raise file.wrong(key, _FORM)
    if isinstance(file.get(key), str):
        return AddedToken(content, special=True)
    written = file.child(key)
    token = AddedToken(content, **{name: written.flag(name, False) for name in _FLAGS if name in written})
    token.special = special or token.special
    return token


def _named(file: JsonObject) -> dict[str, AddedToken]:
    """Return tokens by name, the standard ones first; keys such as `add_bos_token` are no tokens."""
    more = [
        key for key, value in file.values.items() if key.endswith("_token") and _content(value) is not None
    ]
    names = [*(name for name in _STANDARD if name in file), *(key for key in more if key not in _STANDARD)]
    return {name: _token(file, name, special=True) for name in names} | _extra_named(file)


def _extra_named(file: JsonObject) -> dict[str, AddedToken]:
    """Return `extra_special_tokens` if they have names."""
    inner = file.child(_EXTRA) if isinstance(file.get(_EXTRA), dict) else JsonObject(file.where, {})
    return {name: _token(inner, name, special=True) for name in inner.values}


def _merged(named: Mapping[str, AddedToken], mapped: JsonObject) -> dict[str, AddedToken]:
    """Return the tokens of the config and of the map, which goes before it for standard names; null unsets them."""
    kept = {
        name: token for name, token in named.items() if name not in mapped.values or name not in _STANDARD
    }
    merged = _named(mapped) | kept | _extra_named(mapped)
    return {name: merged[name] for name in (*_STANDARD, *merged) if name in merged}


def _extra(file: JsonObject, key: str) -> tuple[AddedToken, ...]:
    """Return a list of tokens; none where the key is absent or has tokens with names."""
    values = file.get(key)
    if values is None or (key == _EXTRA and isinstance(values, dict)):
        return ()
    if not isinstance(values, list):
        raise file.wrong(key, "a list of tokens")
    items = JsonObject(f"{file.where}: {key}", {str(index): value for index, value in enumerate(values)})
    return tuple(_token(items, index) for index in items.values)


def _warn_of_unread(mapped: JsonObject, named: Mapping[str, AddedToken]) -> None:
    """Name the tokens of special_tokens_map.json that are other than those in use."""
    for name, token in _named(mapped).items():
        if name not in named or named[name].content != token.content:
            logger.warning(
                "%s: %s = %.100r is not used: %s has %s, beside which the map does not count",
                mapped.where,
                name,
                token.content,
                CONFIG_NAME,
                _DECODER,
            )


def _content(value: Any) -> str | None:
    """Return a token as it is written; None for what is no token."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
