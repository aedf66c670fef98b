# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files and chat templates of checkpoints, bytes of tokens, and templates of special tokens.

Invariant: transformers is imported only for a model without `tokenizer.json`, to convert its tokenizer once.

`TokenBytes`: the bytes of a sequence of tokens, joined, are UTF-8 of what `tokenizers` decodes from the whole sequence
whenever the whole is valid UTF-8. A byte is emitted by the token that brings it, valid or not, and no token changes
the bytes of an earlier one; so invalid bytes are treated as by any UTF-8 decoder with errors="replace".
Two assumptions hold for all families: a ByteLevel step is a decoder's first, and the steps after ByteFallback keep
the characters that byte tokens spell, except for spaces at the start of the text.

`SpecialTokenTemplate`: a text's tokens without special ones, put into the template, equal those with special tokens.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from quire.engine.added_tokens import TokenizerSettings, add_tokens
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import TEMPLATE_FOLDER, has_file, read_text
from quire.models.json_object import JsonObject, optional_json_object
from quire.version import install_command

logger = logging.getLogger(__name__)

PROBE = "a"


@dataclass(frozen=True)
class EncodedText:
    """Tokens of one text or two; from `second_text_start` on they belong to the second (token type 1)."""

    token_ids: list[int]
    second_text_start: int | None = None


@dataclass(frozen=True)
class SpecialTokenTemplate:
    """Special tokens before, between and behind texts.

    Token type 1 begins `second_offset` tokens behind the first text, if the tokenizer has that type at all.
    """

    prefix: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    second_offset: int | None = None

    @property
    def size(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def bare(self) -> SpecialTokenTemplate:
        """Return the template for texts that bring their own special tokens."""
        return SpecialTokenTemplate(second_offset=None if self.second_offset is None else 0)

    def around(self, first: Sequence[int], second: Sequence[int] = ()) -> EncodedText:
        """Return the texts within the template."""
        ids = [*self.prefix, *first, *self.middle, *second, *self.suffix]
        offset = self.second_offset
        return EncodedText(ids, None if offset is None else len(self.prefix) + len(first) + offset)


def read_template(backend: tokenizers.Tokenizer, num_texts: int) -> SpecialTokenTemplate:
    """Derive the template of this tokenizer for one text, or for two."""
    # Tokenizers say it nowhere but in what they make.
    encoding = backend.encode(PROBE, PROBE if num_texts == 2 else None)
    ids, owners, types = tuple(encoding.ids), encoding.sequence_ids, encoding.type_ids
    if not {*range(num_texts)} <= {*owners}:  # it has no token for the probe
        return SpecialTokenTemplate()
    first_end, last_start = _last(owners, 0) + 1, owners.index(num_texts - 1)
    around = SpecialTokenTemplate(ids[: owners.index(0)], (), ids[_last(owners, num_texts - 1) + 1 :])
    if num_texts == 1:
        return around
    offset = types.index(1) - first_end if 1 in types else None
    return SpecialTokenTemplate(around.prefix, ids[first_end:last_start], around.suffix, offset)


def _last(owners: list[int | None], owner: int) -> int:
    return len(owners) - 1 - owners[::-1].index(owner)


ANCHOR = "a"  # Stands for all preceding text: a token that no decoder drops, merges or trims.
# Leading tokens without text that are remembered, because trimming may depend on them.
MAX_TOKENS_WITHOUT_TEXT = 16
WIDEST_UNFINISHED = 3  # Bytes of the longest unfinished UTF-8 character.
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Decoder steps that treat a token in the middle of a text alike whatever precedes it.
PER_TOKEN_STEPS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


class TokenBytes:
    """Table of a tokenizer: each token's bytes in the middle of a text, filled in on demand.

    Threads may share one: an entry is a function of its id, so filling one twice does no harm.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token = backend.id_to_token
        self._join = backend.decoder.decode if backend.decoder else " ".join
        chain = _chain(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        kinds = [step["type"] for step in chain]
        self._spells_bytes = kinds[:1] == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in kinds
        self.ignores_neighbors = _ignores_neighbors(chain)
        self._inside: dict[int, bytes] = {}

    def inside(self, token_id: int) -> bytes:
        """Return the bytes of a token after other text; empty for an id without a token."""
        added = self._inside.get(token_id)
        if added is None:
            token = self.token(token_id)
            added = b"" if token is None else self.raw(token) or self.difference([ANCHOR], token)
            self._inside[token_id] = added
        return added

    def raw(self, token: str) -> bytes | None:
        """Return the bytes that a token spells, maybe partial characters; None if it is plain text."""
        if self._spells_bytes:
            spelled = [BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in spelled else bytes(spelled)  # type: ignore[arg-type]
        found = BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return bytes.fromhex(found[1]) if found else None

    def difference(self, before: Sequence[str], token: str) -> bytes:
        """Return the UTF-8 of the decoder's added text when `token` follows the tokens `before`."""
        text: str = self._join([*before, token])
        return text[len(self._join(before)) if before else 0 :].encode()


class TextPlace:
    """End of a growing sequence of tokens, at which further tokens are decoded."""

    def __init__(self, table: TokenBytes, token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        """Start after `token_ids`, of which only the last that has a token matters; `skipped` ones add nothing."""
        self._table = table
        self._skipped = skipped
        self._before: list[str] = []
        self._has_begun = False
        last = next((token for i in reversed(token_ids) if (token := self._visible(i)) is not None), None)
        if last is not None:
            self._move(last, has_text=True)
        self.unfinished = self._last_bytes(token_ids)

    def skips(self, token_id: int) -> bool:
        """Return whether a token adds nothing."""
        return token_id in self._skipped

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add here, even if it is special."""
        if self._has_begun and self._table.ignores_neighbors:
            return self._table.inside(token_id)
        token = self._table.token(token_id)
        if token is None:
            return b""
        raw = self._table.raw(token)
        if raw is not None and (self._has_begun or not _is_utf8(raw)):
            return raw
        return self._table.difference(self._before, token)

    def advance(self, token_id: int) -> bytes:
        """Step over a token and return the bytes that it adds."""
        if token_id in self._skipped:
            return b""
        added = self.bytes_of(token_id)
        if not (self._has_begun and self._table.ignores_neighbors):
            token = self._table.token(token_id)
            if token is not None:
                self._move(token, has_text=bool(added))
        return added

    def _move(self, token: str, *, has_text: bool) -> None:
        self._has_begun |= has_text or len(self._before) >= MAX_TOKENS_WITHOUT_TEXT
        self._before = [ANCHOR, token] if self._has_begun else [*self._before, token]

    def _visible(self, token_id: int) -> str | None:
        token: str | None = None if token_id in self._skipped else self._table.token(token_id)
        return token

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Return the last bytes before this place, as many as an unfinished character can have."""
        tail = b""
        for token_id in reversed(token_ids):
            token = self._visible(token_id)
            raw = b"" if token is None else self._table.raw(token)
            if raw is None:
                break
            tail = raw + tail
            if len(tail) >= WIDEST_UNFINISHED:
                break
        return tail[-WIDEST_UNFINISHED:]


def _chain(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Flatten a decoder into its steps."""
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _chain(inner)]


def _ignores_neighbors(chain: Sequence[dict[str, Any]]) -> bool:
    is_fused = False
    for step in chain:
        kind = step["type"]
        if kind not in PER_TOKEN_STEPS or (is_fused and not _touches_only_the_start(step)):
            return False
        is_fused |= kind in ("Fuse", "ByteLevel")
    return True


def _touches_only_the_start(step: dict[str, Any]) -> bool:
    """Return whether a step on the whole text keeps a token's bytes independent of its neighbors."""
    return step["type"] == "Fuse" or (step["type"] == "Strip" and not step["stop"])


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: printable Latin-1 bytes map to themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


TOKENIZER_NAME = "tokenizer.json"
DEFAULT_TEMPLATE = "default"
MAX_TOKENIZER_BYTES = 512 * 1024 * 1024
_NORMALIZER_KEYS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}  # Keys of tokenizer_config.json -> arguments of BERT's normalizer.
_PACKAGES = {
    "tokenizer.model": "sentencepiece and protobuf",
    "spiece.model": "sentencepiece and protobuf",
    "sentencepiece.bpe.model": "sentencepiece and protobuf",
    "tekken.json": "mistral-common",
    "tiktoken.model": "tiktoken",
    "qwen.tiktoken": "tiktoken",
    "vocab.json": None,
    "vocab.txt": None,
}  # Vocabulary files of tokenizers without tokenizer.json -> packages with which transformers reads them.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # they take tokenizer.json as it is


def read_backend(directory: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """Read tokenizer.json, with the added tokens of the files beside it.

    Raises:
        ModelLoadError: the file cannot be read, or does not agree with those beside it.
    """
    path = directory / TOKENIZER_NAME
    try:
        backend = tokenizers.Tokenizer.from_str(read_text(path, MAX_TOKENIZER_BYTES))
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception for every defect of the file
        raise ModelLoadError(f"{path}: is not a valid tokenizer file: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    add_tokens(backend, settings)
    _set_normalizer(backend, settings.file)
    _warn_of_options(backend, settings)
    return backend


def converted_backend(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Convert a tokenizer without tokenizer.json by transformers; also return its special tokens by name.

    Raises:
        ModelLoadError: transformers is not installed or cannot convert it.
    """
    for path in directory.iterdir():  # transformers would wait for a pipe
        _ = path.is_dir() or has_file(path)
    found = {name: package for name, package in _PACKAGES.items() if has_file(directory / name)}
    has = f"{directory} has no tokenizer.json" + (f" but {', '.join(found)}" if found else "")
    hint = "name another one with --tokenizer, or use --skip-tokenizer-init to work on token ids"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelLoadError(
            f"{has}, and transformers, which could convert its tokenizer, is not installed ({install_command('hf')}); "
            f"{hint}"
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # a defect of any of its files raises whatever the code for them meets
        if not found:
            raise ModelLoadError(f"{has} and no other file of a tokenizer; {hint}") from error
        shown = " ".join(str(error).split())
        needs = sorted({package for package in found.values() if package})
        needed = f", which may need {', '.join(needs)} installed" if needs else ""
        raise ModelLoadError(
            f"{has}, and transformers cannot convert its tokenizer{needed} ({shown:.200}); {hint}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(f"the tokenizer in {directory} has no fast form; {hint}")
    backend.no_truncation()
    backend.no_padding()
    logger.warning(
        "%s has no tokenizer.json: its tokenizer was converted with transformers as %s",
        directory,
        type(converted).__name__,
    )
    return backend, dict(converted.special_tokens_map)


def read_chat_templates(directory: Path, config: JsonObject) -> dict[str, str]:
    """Return chat templates by name, from every place that transformers reads; a file goes before a setting.

    Raises:
        ModelLoadError: a file cannot be read, or a template is no text.
    """
    key = "chat_template"
    source = config if config.get(key) else optional_json_object(directory / "chat_template.json")
    named = _templates_in(source, source.get(key) or {})
    files = {path.stem: path for path in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))}
    files[DEFAULT_TEMPLATE] = directory / "chat_template.jinja"
    return named | {name: read_text(path) for name, path in files.items() if has_file(path)}


def _templates_in(source: JsonObject, found: Any) -> dict[str, str]:
    """Return the templates of one setting: a text, texts by name, or a list of objects with name and template."""
    allowed = "a template, an object of templates, or a list of objects with name and template"
    if isinstance(found, str):
        return {DEFAULT_TEMPLATE: found}
    if isinstance(found, list):
        if not all(isinstance(entry, dict) for entry in found):
            raise source.wrong("chat_template", allowed)
        found = {entry.get("name"): entry.get("template") for entry in found}
    if not isinstance(found, dict) or not all(isinstance(one, str) for pair in found.items() for one in pair):
        raise source.wrong("chat_template", allowed)
    return found


def _set_normalizer(backend: tokenizers.Tokenizer, config: JsonObject) -> None:
    """Apply the keys of BERT's normalizer in tokenizer_config.json, unless the tokenizer's class is a generic one."""
    said = {argument: config.get(key) for key, argument in _NORMALIZER_KEYS.items() if key in config}
    if not isinstance(backend.normalizer, tokenizers.normalizers.BertNormalizer) or not said:
        return
    state = json.loads(backend.normalizer.__getstate__())
    has = {argument: state[argument] for argument in (*_NORMALIZER_KEYS.values(), "clean_text")}
    changed = [argument for argument, value in said.items() if value != has[argument]]
    if not changed:
        return
    if config.get("tokenizer_class") in _GENERIC_CLASSES:
        logger.warning(
            "%s: %s differ from the normalizer in tokenizer.json, which holds",
            config.where,
            ", ".join(changed),
        )
        return
    for key in _NORMALIZER_KEYS:
        config.flag(key, False)
    backend.normalizer = tokenizers.normalizers.BertNormalizer(**has | said)


def _warn_of_options(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Name options of tokenizer_config.json that tokenizer.json contradicts, or that are not done."""
    config = settings.file
    around = read_template(backend, 1)
    for name, ids in {"bos": around.prefix, "eos": around.suffix}.items():
        key, token = f"add_{name}_token", settings.literals.get(f"{name}_token")
        if key in config and token and config.get(key) is not (backend.token_to_id(token) in ids):
            _warn(config, key, "the post-processor in tokenizer.json does otherwise, and holds")
    prefixes = _adds_prefix_space(backend)
    if (
        "add_prefix_space" in config
        and prefixes is not None
        and config.get("add_prefix_space") is not prefixes
    ):
        _warn(config, "add_prefix_space", "tokenizer.json does otherwise, and holds")
    if config.get("clean_up_tokenization_spaces") is True and not _cleans_itself(backend):
        _warn(config, "clean_up_tokenization_spaces", "spaces before punctuation stay in decoded text")
    if "fast_tokenizer_files" in config and config.get("fast_tokenizer_files") != [TOKENIZER_NAME]:
        _warn(config, "fast_tokenizer_files", f"{TOKENIZER_NAME} alone is read")


def _warn(config: JsonObject, key: str, effect: str) -> None:
    logger.warning("%s: %s = %s has no effect: %s", config.where, key, json.dumps(config.get(key)), effect)


def _adds_prefix_space(backend: tokenizers.Tokenizer) -> bool | None:
    """Return whether a space is put before texts; None for kinds of tokenizers that know no such option."""
    steps = [*_steps(backend.normalizer, "normalizers"), *_steps(backend.pre_tokenizer, "pretokenizers")]
    adds = [
        step.get("add_prefix_space", step.get("prepend_scheme", "always") != "never")
        for step in steps
        if step["type"] in ("ByteLevel", "Metaspace", "Prepend")
    ]
    return any(adds) if adds else None


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Return the states of a normalizer's or pre-tokenizer's steps."""
    state = json.loads(part.__getstate__()) if part is not None else {key: []}
    steps: list[dict[str, Any]] = state.get(key, [state])
    return steps


def _cleans_itself(backend: tokenizers.Tokenizer) -> bool:
    """Return whether decoding cleans spaces up itself, or transformers does not do so for this kind of model."""
    if isinstance(backend.model, tokenizers.models.BPE):
        return True
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    return state.get("type") == "WordPiece" and bool(state.get("cleanup"))


def named_by_ids(directory: Path, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Return the special tokens that config.json names by their ids.

    Files of tokenizers whose class has these tokens by itself, such as GPT-2's, name them nowhere else.
    """
    config = optional_json_object(directory / "config.json")
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = {}
    for name in ("bos_token", "eos_token"):
        token_id = config.get(f"{name}_id")
        token = backend.id_to_token(token_id) if type(token_id) is int and token_id >= 0 else None
        if token in special:
            named[name] = token
    return named
