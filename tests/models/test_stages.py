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
from quire.models.base import CausalLM
from quire.models.decoder import STREAM
from quire.models.loader import load_model, without_weights
from quire.models.stages import Stage, balanced
from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.quick import quick_models
from tests.fixtures.tiny_families import TINY_FAMILIES
from tests.models.harness import logits_of, prepared_config

SEQUENCES = [[5, 9, 31, 7, 12, 80, 3, 44, 21, 18, 6], [3, 1, 4], [250, 17, 99, 100, 101, 102, 8]]
EVERY_FAMILY = TINY_FAMILIES.keys() | FOREIGN.keys() | PLAIN.keys()
REFUSED = {
    *("gemma3n", "opt", "opt-no-bias", "opt-post-norm", "rwkv7", "solar", "zamba2", "zamba2-adapted"),
}


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


def num_bytes(model: CausalLM) -> int:
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


def test_each_part_has_something_that_is_kept() -> None:
    """If there is enough of it: NemotronH's layers with experts keep nothing of a request."""
    assert balanced([1, 1, 1, 9, 1], 3) == (3, 1, 1)
    assert balanced([1, 1, 1, 9, 1], 3, [True, False, True, False, True]) == (1, 2, 2)
    assert sum(balanced([1, 1, 1], 2, [True, False, False])) == 3


@pytest.mark.parametrize("name", quick_models(sorted(EVERY_FAMILY), ()))
def test_stages_of_every_family_have_the_bits_of_the_whole(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    config = prepared_config(tiny_model(name))
    if name in REFUSED:
        with pytest.raises(ConfigError, match="hands more than one stream from layer to layer"):
            without_weights(config, stage=Stage(0, 2))
        return
    whole = logits(load_model(config))
    for num in range(2, min(3, config.arch.num_layers) + 1):
        assert torch.equal(logits(InARow(config, num)), whole)


def test_stages_of_a_tied_model_have_its_bits(tiny_model: Callable[[str], Path]) -> None:
    config = prepared_config(tiny_model("llama-tied-bias"), quantization="int8")
    assert torch.equal(logits(InARow(config, 3)), logits(load_model(config)))


def test_a_stage_has_its_layers_and_their_caches_alone(tiny_model: Callable[[str], Path]) -> None:
    """Of a model whose table is the head, too, the first and the last stage have it."""
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


def test_a_tensor_that_no_stage_knows_is_still_named(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tensors = {
        **load_file(directory / "model.safetensors"),
        "model.layers.9.mlp.up_proj.weight": torch.zeros(1),
    }
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.9\.mlp\.up_proj\.weight' has no place"):
        load_model(prepared_config(directory), stage=Stage(1, 2))
