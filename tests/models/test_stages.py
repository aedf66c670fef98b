# SPDX-License-Identifier: Apache-2.0
"""Stages compute one after the other what one process computes, bit for bit, and have their own layers only."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelLoadError
from quire.layers.kv_cache import kv_cache_specs
from quire.layers.step import StepContext
from quire.models.encoder import EncoderModel
from quire.models.loader import load_model, without_weights
from quire.models.stack import STREAM
from quire.models.stages import Stage, balanced, bytes_read, in_units, partition, stack_of
from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.quick import quick_models
from tests.fixtures.tiny_models import TINY_MODELS
from tests.fixtures.wide_llama import write_wide_llama
from tests.models.harness import logits_of, prepared_config
from tests.models.test_encoders import states_of, texts

SEQUENCES = [[5, 9, 31, 7, 12, 80, 3, 44, 21, 18, 6], [3, 1, 4], [250, 17, 99, 100, 101, 102, 8]]
EVERY_FAMILY = TINY_MODELS.keys() | FOREIGN.keys() | PLAIN.keys()
MOST_STAGES = {"gemma3n": 2}
"""Of models whose last layers are together, since they read keys and values of each other."""


class InARow(nn.Module):
    """All stages of a model, in one process."""

    def __init__(self, config: EngineConfig, of: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(load_model(config, stage=Stage(index, of)) for index in range(of))
        self.compute_logits = self.stages[-1].compute_logits

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        hidden = torch.empty(0)
        for stage in self.stages:
            hidden = stage(inputs, positions, replace(step, intermediate={STREAM: hidden}))
        return hidden


def num_bytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def logits(model: Any) -> Tensor:
    return torch.cat(logits_of(model, SEQUENCES, chunk_sizes=(3, 1, 5)))


def largest_sum(costs: Sequence[int], counts: Sequence[int]) -> int:
    ends = list(itertools.accumulate(counts))
    return max(sum(costs[end - count : end]) for count, end in zip(counts, ends, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_no_other_cut_has_a_smaller_largest_part(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for num, of in ((1, 1), (4, 2), (7, 3), (8, 8), (9, 4)):
        costs = torch.randint(0, 20, (num,), generator=random).tolist()
        cuts = itertools.combinations(range(1, num), of - 1)
        every = [[b - a for a, b in itertools.pairwise([0, *cut, num])] for cut in cuts]
        counts = balanced(costs, of)
        assert list(counts) in every
        assert largest_sum(costs, counts) == min(largest_sum(costs, cut) for cut in every)


def test_durations_that_are_nearly_the_same_are_the_same() -> None:
    """And others keep their proportions, nearly."""
    assert in_units([2e-3, 2.01e-3, 2.04e-3]) == [1000] * 3
    assert len({*in_units([1.99e-3, 2e-3, 2.02e-3, 1.98e-3])}) == 1
    seconds = [1e-4, 3e-4, 7.7e-4, 2e-2]
    for found, wanted in zip(in_units(seconds), seconds, strict=True):
        assert abs(found / (wanted * 1e7) - 1) < 0.026


def test_a_stage_is_of_some_layers_of_a_model() -> None:
    found = [Stage.with_layers(own, 4) for own in (range(1), range(1, 2), range(2, 4), range(4, 4))]
    assert [stage.sizes for stage in found] == [(1, 3), (1, 1, 2), (2, 2), (4, 0)]
    assert [(stage.is_first, stage.is_last) for stage in found] == [
        (True, False),
        (False, False),
        (False, True),
        (False, True),
    ]


def test_each_part_has_something_that_is_kept() -> None:
    """If there is enough of it: NemotronH's layers with experts keep nothing of a request."""
    assert balanced([1, 1, 1, 9, 1], 3) == (3, 1, 1)
    assert balanced([1, 1, 1, 9, 1], 3, [True, False, True, False, True]) == (1, 2, 2)
    assert sum(balanced([1, 1, 1], 2, [True, False, False])) == 3


@pytest.mark.parametrize("name", quick_models(sorted(EVERY_FAMILY), {"opt-post-norm", "zamba2-adapted"}))
def test_stages_of_every_family_have_the_bits_of_the_whole(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    config = prepared_config(tiny_model(name))
    whole = logits(load_model(config))
    for num in range(2, min(MOST_STAGES.get(name, 3), config.arch.num_layers) + 1):
        assert torch.equal(logits(InARow(config, num)), whole)


def test_stage_starts_at_no_layer_that_reads_others_cache() -> None:
    assert balanced([1, 1, 1, 1, 1, 1], 2, joined={3, 4, 5}) == (2, 4)
    assert balanced([5, 1, 9, 1], 2) == (2, 2)
    assert balanced([5, 1, 9, 1], 2, joined={2}) == (1, 3)
    assert sum(balanced([1, 1], 2, joined={1})) == 2


def test_layers_that_read_the_cache_of_others_are_in_their_stage(tiny_model: Callable[[str], Path]) -> None:
    """Gemma 3n's last layers, which read keys and values of layers before them."""
    whole = prepared_config(tiny_model("gemma3n"))
    first = min(whole.arch.shared_kv.values()) + 1
    for layers in range(1, whole.arch.num_layers):
        partition = f"{layers},{whole.arch.num_layers - layers}"
        config = prepared_config(
            tiny_model("gemma3n"), pipeline_parallel_size=2, pipeline_partition=partition
        )
        if layers >= first:
            words = f"would begin with layer {layers}, .*: the last stage begins with layer {first - 1} at"
            with pytest.raises(ConfigError, match=words):
                without_weights(config, stage=Stage(0, 2))
        else:
            assert torch.equal(logits(InARow(config, 2)), logits(load_model(whole)))


def test_a_stage_has_the_blocks_that_its_layers_take_turns_of(tiny_model: Callable[[str], Path]) -> None:
    """And of a block what is for their turns alone: adapters, and keys and values."""
    config = prepared_config(tiny_model("zamba2-adapted"))
    caches, slots = kv_cache_specs(without_weights(config)), without_weights(config).checkpoint_slots()
    stages = [without_weights(config, stage=Stage(index, 2)) for index in range(2)]
    assert sorted(itertools.chain(*map(kv_cache_specs, stages))) == sorted(caches)
    own = [stage.checkpoint_slots().keys() for stage in stages]
    assert own[0] | own[1] == slots.keys()
    assert not any("adapter_list" in name for name in own[0] & own[1])


def test_model_without_stage_support_is_refused(tiny_model: Callable[[str], Path]) -> None:
    config = prepared_config(tiny_model("llama"), model_impl="transformers")
    with pytest.raises(ConfigError, match="TransformersForCausalLM does not support pipeline stages"):
        without_weights(config, stage=Stage(0, 2))


@pytest.mark.parametrize("name", ["bert-texts", "modernbert-tokens", "mpnet", "embedding-gemma"])
def test_stages_of_encoders_have_the_bits_of_the_whole(
    name: str, tiny_encoder: Callable[[str], Path]
) -> None:
    """Hidden states, and the head of the last one; the others have none."""
    config, batch = prepared_config(tiny_encoder(name)), texts((1, 5, 40))
    whole = load_model(config)
    assert isinstance(whole, EncoderModel)
    for num in (2, 3):
        row = InARow(config, num)
        assert torch.equal(torch.cat(states_of(row, batch)), torch.cat(states_of(whole, batch)))  # type: ignore[arg-type]
        heads = [stage.head is not None for stage in row.stages]  # type: ignore[union-attr]
        assert heads == [False] * (num - 1) + [whole.head is not None]


def test_stages_of_a_tied_model_have_its_bits(tiny_model: Callable[[str], Path]) -> None:
    config = prepared_config(tiny_model("llama-tied-bias"), quantization="int8")
    assert torch.equal(logits(InARow(config, 3)), logits(load_model(config)))


def test_a_stage_has_its_layers_and_their_caches_alone(tiny_model: Callable[[str], Path]) -> None:
    """The first and the last stage both hold the embedding table if it is also the output head."""
    config = prepared_config(tiny_model("llama-tied-bias"))
    whole = without_weights(config)
    stages = [without_weights(config, stage=Stage(index, 3)) for index in range(3)]
    layers = [[*kv_cache_specs(stage)] for stage in stages]
    assert [*itertools.chain(*layers)] == [*kv_cache_specs(whole)]
    assert [len(own) for own in layers] == [1, 1, 1]
    first, middle, last = (stage.checkpoint_slots().keys() for stage in stages)
    assert first | middle | last == whole.checkpoint_slots().keys()
    assert first & last == {"model.embed_tokens.weight"}
    assert not first & middle
    assert not middle & last
    sizes = [num_bytes(stage) for stage in stages]
    assert sizes[1] < sizes[0] < sizes[2] < 0.6 * num_bytes(whole)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_read_equally_many_bytes(
    tied: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A head is read with every step, and costs as much as layers do; of a table of tokens some rows are."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "tie_word_embeddings": tied}
    directory = write_wide_llama(tiny_model("llama"), tmp_path / "model", vocab_size=2820, **sizes)
    model = without_weights(prepared_config(directory))
    stack = stack_of(model)
    one, per_head = num_bytes(stack.layers[0]), 2820 * 64 * 4
    assert 1.5 * one < per_head < 2.5 * one
    costs = bytes_read(model, stack)
    assert costs[:-1] == [one] * 5
    assert costs[-1] >= one + per_head
    assert partition(model, stack, 2) == (4, 2)


def test_tensor_unknown_to_all_stages_is_named(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tensors = {
        **load_file(directory / "model.safetensors"),
        "model.layers.9.mlp.up_proj.weight": torch.zeros(1),
    }
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.9\.mlp\.up_proj\.weight' has no place"):
        load_model(prepared_config(directory), stage=Stage(1, 2))
