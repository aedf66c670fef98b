# SPDX-License-Identifier: Apache-2.0
"""Encoders: hidden states and scores of classes are those of transformers, and the same bits in any company."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError, UnsupportedModelError
from quire.kernels.attention_metadata import GroupMetadata
from quire.kv_cache.sizing import size_kv_cache
from quire.kv_cache.spec import NULL_BLOCK_ID, KVMemory
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.layers.step import StepContext
from quire.models.built_in import ENCODERS, TRANSFORMERS
from quire.models.encoder import EncoderModel
from quire.worker.input_batch import BlockTable
from quire.worker.inputs import group_metadata
from tests.fixtures.tiny_encoders import TINY_ENCODERS, encoder_oracle
from tests.fixtures.tiny_families import VOCAB_SIZE
from tests.models.harness import load_tiny, prepared_config

LENGTHS = (1, 5, 17, 40, 96)
"""Of texts; windows of the tiny models are 8 to both sides."""
TOLERANCE = 1e-5


def load_encoder(directory: Path, **args: object) -> EncoderModel:
    model = load_tiny(directory, **args)
    assert isinstance(model, EncoderModel)
    return model


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def context(lengths: Sequence[int], token_types: Tensor | None = None) -> StepContext:
    """A step that computes so many texts whole."""
    metadata = GroupMetadata(
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )
    return StepContext((metadata,), token_types=token_types)


@torch.inference_mode()
def states_of(
    model: EncoderModel, batch: list[list[int]], types: list[list[int]] | None = None
) -> list[Tensor]:
    """Hidden states [len, H] of texts that one step computes."""
    lengths = [len(text) for text in batch]
    positions = torch.cat([torch.arange(length) for length in lengths])
    token_types = None if types is None else torch.tensor([kind for row in types for kind in row])
    hidden = model(
        torch.tensor([token for text in batch for token in text]), positions, context(lengths, token_types)
    )
    return list(hidden.split(lengths))


@torch.inference_mode()
def scores_of(model: EncoderModel, states: Tensor) -> Tensor:
    """Return the scores that the head computes from a text's hidden states."""
    assert model.head is not None
    assert model.config.arch.head is not None
    head = model.config.arch.head
    pooled = (
        states if head.of_tokens else states[:1] if head.pooling == "cls" else states.mean(0, keepdim=True)
    )
    result: Tensor = model.head(pooled, StepContext(()))
    return result


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", list(TINY_ENCODERS))
def test_states_and_scores_equal_transformers(name: str, tiny_encoder: Callable[[str], Path]) -> None:
    model, oracle = load_encoder(tiny_encoder(name)), encoder_oracle(name, tiny_encoder(name))
    batch = texts()
    for text, states in zip(batch, states_of(model, batch), strict=True):
        with torch.inference_mode():
            theirs = oracle(torch.tensor([text]), output_hidden_states=True)
        has_head = name.endswith(("-mlm", "-texts", "-tokens", "biases", "-pretraining"))
        last = theirs.hidden_states[-1] if has_head else theirs[0]
        assert last.abs().max() > 0.5, "states too small to tell anything"
        assert_close(states, last[0])
        if model.head is not None:
            assert_close(scores_of(model, states), theirs.logits.view(-1, 3))


@pytest.mark.parametrize("name", [name for name in TINY_ENCODERS if "-" not in name] + ["embedding-gemma"])
def test_a_text_has_the_same_bits_in_any_company(name: str, tiny_encoder: Callable[[str], Path]) -> None:
    model, batch = load_encoder(tiny_encoder(name)), texts((33, 1, 70, 12, 12))
    together = states_of(model, batch)
    for text, states in zip(batch, together, strict=True):
        assert torch.equal(states_of(model, [text])[0], states)


def test_the_cache_and_tables_that_a_worker_makes_will_do(tiny_encoder: Callable[[str], Path]) -> None:
    model = load_encoder(
        tiny_encoder("modernbert"), max_model_len=100, max_num_seqs=4, max_num_batched_tokens=400
    )
    specs = kv_cache_specs(model)
    kv_config = size_kv_cache(model.config, specs, KVMemory(0, ""))
    (group,) = kv_config.groups
    bind_kv_cache(model, kv_config, allocate_kv_cache(kv_config, torch.device("cpu")))
    table = BlockTable(4, 100, group.spec, kv_config.num_blocks, kv_config.parts_per_block(group))
    lengths = (100, 7)
    for row in range(len(lengths)):
        table.append(row, [NULL_BLOCK_ID], 0)
    rows, positions = np.repeat([0, 1], lengths), np.concatenate([np.arange(length) for length in lengths])
    metadata = group_metadata(
        table,
        query_start_loc=torch.tensor([0, 100, 107]).int(),
        seq_lens=torch.tensor(lengths).int(),
        block_tables=torch.from_numpy(table.gather(np.array([0, 1]), 100)),
        slots=torch.from_numpy(table.slots(rows, positions)),
        max_query_len=100,
        max_seq_len=100,
    )
    batch = texts(lengths)
    with torch.inference_mode():
        ids = torch.tensor([token for text in batch for token in text])
        hidden = model(ids, torch.from_numpy(positions), StepContext((metadata,)))
    assert torch.equal(hidden, torch.cat(states_of(model, batch)))
    assert (table.capacity(np.array([0, 1])) >= 100).all()


@pytest.mark.parametrize("name", ["bert", "nomic"])
def test_second_texts_have_tokens_of_their_own(name: str, tiny_encoder: Callable[[str], Path]) -> None:
    model, oracle = load_encoder(tiny_encoder(name)), encoder_oracle(name, tiny_encoder(name))
    batch = texts((9, 30))
    types = [[0] * 4 + [1] * 5, [0] * 20 + [1] * 10]
    for text, kinds, states in zip(batch, types, states_of(model, batch, types), strict=True):
        with torch.inference_mode():
            theirs = oracle(torch.tensor([text]), token_type_ids=torch.tensor([kinds]))[0]
        assert_close(states, theirs[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_sixteen_bits_are_close(dtype: str, tiny_encoder: Callable[[str], Path]) -> None:
    batch = texts()
    exact = torch.cat(states_of(load_encoder(tiny_encoder("bert")), batch))
    rounded = torch.cat(states_of(load_encoder(tiny_encoder("bert"), dtype=dtype), batch))
    assert torch.nn.functional.cosine_similarity(exact, rounded).min() > 0.999


def test_weights_in_eight_bits_are_close(tiny_encoder: Callable[[str], Path]) -> None:
    batch = texts()
    exact = torch.cat(states_of(load_encoder(tiny_encoder("bert")), batch))
    rounded = torch.cat(states_of(load_encoder(tiny_encoder("bert"), quantization="int8"), batch))
    assert torch.nn.functional.cosine_similarity(exact, rounded).min() > 0.99


def test_every_architecture_has_a_checkpoint_in_the_tests() -> None:
    tested = {tiny.is_published_as or tiny.architecture for tiny in TINY_ENCODERS.values()}
    own = {name for name, row in ENCODERS.items() if row.oracle == TRANSFORMERS}
    assert tested >= own


def test_a_context_longer_than_the_learned_positions_is_refused(tiny_encoder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 300, but the model has learned 256 positions"):
        load_tiny(tiny_encoder("roberta"), max_model_len=300)


def test_a_decoder_with_bert_s_parts_is_refused(tiny_encoder: Callable[[str], Path], tmp_path: Path) -> None:
    values = json.loads((tiny_encoder("bert") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"is_decoder": True}))
    with pytest.raises(UnsupportedModelError, match="is_decoder = true is not supported"):
        prepared_config(tmp_path)
