# SPDX-License-Identifier: Apache-2.0
"""Every layer of every family, cut by hand: the ranks' shares of one checkpoint make together what the whole makes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.config import quantization
from quire.errors import ConfigError
from quire.kernels import reference
from quire.kernels.cpu import library
from quire.kernels.linear import PANEL, WeightScheme
from quire.layers.altup import GaussianTop
from quire.layers.attention_parts import Sinks
from quire.layers.base import Layer
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear, QKVLinear
from quire.layers.matrix import MatrixLayer
from quire.layers.per_head_linear import PerHeadLinear
from quire.layers.quantization import METHODS
from quire.layers.shard import WHOLE, Shard
from quire.layers.slot import Box, length, sizes, uncovered_reason
from quire.layers.step import StepContext
from quire.models import loader
from quire.models.base import CausalLM
from quire.models.registry import ModelRegistry
from quire.models.staged_copy import StagedCopy
from quire.models.weight_files import SINGLE_NAME
from tests.fixtures.folded import folded
from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.quick import quick_models
from tests.fixtures.tiny_families import TINY_FAMILIES
from tests.fixtures.tiny_models import TINY_MODELS
from tests.models.harness import load_tiny, prepared_config
from tests.models.test_staged_copy import LateStream, same

STEP = StepContext(())
FAMILIES = [
    "llama", "llama-tied-bias", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3",
    "opt", "opt-post-norm", "opt-no-bias", "gpt2", "falcon-40b", "qwen2moe", "deepseekv3",
]  # fmt: skip
OTHERS = sorted((TINY_FAMILIES.keys() | FOREIGN.keys() | PLAIN.keys()) - {*FAMILIES, "bloom-six-heads"})
EVERY_FAMILY = quick_models([*FAMILIES, *OTHERS], FAMILIES)
LARGER = {
    128: (
        "hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "laurel_rank", "hidden_size_per_layer_input",
        "adapter_rank", "model_dim",
    ),
    256: (
        "intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner",
        "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
        "lru_width", "block_multiple_of",
    ),
    32: ("head_dim", "kv_channels", "v_head_dim", "linear_head_dim", "linear_value_head_dim", "hidden_size_per_head"),
    1: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    0: ("first_k_dense_replace", "num_dense_layers", "num_kv_shared_layers"),
}  # fmt: skip
"""Sizes of which two ranks have whole groups and chunks of 64, and the keys that have them."""
LISTS = (
    *("layer_types", "layers_block_type", "attention_layers", "activation_sparsity_pattern"),
    *("attn_type_list", "block_configs", "num_key_value_heads_per_layer"),
)
"""Keys with a value for each layer."""
OF_ONE_LAYER: dict[str, dict[str, Any]] = {
    "bskcn_tv": {"bskcn_1": [0], "bskcn_2": [], "bskcn_3": [0], "bskcn_4": []},
    "num_query_heads": {"num_query_heads": [4], "num_kv_heads": [2], "ffn_multipliers": [2.0]},
    "value_dim": {"value_dim": [128]},
}
"""A key -> what stands in files that have it, where they are of one layer."""
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8-precise": {"quantization": "int8", "quantization_config": {"mode": "precise"}},
    "int4": {"quantization": "int4", "quantization_config": {"head": "int4"}},
    "int4-plain": {
        "quantization": "int4-plain",
        "quantization_config": {"symmetric": False, "head": "int4-plain"},
    },
}


def larger(config: dict[str, Any]) -> dict[str, Any]:
    """The config of one layer of sizes that can be cut."""
    sizes = {key: size for size, keys in LARGER.items() for key in keys if config.get(key)}
    # Half of QWen's intermediate size is gate, the other half up.
    widened = {"intermediate_size": 512} if "no_bias" in config and "d_model" not in config else {}
    lists = {key: config[key][:1] for key in LISTS if config.get(key)}
    for key in OF_ONE_LAYER.keys() & config.keys():
        lists |= OF_ONE_LAYER[key]
    lists |= {key: config[key][-1:] for key in ("mlp_layer_types",) if config.get(key)}  # the sparse one
    local = {"attention_types": [[["local"], 1]]} if "attention_types" in config else {}
    sparse = {"moe_layers": [0]} if config.get("moe_layers") else {}
    mixed = (
        {"num_hidden_layers": 2} if {"hidden_size_per_head", "group_norm_size"} & config.keys() else {}
    )  # a layer of each kind
    few = {"num_key_value_heads": 4} if {"kv_channels", "num_experts_per_tok"} <= config.keys() else {}
    nested = {
        key: config[key] | inner
        for key, inner in (
            ("ffn_config", {"ffn_hidden_size": 256}),
            ("linear_attn_config", {"head_dim": 32}),
        )
        if key in config
    }
    rope = config.get("rope_parameters") or {}
    factors = {
        key: rope[key] * 2
        for key in ("short_factor", "long_factor")
        if key in rope and "qk_rope_head_dim" not in config  # of which the rotated part stays as it is
    }  # heads are twice as large
    longrope = {"rope_parameters": rope | factors} if factors else {}
    return config | sizes | widened | lists | local | sparse | mixed | few | nested | longrope


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Name of a tiny model -> a checkpoint of its family, of one layer and of sizes that can be cut, written once."""
    written: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in written:
            written[name] = write(name, tiny_model(name), tmp_path_factory.mktemp(name))
        return written[name]

    return directory


def write(name: str, source: Path, directory: Path) -> Path:
    config = larger(json.loads((source / "config.json").read_text()))
    (directory / "config.json").write_text(json.dumps(config))
    slots = loader.without_weights(prepared_config(directory)).checkpoint_slots()
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tensors = {
        key: 0.1 * torch.randn(parts[0].source.stored_shape, generator=random) for key, parts in slots.items()
    }
    save_file(tensors, directory / SINGLE_NAME)
    return directory


def ranks_of(directory: Path, of: int, **args: Any) -> list[CausalLM]:
    config = prepared_config(directory, **args)
    return [loader.load_model(config, Shard(rank, of)) for rank in range(of)]


def layers_of(whole: CausalLM, ranks: list[CausalLM]) -> Iterator[tuple[Layer, list[Layer]]]:
    shares = zip(*(model.checkpoint_layers() for model in ranks), strict=True)
    for (_, layer), share in zip(whole.checkpoint_layers(), shares, strict=True):
        yield layer, [part for _, part in share]


def outputs(layer: Linear, x: Tensor) -> Tensor:
    """Return a linear's outputs before an activation that needs rows of other ranks, or else after it."""
    sees_rows = any(isinstance(module, GaussianTop) for module in layer.modules())
    return layer.sums(x, STEP) if sees_rows else layer(x, STEP)


def heads(layer: Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert isinstance(layer, QKVLinear)
    return layer.heads(x, STEP)


def num_bytes(layer: Layer) -> int:
    return sum(part.nbytes for part in layer.tensors().values())


@torch.inference_mode()
def check_linear(whole: Linear, ranks: list[Linear], x: Tensor) -> None:
    expected = outputs(whole, x)
    if whole.partition == "whole":
        assert all(torch.equal(outputs(rank, x), expected) for rank in ranks)
    elif whole.partition == "input":
        total = torch.stack([outputs(rank, x[:, rank.columns].contiguous()) for rank in ranks]).sum(0)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
        assert [rank.bias is not None for rank in ranks] == [whole.has_bias] + [False] * (len(ranks) - 1)
    elif isinstance(whole, QKVLinear) and whole.parts == 1:
        shares = zip(*(heads(rank, x) for rank in ranks), strict=True)
        for together, share in zip(heads(whole, x), shares, strict=True):
            replicated = len(share) > together.shape[1]
            assert all(torch.equal(one, together) for one in share) if replicated else True
            assert replicated or torch.equal(torch.cat(share, 1), together)
    else:
        shares = zip(*(by_span(rank, outputs(rank, x)) for rank in ranks), strict=True)
        for together, share in zip(by_span(whole, expected), shares, strict=True):
            is_replicated = share[0].shape == together.shape
            assert all(torch.equal(part, together) for part in share) or not is_replicated
            assert is_replicated or torch.equal(torch.cat(share, 1), together)


def by_span(layer: Linear, out: Tensor) -> tuple[Tensor, ...]:
    """Split a layer's output into the parts that are sharded separately, or return one part if they are merged."""
    sizes = [length(rows) for rows in layer.rows]
    return out.split(sizes, 1) if sum(sizes) == out.shape[1] else (out,)


def check_other(whole: Layer, ranks: list[Layer]) -> None:
    """A layer without a matrix: each rank has all of a tensor, or together they have each element of it.

    They have it once, but for parts that are fewer than the ranks, as the channels that Mamba 2's heads share.
    """
    for key, tensor in whole.tensors().items():
        parts = [rank.tensors()[key] for rank in ranks]
        if parts[0].shape == tensor.shape:
            assert all(torch.equal(part, tensor) for part in parts)
        else:
            elements = torch.cat([part.flatten() for part in parts])
            has_shared = len(elements) > tensor.numel()
            mine, theirs = elements.sort().values, tensor.flatten().sort().values
            assert torch.equal(mine.unique(), theirs.unique()) if has_shared else torch.equal(mine, theirs)


@torch.inference_mode()
def check_table(whole: VocabEmbedding, ranks: list[VocabEmbedding], hidden: Tensor) -> None:
    assert torch.equal(torch.cat([rank.logits(hidden) for rank in ranks], 1), whole.logits(hidden))
    rows = torch.cat([rank(torch.arange(rank.num_rows)) for rank in ranks])
    assert torch.equal(rows, whole(torch.arange(whole.num_rows)))


@torch.inference_mode()
def check_per_head(whole: PerHeadLinear, ranks: list[PerHeadLinear], x: Tensor) -> None:
    outputs, inputs = whole.matrix_shape()
    heads = torch.randn(len(x), whole.spans[0].units, inputs)
    shares = heads.tensor_split(len(ranks), 1)
    together = torch.cat([rank(share, STEP) for rank, share in zip(ranks, shares, strict=True)], 1)
    assert torch.equal(together, whole(heads, STEP))
    assert together.flatten(1).shape[1] == outputs


CHECKS: dict[type[MatrixLayer], Callable[..., None]] = {
    Linear: check_linear,
    PerHeadLinear: check_per_head,
    VocabEmbedding: check_table,
}


needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())


@needs_kernels
@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("kept", QUANTIZATIONS)
def test_two_ranks_equal_one(kept: str, name: str, checkpoint: Callable[[str], Path]) -> None:
    """Outputs by their bits, sums over cut inputs but for the order of two summands; and each holds half."""
    options = QUANTIZATIONS[kept]
    whole, ranks = load_tiny(checkpoint(name), **options), ranks_of(checkpoint(name), 2, **options)
    random, cuts = torch.Generator().manual_seed(1), set()
    for layer, share in layers_of(whole, ranks):
        if isinstance(layer, MatrixLayer):
            (check,) = (check for kind, check in CHECKS.items() if isinstance(layer, kind))
            check(layer, share, torch.randn(5, layer.inputs, generator=random))
            cuts.add(layer.partition)
        if isinstance(layer, Sinks):
            assert torch.equal(torch.cat([rank.weight for rank in share]), layer.weight)  # type: ignore[misc]
        elif not isinstance(layer, MatrixLayer) or layer.partition == "whole":
            check_other(layer, share)
        else:
            has_shared = any(span.replicated and span.units == 1 for span in layer.spans)
            # Blocks of int4 that are cut apart have scales and minimums in float32.
            most = 0.7 if has_shared or kept == "int4" else 0.55
            assert layer.num_rows < 2 * PANEL or max(map(num_bytes, share)) < most * num_bytes(layer)
    assert cuts >= {"output", "input"}


@needs_kernels
def test_ranks_beyond_the_key_value_heads_share_them(checkpoint: Callable[[str], Path]) -> None:
    """Four ranks, two of which have the same of the model's two heads of keys and values."""
    whole, ranks = load_tiny(checkpoint("phi3")), ranks_of(checkpoint("phi3"), 4)
    x = torch.randn(5, 128)
    with torch.inference_mode():
        _, k, v = heads(qkv_of(whole), x)
        for number, rank in enumerate(ranks):
            assert qkv_of(rank).head_counts == (1, 1, 1)
            _, own_k, own_v = heads(qkv_of(rank), x)
            assert torch.equal(own_k, k[:, number // 2, None])
            assert torch.equal(own_v, v[:, number // 2, None])


def qkv_of(model: CausalLM) -> QKVLinear:
    return next(layer for layer in model.modules() if isinstance(layer, QKVLinear))


@pytest.mark.parametrize("name", ["llama-tied-bias", "phi3", "gemma2", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=["float", "int8"])
def test_staged_shard_has_the_same_bits(
    name: str, options: dict[str, Any], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(checkpoint(name), 2, **options)
    monkeypatch.setattr(loader, "tensor_reader", lambda device: StagedCopy(LateStream(), 1000))
    for mapped, staged in zip(ranks, ranks_of(checkpoint(name), 2, **options), strict=True):
        same(staged, mapped)


@needs_kernels
@pytest.mark.parametrize("name", ["qwen2", "phi3", "gpt2"])
def test_shards_of_random_weights_equal_the_whole(name: str, checkpoint: Callable[[str], Path]) -> None:
    options = {"load_format": "dummy"}
    whole, ranks = load_tiny(checkpoint(name), **options), ranks_of(checkpoint(name), 2, **options)
    for layer, share in layers_of(whole, ranks):
        if isinstance(layer, Linear):
            check_linear(layer, share, torch.randn(5, layer.inputs))  # type: ignore[arg-type]


@needs_kernels
def test_packed_shares_of_two_ranks_have_files_of_their_own(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    options = {"packed_weights_cache": str(tmp_path), "quantization": "int8"}
    first, second = ranks_of(checkpoint("llama"), 2, **options), ranks_of(checkpoint("llama"), 2, **options)
    assert len(list(tmp_path.iterdir())) == 2
    for mapped, made in zip(second, first, strict=True):
        same(mapped, made)


@folded("name", EVERY_FAMILY)
@folded("of", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_region(name: str, of: int, checkpoint: Callable[[str], Path]) -> None:
    """Nothing is left to a rank that does not take it; what is taken twice is replicated."""
    config = prepared_config(checkpoint(name))
    ranks = [loader.without_weights(config, Shard(rank, of)).checkpoint_slots() for rank in range(of)]
    for key in ranks[0]:
        for place, slot in enumerate(ranks[0][key]):
            region, taken = slot.source.region, {}
            for rank in ranks:
                box = rank[key][place].source.box
                if prod(sizes(box)):
                    taken[str(box)] = box
            inside = [relative(box, region) for box in taken.values()]
            assert uncovered_reason(sizes(region), inside) is None, key


def relative(box: Box, region: Box) -> Box:
    sides = zip(box, region, strict=True)
    return tuple(slice(side.start - whole.start, side.stop - whole.start) for side, whole in sides)


@pytest.mark.parametrize(
    ("options", "of", "words"),
    [
        ({}, 3, "self_attn.qkv_proj: 4 units of 32 outputs cannot be divided evenly among 3 ranks"),
        ({"quantization": "int4", "quantization_config": {"group_size": 128}}, 2,
         "self_attn.o_proj: 128 inputs cannot be split over 2 ranks in multiples of 128, which int4 weights need"),
        ({"quantization": "int8"}, 4,
         "self_attn.o_proj: 128 inputs cannot be split over 4 ranks in multiples of 64, which int8 weights need"),
    ],
)  # fmt: skip
def test_a_cut_through_a_head_or_a_group_is_refused(
    options: dict[str, Any], of: int, words: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        ranks_of(checkpoint("qwen2"), of, **options)


@needs_kernels
@folded("group_size", [0, 128])
@folded("first_half", [1.0, 1e-9, 1e9])
def test_a_rank_reads_all_inputs_only_to_find_a_scale_for_all(group_size: int, first_half: float) -> None:
    """Integers and scales of a share are those of the whole, whose groups lie within shares."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * torch.arange(256)
    weight[:, :128] *= first_half
    scheme = WeightScheme("int8", group_size)

    def made(shard: Shard) -> Linear:
        layer = Linear(
            in_features=256, out_features=16, bias=False, dtype=torch.float32, name="fc", partition="input"
        )
        layer.create_weights(METHODS["int8"](scheme), shard)
        assert layer.weight is not None
        read = layer.columns if group_size else slice(0, 256)
        layer.weight.data.copy_(weight[:, read])
        layer.finish_loading()
        return layer

    whole = reference.unpack_weight(made(WHOLE).matrix())
    ranks = [made(Shard(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([reference.unpack_weight(rank.matrix()) for rank in ranks], 1), whole)


def test_one_scale_for_all_of_a_matrix_cannot_be_cut() -> None:
    method = METHODS["fp8"](WeightScheme("fp8", per_tensor=True))
    layer = Linear(
        in_features=4, out_features=4, bias=False, dtype=torch.float32, name="fc", partition="output"
    )
    with pytest.raises(ConfigError, match="fc: fp8 with one scale per tensor cannot be sharded"):
        layer.create_weights(method, Shard(0, 2))


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a_layer_bears_the_name_of_its_place(name: str, tiny_model: Callable[[str], Path]) -> None:
    config = prepared_config(tiny_model(name))
    with torch.device("meta"):
        model = ModelRegistry.resolve_model_cls(config.arch.architecture)(config=config, prefix="draft.")
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
    assert {path: layer.name for path, layer in layers.items()} == {path: f"draft.{path}" for path in layers}


def test_methods_have_the_names_in_the_config() -> None:
    assert set(METHODS) == {"float", *quantization.METHODS} - {"int4-plain"}, (
        "which is another scheme of int4"
    )
