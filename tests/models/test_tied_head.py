# SPDX-License-Identifier: Apache-2.0
"""The output head of a checkpoint, which its tensors decide against config.json."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelLoadError
from quire.models.hf_config import read_hf_config
from quire.models.weight_files import SINGLE_NAME, StoredTensors
from tests.models.harness import load_tiny
from tests.models.test_config_overrides import edit, expected, logits

TIED = [
    *("gemma2", "gemma3", "gemma3n", "gpt2", "opt", "falcon-7b", "bloom", "recurrentgemma", "zamba2"),
    *("mamba", "lfm2", "cohere", "granite", "with-eyes-gemma3", "mpt"),
]
"""Families whose head is the table of tokens, under different names."""


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    path = directory / SINGLE_NAME
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return directory


def table_of(tensors: dict[str, Tensor]) -> str:
    names = [name for name, tensor in tensors.items() if "emb" in name or "wte" in name or "wpe" in name]
    return min((name for name in names if "posit" not in name and "wpe" not in name), key=len)


def with_head(tensors: dict[str, Tensor], *, differs: bool) -> None:
    head = tensors[table_of(tensors)].clone()
    if differs:
        head[-1, -1] += 1.0
    tensors["lm_head.weight"] = head


@pytest.mark.parametrize("name", TIED)
def test_stored_head_that_differs_is_used(
    name: str, copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = rewrite(copy_of(name), lambda tensors: with_head(tensors, differs=True))
    with caplog.at_level(logging.WARNING):
        found = logits(directory)
    torch.testing.assert_close(found, expected(directory), atol=1e-4, rtol=1e-4)
    assert "the stored head is used" in caplog.text


@pytest.mark.parametrize("name", TIED)
def test_stored_head_that_is_equal_is_left_out(
    name: str, tiny_model: Callable[[str], Path], copy_of: Callable[[str], Path]
) -> None:
    directory = rewrite(copy_of(name), lambda tensors: with_head(tensors, differs=False))
    model = load_tiny(directory)
    assert model.config.arch.tie_word_embeddings
    assert sum(p.nbytes for p in model.parameters()) == sum(
        p.nbytes for p in load_tiny(tiny_model(name)).parameters()
    )


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "bloom", "with-eyes-gemma3"])
def test_stored_head_alone_is_the_table_too(
    name: str, tiny_model: Callable[[str], Path], copy_of: Callable[[str], Path]
) -> None:
    def move(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop(table_of(tensors))

    directory = rewrite(copy_of(name), move)
    assert torch.equal(logits(directory), logits(tiny_model(name)))


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_levels_that_disagree_leave_it_to_the_file(
    outer: bool, inner: bool, copy_of: Callable[[str], Path]
) -> None:
    directory = copy_of("with-eyes-mistral3")
    stored = logits(directory)
    edit(edit(directory, {"tie_word_embeddings": outer}), {"tie_word_embeddings": inner}, "text_config")
    assert torch.equal(logits(directory), stored)
    rewrite(directory, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    if outer or inner:
        assert read_hf_config(directory, {}).tie_word_embeddings
        assert not torch.equal(logits(directory), stored)
    else:
        with pytest.raises(ModelLoadError, match=r'lm_head.weight.*"tie_word_embeddings": true'):
            load_tiny(directory)


def test_head_of_other_dtype_is_used(copy_of: Callable[[str], Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        with_head(tensors, differs=False)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()

    directory = rewrite(copy_of("gemma2"), change)
    assert not read_hf_config(directory, {}).tie_word_embeddings
    load_tiny(directory)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{"])
def test_malformed_header_yields_no_tensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(content)
    assert StoredTensors(tmp_path).names == ()
