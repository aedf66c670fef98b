# SPDX-License-Identifier: Apache-2.0
"""Weights of words: of a text's tokens, with vectors of them, beside the text's (BGE-M3); of all words (SPLADE)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.pooling import PoolingSpec
from quire.engine.startup import prepare
from quire.errors import ModelLoadError, UnsupportedModelError, ValidationError
from quire.kernels import cpu
from quire.pooling_params import PoolingParams
from tests.fixtures.pooled import pool, pooling_core, write_json, write_sentence_transformer
from tests.fixtures.tiny_encoders import encoder_oracle
from tests.models.test_encoders import assert_close, texts

WIDTH = 64


def write_heads(directory: Path) -> dict[str, nn.Linear]:
    """As docs/pooling.md says how to make them of the published files."""
    torch.manual_seed(1)
    heads = {"sparse_linear": nn.Linear(WIDTH, 1), "colbert_linear": nn.Linear(WIDTH, WIDTH)}
    for name, layer in heads.items():
        (directory / name).mkdir()
        tensors = {f"linear.{key}": value for key, value in layer.state_dict().items()}
        save_file(tensors, directory / name / "model.safetensors")
    return heads


@pytest.fixture
def directory(tmp_path: Path, tiny_encoder: Callable[[str], Path]) -> Path:
    copied = tmp_path / "m3"
    shutil.copytree(tiny_encoder("xlm-roberta"), copied)
    write_sentence_transformer(copied, pooling="cls_token", normalizes=True)
    return copied


def spec_of(directory: Path) -> PoolingSpec:
    spec = prepare(EngineConfig.from_args(model=str(directory)), "offline").pooling
    assert spec is not None
    return spec


@torch.inference_mode()
def test_words_have_weights_and_vectors_beside_the_texts(directory: Path) -> None:
    heads, batch = write_heads(directory), texts((9, 30, 1, 12, 17, 6))
    hidden = [
        encoder_oracle("xlm-roberta", directory)(torch.tensor([text])).last_hidden_state[0] for text in batch
    ]
    expected: dict[str, Callable[[Tensor], Tensor]] = {
        "embed": lambda own: nn.functional.normalize(own[0], dim=-1),
        "token_classify": lambda own: heads["sparse_linear"](own).relu(),
        "token_embed": lambda own: nn.functional.normalize(heads["colbert_linear"](own), dim=-1),
    }
    core = pooling_core(directory)
    alone = {task: pool(core, batch, PoolingParams(task=task)) for task in expected}
    for task, of in expected.items():
        for own, numbers in zip(hidden, alone[task], strict=True):
            assert_close(torch.tensor(numbers), of(own))
    tasks = [*expected, *expected]
    mixed = pool(core, batch, [PoolingParams(task=task) for task in tasks])
    for index, task in enumerate(tasks):
        assert mixed[index].tobytes() == alone[task][index].tobytes()
    (plain,) = pool(core, batch[:1], PoolingParams(task="token_classify", use_activation=True))
    assert plain.tobytes() == alone["token_classify"][0].tobytes()


def test_token_id_beyond_the_outputs_is_refused(directory: Path) -> None:
    write_heads(directory)
    spec = spec_of(directory)
    with pytest.raises(ValidationError, match="the model gives 1 numbers"):
        spec.check(PoolingParams(task="token_classify", returned_token_ids=[1]))


def test_heads_that_are_pickled_are_named_and_not_read(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "sparse_linear.pt").write_bytes(b"\x80\x04.")
    with caplog.at_level(logging.WARNING):
        spec = spec_of(directory)
    assert spec.tasks == ("embed", "token_embed")
    assert "sparse_linear.pt is a pickle" in caplog.text


def test_a_head_of_another_shape_is_named(directory: Path) -> None:
    (directory / "sparse_linear").mkdir()
    layer = nn.Linear(WIDTH + 1, 1).state_dict()
    save_file(
        {f"linear.{key}": value for key, value in layer.items()},
        directory / "sparse_linear/model.safetensors",
    )
    with pytest.raises(
        ModelLoadError, match=r"sparse_linear/model\.safetensors: tensor .linear\.weight. has shape"
    ):
        pooling_core(directory)


def write_splade(directory: Path, **options: str) -> None:
    kinds = (("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling"))
    write_json(
        directory / "modules.json", [{"type": f"a.b.{kind}", "path": folder} for kind, folder in kinds]
    )
    write_json(directory / "1_SpladePooling/config.json", options)


@pytest.mark.parametrize(
    ("name", "strategy", "function"),
    [
        ("bert-mlm", "max", "relu"),
        ("distilbert-mlm", "sum", "relu"),
        ("roberta-mlm", "max", "log1p_relu"),
        ("modernbert-mlm", "max", "relu"),
        ("modernbert-mlm", "sum", "log1p_relu"),
    ],
)
def test_splade_model_has_weights_for_all_words(
    name: str, strategy: str, function: str, tmp_path: Path, tiny_encoder: Callable[[str], Path]
) -> None:
    copied, batch = tmp_path / "splade", texts((9, 30, 1, 170, 6))
    shutil.copytree(tiny_encoder(name), copied)
    write_splade(copied, pooling_strategy=strategy, activation_function=function)
    core = pooling_core(copied)
    together = pool(core, batch)
    oracle = encoder_oracle(name, copied)
    with torch.inference_mode():
        for text, found in zip(batch, together, strict=True):
            each = oracle(torch.tensor([text])).logits[0].relu().log1p()
            each = each.log1p() if function == "log1p_relu" else each
            assert_close(torch.tensor(found), each.amax(0) if strategy == "max" else each.sum(0))
    if cpu.available():
        alone = pool(core, batch, together=False)
        assert [one.tobytes() for one in alone] == [one.tobytes() for one in together]
    (plain,) = pool(core, batch[:1], PoolingParams(use_activation=False))
    with torch.inference_mode():
        logits = oracle(torch.tensor(batch[:1])).logits[0]
    assert_close(torch.tensor(plain), logits.amax(0) if strategy == "max" else logits.sum(0))


def test_splade_without_a_masked_lm_head_is_refused(
    tmp_path: Path, tiny_encoder: Callable[[str], Path]
) -> None:
    copied = tmp_path / "splade"
    shutil.copytree(tiny_encoder("bert"), copied)
    write_splade(copied)
    with pytest.raises(UnsupportedModelError, match="SpladePooling needs one of BertForMaskedLM"):
        spec_of(copied)
    for key in ("pooling_strategy", "activation_function"):
        write_splade(copied, **{key: "mean"})
        with pytest.raises(UnsupportedModelError, match=rf"1_SpladePooling/config.json: {key}"):
            spec_of(copied)
