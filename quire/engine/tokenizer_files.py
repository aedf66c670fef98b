"""The files in which checkpoints keep a tokenizer and its chat templates.

Invariant: transformers is imported only for a model without `tokenizer.json`, to convert its tokenizer once.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import tokenizers

from quire.engine.added_tokens import TokenizerSettings, add_tokens
from quire.engine.special_tokens import read_template
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import has_file, read_text
from quire.models.json_object import JsonObject, optional_json_object
from quire.version import install_command

logger = logging.getLogger(__name__)

TOKENIZER_NAME = "tokenizer.json"
DEFAULT_TEMPLATE = "default"
TEMPLATE_FOLDER = "additional_chat_templates"
MAX_TOKENIZER_BYTES = 512 * 1024 * 1024
_NORMALIZER_KEYS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""Keys of tokenizer_config.json -> arguments of BERT's normalizer."""
_PACKAGES = {
    "tokenizer.model": "sentencepiece and protobuf",
    "spiece.model": "sentencepiece and protobuf",
    "sentencepiece.bpe.model": "sentencepiece and protobuf",
    "tekken.json": "mistral-common",
    "tiktoken.model": "tiktoken",
    "qwen.tiktoken": "tiktoken",
    "vocab.json": None,
    "vocab.txt": None,
}
"""Files with vocabularies of tokenizers without tokenizer.json -> the packages that transformers reads them with."""
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
