# SPDX-License-Identifier: Apache-2.0
"""Ranks that share out whole experts have the bits of one rank, of one replica or of several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.distributed.group import ALONE, Group
from quire.distributed.shared_memory import share_memory
from quire.errors import ConfigError
from quire.kernels.cpu import library
from quire.layers import expert_exchange
from quire.layers.activation import FUSED
from quire.layers.expert_exchange import OwnTokens, SameTokens
from quire.layers.experts import Expert, take_part
from quire.layers.shard import Shard
from quire.layers.slot import Box
from quire.models.base import CausalLM
from quire.models.loader import load_model, without_weights
from quire.models.weights import MappedCopy
from tests.fixtures.quick import quick, quick_models
from tests.fixtures.thread_ranks import InProcess
from tests.models.harness import load_tiny, logits_of, prepared_config
from tests.models.test_tensor_parallel import CHUNKS, EVERY_FAMILY, SEQUENCES, together

pytestmark = pytest.mark.skipif(library.loaded() is None, reason=library.status())

SHARED: dict[str, Any] = {"enable_expert_parallel": True}
INVARIANT = SHARED | {"tp_invariant": True}
"""Sums of shares in the same slices at every number of ranks: so nothing else changes bits either."""
MODELS = ["qwen3moe", "mixtral", "deepseekv3", "gptoss"]
"""Experts apart and in stacks, a shared one, groups, biases; eight, and six, which four share unevenly."""
WIDE = {
    "load_format": "dummy",
    "hf_overrides": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "head_dim": 64,
        "num_hidden_layers": 2,
    },
}
ROUNDED: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": WIDE | {"quantization": "int8"},
    "int4": WIDE | {"quantization": "int4-plain", "quantization_config": {"symmetric": False}},
}
OTHER_SEQUENCES = [[9, 9, 1], [40, 2, 77, 6]]


def logits(model: CausalLM, sequences: Sequence[Sequence[int]] = SEQUENCES) -> Tensor:
    return torch.cat(logits_of(model, sequences, chunk_sizes=CHUNKS))


@pytest.mark.parametrize("name", quick(MODELS, ("qwen3moe", "gptoss")))
def test_ranks_have_the_bits_of_one(name: str, tiny_model: Callable[[str], Path]) -> None:
    alone = logits(load_tiny(tiny_model(name), **INVARIANT))
    for size in (2, 4):
        assert all(torch.equal(rank, alone) for rank in together(tiny_model(name), size, logits, **INVARIANT))


@pytest.mark.parametrize("name", quick_models(sorted(EVERY_FAMILY), {"jetmoe"}))
def test_every_family_with_experts_has_the_bits_of_one(name: str, tiny_model: Callable[[str], Path]) -> None:
    experts = prepared_config(tiny_model(name)).arch.experts
    if experts is None:
        pytest.skip("a model without experts")
    if experts.activation not in FUSED:
        with pytest.raises(ConfigError, match="no kernel computes experts with the activation"):
            load_tiny(tiny_model(name), **INVARIANT)
        return
    alone = logits(load_tiny(tiny_model(name), **INVARIANT))
    for rank in together(tiny_model(name), 2, logits, **INVARIANT):
        assert torch.equal(rank, alone)


@pytest.mark.parametrize("kind", quick(ROUNDED, ("int4",)))
def test_ranks_have_the_bits_of_one_with_quantized_weights(
    kind: str, tiny_model: Callable[[str], Path]
) -> None:
    options = ROUNDED[kind] | INVARIANT
    alone = logits(load_tiny(tiny_model("qwen3moe"), **options))
    for rank in together(tiny_model("qwen3moe"), 2, logits, **options):
        assert torch.equal(rank, alone)


def test_long_steps_in_parts_have_the_same_bits(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_exchange, "MAX_FLOATS", 3 * 64 * 2)  # two tokens of mixtral, or three
    alone = logits(load_tiny(tiny_model("mixtral"), **INVARIANT))
    for rank in together(tiny_model("mixtral"), 2, logits, **INVARIANT):
        assert torch.equal(rank, alone)


def of_replicas(directory: Path, shares: int, **args: Any) -> list[Tensor]:
    """Return the logits of two replicas' ranks for sequences of their own; the second replica needs fewer steps."""
    config, world = prepared_config(directory, **args), InProcess.group(2 * shares)
    groups: list[Group] = [group for _ in range(2) for group in InProcess.group(shares)]
    most = num_steps(SEQUENCES)

    def rank(number: int) -> Tensor:
        sequences = (SEQUENCES, OTHER_SEQUENCES)[number // shares]
        try:
            shard = Shard.of_group(groups[number] if shares > 1 else ALONE, world[number])
            model = load_model(config, shard)
            found = logits(model, sequences)
            for _ in range(most - num_steps(sequences)):
                take_part(model)
        except BaseException as error:
            world[number].close(str(error))
            groups[number].close(str(error))
            raise
        return found

    with ThreadPoolExecutor(len(world)) as threads:
        return list(threads.map(rank, range(len(world))))


def num_steps(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of steps that `logits_of` takes for these sequences."""
    return max(
        next(
            turn + 1
            for turn in range(100)
            if sum(CHUNKS[(one + index) % len(CHUNKS)] for one in range(turn + 1)) >= len(sequence)
        )
        for index, sequence in enumerate(sequences)
    )


@pytest.mark.parametrize("name", quick(MODELS, ("deepseekv3",)))
def test_replicas_that_share_experts_have_the_bits_of_one(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    """Two replicas of one rank, with nothing else; of two ranks, with sums in slices."""
    for shares, options in ((1, SHARED), (2, INVARIANT)):
        alone = load_tiny(tiny_model(name), **options)
        wanted = [logits(alone, sequences) for sequences in (SEQUENCES, OTHER_SEQUENCES)]
        for number, found in enumerate(of_replicas(tiny_model(name), shares, **options)):
            assert torch.equal(found, wanted[number // shares])


@pytest.mark.parametrize("kind", quick(ROUNDED, ("bfloat16",)))
def test_replicas_have_the_bits_of_one_with_quantized_weights(
    kind: str, tiny_model: Callable[[str], Path]
) -> None:
    options = ROUNDED[kind] | SHARED
    wanted = logits(load_tiny(tiny_model("qwen3moe"), **options))
    assert torch.equal(of_replicas(tiny_model("qwen3moe"), 1, **options)[0], wanted)


@pytest.mark.parametrize("name", ["mixtral", "gptoss"])
def test_a_rank_has_its_experts_and_reads_no_others(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks have one, two, one and two of six experts, which a checkpoint stores singly or in stacks."""
    group, read = InProcess.group(4), []
    fill = MappedCopy.fill

    def note(self: MappedCopy, parts: Iterable[Any]) -> None:
        kept = list(parts)
        read.extend((info.name, slot.source.box) for _, info, slot in kept)
        fill(self, kept)

    monkeypatch.setattr(MappedCopy, "fill", note)
    for rank, numbers in enumerate([{0}, {1, 2}, {3}, {4, 5}]):
        read.clear()
        model = load_model(prepared_config(tiny_model(name), **SHARED), Shard.of_group(group[rank]))
        here = {path for path, module in model.named_modules() if isinstance(module, Expert) and held(module)}
        assert {int(path.rpartition(".")[2]) for path in here} == numbers
        assert {number for one in read for number in experts_of(*one)} == numbers


def experts_of(name: str, box: Box) -> Iterable[int]:
    """Return the numbers of the experts in a part of a tensor."""
    if ".experts." not in name:
        return ()
    apart = re.search(r"experts\.(\d+)\.", name)
    return (int(apart[1]),) if apart else range(box[0].start, box[0].stop)


def test_packed_experts_of_each_rank_have_a_file(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    options = SHARED | {"packed_weights_cache": str(tmp_path)}
    written, read = (of_replicas(tiny_model("qwen3moe"), 1, **options) for _ in range(2))
    assert len(list(tmp_path.iterdir())) == 2
    assert all(map(torch.equal, written, read))


def held(module: nn.Module) -> bool:
    return any(layer.tensors() for layer in module.children())  # type: ignore[operator]


def test_steps_are_recorded_if_the_exchanged_row_count_is_known() -> None:
    assert SameTokens(share_memory(ALONE)).why_not_captured() is None
    assert (
        OwnTokens(ALONE, ALONE, 4).why_not_captured()
        == "the ranks that a token goes to differ from step to step"
    )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "qwen2moe",
            {"tp_invariant": True},
            r"--tp-invariant: model\.layers\.0\.mlp \(SparseMLP\) does not support",
        ),
    ],
)
def test_experts_that_cannot_be_sharded_are_refused(
    name: str, options: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        without_weights(prepared_config(tiny_model(name), **options))
