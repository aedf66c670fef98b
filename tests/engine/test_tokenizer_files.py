# SPDX-License-Identifier: Apache-2.0
"""Tests of a tokenizer's files: options, chat templates, and names that are no regular files."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from quire.engine.tokenizer import Tokenizer
from quire.errors import ModelLoadError
from tests.engine.test_added_tokens import write, write_backend

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_backend(tmp_path, [])
    (tmp_path / "additional_chat_templates").mkdir()
    return tmp_path


TEMPLATE_FORMS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "text": ({"chat_template": "A"}, {"default": "A"}),
    "object": ({"chat_template": {"default": "A", "rag": "B"}}, {"default": "A", "rag": "B"}),
    "list": (
        {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]},
        {"default": "A", "tool_use": "B"},
    ),
    "empty": ({"chat_template": ""}, {}),
    "null": ({"chat_template": None}, {}),
}


@pytest.mark.parametrize("form", TEMPLATE_FORMS)
def test_chat_template_any_form_is_read(form: str, directory: Path) -> None:
    config, expected = TEMPLATE_FORMS[form]
    write(directory, "tokenizer_config.json", config)
    assert Tokenizer.from_dir(directory).chat_templates == expected


def test_chat_template_files_replace_settings(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"chat_template": "A"})
    write(directory, "chat_template.json", {"chat_template": "unused"})
    (directory / "chat_template.jinja").write_bytes(b"\xef\xbb\xbfF")
    (directory / "additional_chat_templates/tool_use.jinja").write_text("T")
    assert Tokenizer.from_dir(directory).chat_templates == {"default": "F", "tool_use": "T"}


@pytest.mark.parametrize("value", [3, ["A"], [{"name": "default"}], {"default": 3}])
def test_chat_template_malformed_is_refused(value: object, directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template must be a template"):
        Tokenizer.from_dir(directory)


def test_template_variables_are_all_named_tokens(directory: Path) -> None:
    config = {"pad_token": "</s>", "image_token": "<s>", "extra_special_tokens": {"boi": "</s>"}}
    write(directory, "tokenizer_config.json", config)
    assert Tokenizer.from_dir(directory).named_tokens == {
        "pad_token": "</s>",
        "image_token": "<s>",
        "boi": "</s>",
    }


def test_split_special_tokens_makes_them_text(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"split_special_tokens": True, "bos_token": "<s>"})
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    assert Tokenizer.from_dir(directory).encode("a<s>b") == theirs.encode("a<s>b")


@pytest.mark.parametrize(
    ("config", "effect"),
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, "the post-processor in tokenizer.json does otherwise"),
        ({"add_eos_token": True, "eos_token": "</s>"}, "the post-processor in tokenizer.json does otherwise"),
        ({"add_prefix_space": True}, "add_prefix_space = true has no effect: tokenizer.json does otherwise"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "tokenizer.json alone is read"),
        ({"added_tokens_decoder": {}, "eos_token": "</s>"}, "is not used"),
    ],
)
def test_option_without_effect_is_warned_of(
    config: dict[str, Any], effect: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        directory, "special_tokens_map.json", {"eos_token": "<s>"} if "added_tokens_decoder" in config else {}
    )
    write(directory, "tokenizer_config.json", config)
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_dir(directory)
    assert effect in caplog.text


def test_added_tokens_file_not_used_is_warned_of(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(directory, "tokenizer_config.json", {"added_tokens_decoder": {}})
    write(directory, "added_tokens.json", {"</s>": 257, "<other>": 258})
    with caplog.at_level(logging.WARNING):
        ours = Tokenizer.from_dir(directory)
    assert "1 of its tokens are not used: '<other>'" in caplog.text
    assert ours.id_of("<other>") is None


@pytest.mark.parametrize("adds", [True, False])
def test_options_tokenizer_json_agrees_with_are_quiet(
    adds: bool, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    if adds:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
        backend.post_processor = template
    backend.save(str(directory / "tokenizer.json"))
    config = {"add_bos_token": adds, "bos_token": "<s>", "add_prefix_space": False, "eos_token": "</s>"}
    write(directory, "tokenizer_config.json", config | {"clean_up_tokenization_spaces": True})
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_dir(directory)
    assert not caplog.text


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
    "name", ["BertTokenizer", "DistilBertTokenizerFast", None, "PreTrainedTokenizerFast"]
)
def test_bert_normalizer_follows_tokenizer_config(name: str | None, lowercase: bool, tmp_path: Path) -> None:
    vocab = {token: index for index, token in enumerate(("[UNK]", "a", "A"))}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer, backend.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"do_lower_case": lowercase, "tokenizer_class": name})
    lowers = lowercase or name == "PreTrainedTokenizerFast"  # a generic class takes tokenizer.json as it is
    assert Tokenizer.from_dir(tmp_path).encode("A") == [1 if lowers else 2]


def make_directory(path: Path) -> None:
    path.mkdir()


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "gone")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 31)  # of holes


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (make_directory, "is no file but a directory"),
    "pipe": (os.mkfifo, "is no file but a pipe"),
    "dangling link": (make_dangling_link, "is a symbolic link whose target does not exist"),
    "loop": (make_loop, "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "valid"),
    "no JSON": (lambda path: path.write_text("{"), "valid"),
    "no UTF-8": (lambda path: path.write_bytes(b'{"a": "\xff"}'), "is not UTF-8 text, by its byte 7"),
    "no object": (
        lambda path: path.write_text("[1]"),
        "must hold a JSON object|is not a valid tokenizer file",
    ),
    "deep": (lambda path: path.write_text('{"a":' * 100_000), "valid"),
    "huge": (make_huge, "more than the limit"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("name", FILES)
def test_bad_file_is_named_in_one_line(name: str, kind: str, directory: Path) -> None:
    make, problem = BAD_FILES[kind]
    path = directory / name
    path.unlink(missing_ok=True)
    make(path)
    if path.suffix == ".jinja" and problem in ("valid", BAD_FILES["no object"][1]):
        return  # any text is a template until it is compiled
    with pytest.raises(ModelLoadError, match=problem) as error:
        Tokenizer.from_dir(directory)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_byte_order_mark_is_accepted(name: str, directory: Path) -> None:
    content = (directory / name).read_bytes() if (directory / name).exists() else b"{}"
    (directory / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert Tokenizer.from_dir(directory).encode("a")


@pytest.mark.parametrize(
    ("name", "package"),
    [("tokenizer.model", "sentencepiece"), ("tekken.json", "mistral-common"), ("tiktoken.model", "tiktoken")],
)
def test_unreadable_slow_tokenizer_names_its_package(name: str, package: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"damaged")
    write(tmp_path, "config.json", {"model_type": "llama"})
    with pytest.raises(ModelLoadError, match=f"no tokenizer.json but {name}, .* may need {package}"):
        Tokenizer.from_dir(tmp_path)


def test_pipe_beside_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.model")
    with pytest.raises(ModelLoadError, match="is no file but a pipe"):
        Tokenizer.from_dir(tmp_path)


def test_vocabulary_and_merges_are_converted(tmp_path: Path) -> None:
    write_backend(tmp_path, [])
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    (tmp_path / "tokenizer.json").unlink()
    write(tmp_path, "vocab.json", vocab | {"<|endoftext|>": 258})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    write(tmp_path, "config.json", {"model_type": "gpt2"})
    ours = Tokenizer.from_dir(tmp_path)
    assert (ours.decode(ours.encode("a b")), ours.eos_token_id) == ("a b", 258)


def test_special_tokens_named_by_ids_alone_are_known(tmp_path: Path) -> None:
    """GPT-2 as published: its class knows its end token, and no file of the tokenizer says which that is."""
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[]))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 1024})
    write(tmp_path, "config.json", {"bos_token_id": 2, "eos_token_id": 2})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|endoftext|>")
    write(tmp_path, "config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})  # no special token, no one id
    assert Tokenizer.from_dir(tmp_path).named_tokens == {}
