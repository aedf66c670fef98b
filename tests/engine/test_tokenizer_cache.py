# SPDX-License-Identifier: Apache-2.0
"""Tokenizer contexts of adapters: more tokens than the model's, chat templates, neither, or files that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.startup import load_tokenizer, prepare
from quire.engine.tokenizer_cache import TokenizerCache
from quire.errors import ValidationError
from tests.fixtures.tiny_models import VOCAB_SIZE, write_tiny_tokenizer
from tests.lora.own_texts import FIRST_FREE, added, write_own_tokenizer

KEPT = 2


@pytest.fixture(scope="module")
def tokenizers(tiny_model: Callable[[str], Path]) -> TokenizerCache:
    args = {
        "model": str(tiny_model("llama")),
        "enable_lora": True,
        "max_cpu_loras": KEPT,
        "lora_extra_vocab_size": 0,
    }
    config = prepare(EngineConfig.from_args(**args), "offline")
    return TokenizerCache(config, load_tokenizer(config))


def adapter_in(directory: Path, number: int = 1) -> LoRARequest:
    return LoRARequest(directory.name, number, str(directory))


def test_adapter_without_a_tokenizer_uses_the_models(tokenizers: TokenizerCache, tmp_path: Path) -> None:
    assert tokenizers.of(None) is tokenizers.model
    assert tokenizers.of(adapter_in(tmp_path / "nowhere")) is tokenizers.model
    assert tokenizers.of(adapter_in(tmp_path)) is tokenizers.model
    write_tiny_tokenizer(tmp_path)
    assert tokenizers.of(adapter_in(tmp_path, 2)) is tokenizers.model, "what it brings is the same"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("Arr!")
    own, model = tokenizers.of(adapter_in(tmp_path, 3)).tokenizer, tokenizers.model.tokenizer
    assert own is not None
    assert model is not None
    assert own.chat_template == "Arr!" != model.chat_template
    assert own.encode("a<eos>") == model.encode("a<eos>")


def test_added_tokens_are_the_adapters_alone(tokenizers: TokenizerCache, tmp_path: Path) -> None:
    tokens = [added(FIRST_FREE, "<|arr|>"), added(FIRST_FREE + 1, "matey", special=False)]
    write_own_tokenizer(
        tmp_path, lambda file: file["added_tokens"].extend(tokens), eos_token={"content": "<|arr|>"}
    )
    tokenizer_context, model = tokenizers.of(adapter_in(tmp_path)), tokenizers.model
    own, plain = tokenizer_context.tokenizer, model.tokenizer
    assert own is not None
    assert plain is not None
    assert own.encode("<|arr|>matey") == [FIRST_FREE, FIRST_FREE + 1]
    assert len(plain.encode("<|arr|>matey")) == len("<|arr|>matey")
    assert own.decode([FIRST_FREE, FIRST_FREE + 1]) == "matey"
    assert own.encode("<|arr|>", allow_special=False) == plain.encode("<|arr|>")
    assert tokenizer_context.end_ids == [*model.end_ids, FIRST_FREE]
    assert (own.bos_token, own.chat_templates) == (plain.bos_token, plain.chat_templates)


def test_files_are_read_once_and_the_oldest_forgotten(tokenizers: TokenizerCache, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("Arr!")
    requests = [adapter_in(tmp_path, number) for number in range(10, 11 + KEPT)]
    found = [tokenizers.of(request) for request in requests]
    assert [tokenizers.known(request) for request in requests] == [None, *found[1:]]
    assert tokenizers.of(requests[-1]) is found[-1]


def _swap(file: dict[str, Any]) -> None:
    vocab = file["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


Edit = Callable[[dict[str, Any]], Any]
EDITS: dict[str, tuple[Edit, str]] = {
    "missing": (
        lambda file: file["model"]["vocab"].pop("a"),
        "'a' is missing; in the model's tokenizer it is",
    ),
    "moved": (_swap, r"is \d+; in the model's tokenizer it is \d+"),
    "taken": (
        lambda file: file["model"]["vocab"].update(arr=70),
        "'arr' has id 70, which is another token's",
    ),
    "beyond": (
        lambda file: file["model"]["vocab"].update({f"<{i}>": i for i in range(FIRST_FREE, VOCAB_SIZE + 1)}),
        f"has id {VOCAB_SIZE}, and ids end at {VOCAB_SIZE - 1}",
    ),
    "decoder": (
        lambda file: file.update(decoder={"type": "Fuse"}),
        "its decoder differs from that of the model's tokenizer",
    ),
    "no model": (lambda file: file.pop("model"), "is not a valid tokenizer file"),
}


@pytest.mark.parametrize("name", EDITS)
def test_ids_that_mean_something_else_are_refused(
    name: str, tokenizers: TokenizerCache, tmp_path: Path
) -> None:
    edit, problem = EDITS[name]
    write_own_tokenizer(tmp_path, edit)
    with pytest.raises(
        ValidationError, match=f"^adapter '{tmp_path.name}': tokenizer.json.*{problem}"
    ) as error:
        tokenizers.of(adapter_in(tmp_path))
    assert str(tmp_path.parent) not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("chat_template.jinja", b"\xff\xfe", "is not UTF-8 text"),
        ("tokenizer_config.json", b"[]", "must hold a JSON object"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    file: str, content: bytes, problem: str, tokenizers: TokenizerCache, tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValidationError, match=f"^adapter .*: {file}: {problem}"):
        tokenizers.of(adapter_in(tmp_path))
