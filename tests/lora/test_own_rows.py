# SPDX-License-Identifier: Apache-2.0
"""Embedding rows that adapters replace: results equal a model with these rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.lora.checkpoint import Adapter, read_adapter
from quire.lora.store import AdapterSlots
from quire.lora.targets import Targets
from quire.models.base import CausalLM
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import extend, linear_shapes, merge, table_shapes, write_adapter
from tests.models.harness import load_tiny, logits_of
from tests.models.test_parity import assert_close, prompts

TOKENS = [5, 0, 77, 200]
"""Of which the prompts have some."""
LIMIT = 6
CPU = torch.device("cpu")


def with_slots(model_dir: Path, **args: Any) -> tuple[CausalLM, Targets, AdapterSlots]:
    model = load_tiny(model_dir, **args)
    targets = Targets(model)
    return model, targets, AdapterSlots(targets, 3, 16, torch.float32, CPU, max_rows=LIMIT)


def read(directory: Path, targets: Targets) -> Adapter:
    return read_adapter(directory, targets, 16, torch.float32, max_rows=LIMIT)


def changed(table: Tensor, seed: int = 0) -> Tensor:
    """A table with other rows for some tokens."""
    generator = torch.Generator().manual_seed(seed)
    table = table.detach().clone()
    table[TOKENS] = table[TOKENS].flip(1) + 0.3 * torch.randn(table[TOKENS].shape, generator=generator)
    return table


def modules_of(oracle: Any) -> tuple[str, str]:
    """The names of embedding and head."""
    (embedding,) = table_shapes(oracle)
    names = {module: name for name, module in oracle.named_modules()}
    return embedding, names[oracle.get_output_embeddings()]


def prepared(kind: str, directory: Path, oracle: Any) -> None:
    """Write what an adapter has of the tables, in one of the ways in which PEFT does, and let the oracle have it."""
    embedding, head = modules_of(oracle)
    table, outputs = oracle.get_input_embeddings(), oracle.get_output_embeddings()
    is_tied = table.weight is outputs.weight
    rows, other = changed(table.weight), changed(outputs.weight, 1)
    if kind == "trained tokens":
        tensors = {f"{embedding}.token_adapter.trainable_tokens_delta": rows[TOKENS]}
        extend(directory, tensors, trainable_token_indices=TOKENS)
    elif kind == "saved modules":
        extend(directory, {f"{embedding}.weight": rows, f"{head}.weight": other}, modules_to_save=["all"])
    else:
        extend(directory, {f"{embedding}.base_layer.weight": rows})
    table.weight = torch.nn.Parameter(rows)
    if kind == "saved modules":
        outputs.weight = torch.nn.Parameter(other)
    elif is_tied:
        outputs.weight = table.weight


@torch.inference_mode()
def said(oracle: Any, sequences: list[list[int]]) -> list[Tensor]:
    return [oracle(torch.tensor([sequence])).logits[0] for sequence in sequences]


@pytest.mark.parametrize("kind", ["trained tokens", "saved modules", "resized base"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_logits_equal_those_of_a_model_with_these_rows(
    name: str, kind: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    sequences = [[*TOKENS, *sequence] for sequence in prompts((1, 9))]
    model, targets, slots = with_slots(tiny_model(name))
    oracle = oracle_of(tiny_model(name))
    plain = said(oracle, sequences)
    adapter = write_adapter(tmp_path, linear_shapes(oracle) | table_shapes(oracle))
    prepared(kind, adapter, oracle)
    slots.put(1, read(adapter, targets))
    merge(oracle, adapter, {})
    expected = said(oracle, sequences)
    assert_close(logits_of(model, sequences, chunk_sizes=[4], adapters=[1, 1]), expected)
    assert_close(logits_of(model, sequences, chunk_sizes=[5], adapters=[-1, 1]), [plain[0], expected[1]])
    assert_close(logits_of(model, sequences, chunk_sizes=[5], adapters=[0, 2]), plain)


def test_a_slot_forgets_rows_and_no_neighbor_sees_them(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, targets, slots = with_slots(tiny_model("llama"))
    oracle, sequences = oracle_of(tiny_model("llama")), [TOKENS, TOKENS]
    shapes = {"model.layers.0.self_attn.q_proj": (64, 64)}
    few, many = (
        write_adapter(tmp_path / name, shapes, seed=seed) for seed, name in enumerate(("few", "many"))
    )
    rows = oracle.get_input_embeddings().weight[:1] + 1.0
    trained = "model.embed_tokens.token_adapter.trainable_tokens_delta"
    head = "lm_head.token_adapter.trainable_tokens_delta"
    extend(few, {trained: rows, head: rows}, trainable_token_indices={"embed_tokens": [7], "lm_head": [5]})
    prepared("saved modules", many, oracle)
    slots.put(0, read(few, targets))
    slots.put(2, read(many, targets))
    alone = [logits_of(model, sequences[:1], chunk_sizes=[3], adapters=[slot])[0] for slot in (0, 2)]
    assert not torch.equal(*alone)
    mixed = logits_of(model, sequences, chunk_sizes=[4], adapters=[2, 0])
    assert torch.equal(mixed[0], alone[1])
    assert torch.equal(mixed[1], alone[0])
    slots.put(2, read(few, targets))
    assert torch.equal(logits_of(model, sequences[:1], chunk_sizes=[4], adapters=[2])[0], alone[0])


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_only_rows_that_are_not_the_models_count(
    name: str, options: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where the model has rounded them."""
    _, targets, _ = with_slots(tiny_model(name), **options)
    oracle = oracle_of(tiny_model(name))
    embedding, head = modules_of(oracle)
    adapter = write_adapter(tmp_path, {})
    tables = {f"{embedding}.weight": oracle.get_input_embeddings().weight}
    extend(adapter, tables | {f"{head}.weight": changed(oracle.get_output_embeddings().weight)})
    dtype = torch.bfloat16 if "dtype" in options else torch.float32
    (own,) = read_adapter(adapter, targets, 16, dtype, max_rows=LIMIT).rows.values()
    assert own.tokens.tolist() == sorted(TOKENS)


def test_limits_are_named(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    _, targets, _ = with_slots(tiny_model("llama"))
    oracle = oracle_of(tiny_model("llama"))
    table, head = oracle.get_input_embeddings().weight.detach(), oracle.get_output_embeddings().weight
    adapter = write_adapter(tmp_path, {})
    name = "model.embed_tokens.weight"
    extend(adapter, {name: table + 1.0})
    with pytest.raises(
        ModelLoadError, match=f"changes the rows of {len(table)} tokens; --lora-extra-vocab-size is 6"
    ):
        read(adapter, targets)
    extend(adapter, {name: torch.cat((table, table[:2]))})
    with pytest.raises(ModelLoadError, match=r"has shape \[266, 64\]; the model's layer implies \[264, 64\]"):
        read(adapter, targets)
    dora = extend(
        write_adapter(tmp_path / "dora", {"lm_head": (264, 64)}, use_dora=True),
        {"lm_head.weight": changed(head)},
    )
    with pytest.raises(ModelLoadError, match=r"'base_model.model.lm_head.weight' changes rows, .* use_dora"):
        read(dora, targets)
    rows = "model.embed_tokens.token_adapter.trainable_tokens_delta"
    extend(adapter, {name: table, rows: table[:1]}, trainable_token_indices=[264])
    with pytest.raises(ModelLoadError, match=r"is for token 264 .*, but the model has 264"):
        read(adapter, targets)
