# SPDX-License-Identifier: Apache-2.0
"""From files to parameters: every tensor once, and a clear error where that cannot be."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ConfigError, ModelLoadError
from quire.kernels.cpu import library
from quire.layers.matrix import MatrixLayer
from quire.layers.norm import RMSNorm
from quire.layers.slot import Slot, TensorPart
from quire.models.base import CausalLM
from quire.models.random_weights import RandomWeights
from quire.models.safetensors_file import SafetensorsFile
from quire.models.weight_files import INDEX_NAME, SINGLE_NAME
from tests.fixtures.quick import SOME_MODELS, quick_models
from tests.fixtures.tiny_models import TINY_MODELS
from tests.models.harness import load_tiny, logits_of

PROMPT = [[5, 9, 100, 3, 77, 42, 42, 8, 1]]


def logits(model: CausalLM) -> Tensor:
    return logits_of(model, PROMPT, chunk_sizes=[4])[0]


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / SINGLE_NAME)
    change(tensors)
    save_file(tensors, directory / SINGLE_NAME)
    return directory


def shard(directory: Path, *, with_index: bool) -> Path:
    """Split model.safetensors in two."""
    tensors = load_file(directory / SINGLE_NAME)
    (directory / SINGLE_NAME).unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    if with_index:
        (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded_equals_single(
    with_index: bool, tiny_model: Callable[[str], Path], copy_of: Callable[[str], Path]
) -> None:
    single = load_tiny(tiny_model("llama"))
    sharded = load_tiny(shard(copy_of("llama"), with_index=with_index))
    assert torch.equal(logits(single), logits(sharded))


def test_an_index_hides_other_files(copy_of: Callable[[str], Path]) -> None:
    directory = shard(copy_of("llama"), with_index=True)
    save_file({"stranger": torch.zeros(1)}, directory / "consolidated.safetensors")
    load_tiny(directory)


def test_tied_head_is_the_embedding(tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model("qwen2"))
    assert model.lm_head is model.get_submodule("model.embed_tokens")
    assert load_tiny(tiny_model("llama")).lm_head is not model.lm_head


def test_a_tied_head_may_be_stored_twice(copy_of: Callable[[str], Path]) -> None:
    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load_tiny(rewrite(copy_of("qwen2"), add_head))


def test_unused_tensors_are_skipped(copy_of: Callable[[str], Path]) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    load_tiny(rewrite(copy_of("llama"), lambda tensors: tensors.update(extra)))
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "transformer.h.1.attn.masked_bias": torch.zeros(1),
    }
    load_tiny(rewrite(copy_of("gpt2"), lambda tensors: tensors.update(masks)))


@pytest.mark.parametrize(
    ("name", "prefix"), [("gpt2", "transformer."), ("opt", "model."), ("qwen2", "model.")]
)
def test_names_without_the_base_prefix(
    name: str, prefix: str, tiny_model: Callable[[str], Path], copy_of: Callable[[str], Path]
) -> None:
    def strip(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(prefix)]:
            tensors[key.removeprefix(prefix)] = tensors.pop(key)

    assert torch.equal(logits(load_tiny(rewrite(copy_of(name), strip))), logits(load_tiny(tiny_model(name))))


def test_missing_tensor(copy_of: Callable[[str], Path]) -> None:
    directory = rewrite(
        copy_of("llama"), lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight")
    )
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.1\.self_attn\.k_proj\.weight' is in none"):
        load_tiny(directory)


def test_left_over_tensor(copy_of: Callable[[str], Path]) -> None:
    directory = rewrite(
        copy_of("llama"), lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(2)})
    )
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors: tensor 'model\.layers\.9\.x' has no place"
    ):
        load_tiny(directory)


def test_wrong_shape(copy_of: Callable[[str], Path]) -> None:
    directory = rewrite(
        copy_of("llama"), lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)})
    )
    with pytest.raises(
        ModelLoadError, match=r"'model\.norm\.weight' has shape \[3\], config\.json implies \[64\]"
    ):
        load_tiny(directory)


def test_wrong_dtype(copy_of: Callable[[str], Path]) -> None:
    whole = torch.zeros(64, dtype=torch.int8)
    directory = rewrite(copy_of("llama"), lambda tensors: tensors.update({"model.norm.weight": whole}))
    with pytest.raises(
        ModelLoadError,
        match=r"'model\.norm\.weight' is int8; expected float64 or float32 or float16 or bfloat16",
    ):
        load_tiny(directory)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(0, 40), (30, 64)], r"\[0:40\] and \[30:64\] of it overlap"),
        ([(0, 40), (50, 64)], r"10 elements beside \[0:40\], \[50:64\] have no place"),
        ([(0, 40)], r"24 elements beside \[0:40\] have no place"),
    ],
)
def test_parts_that_overlap_or_are_missing(
    rows: list[tuple[int, int]],
    words: str,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slots(self: RMSNorm, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for start, stop in rows:
            box = (slice(start, stop),)
            yield f"{names[0]}.weight", Slot(self.weight[start:stop], "ones", TensorPart((64,), box, box))

    monkeypatch.setattr(RMSNorm, "slots", slots)
    name = r"'model\.layers\.0\.input_layernorm\.weight'"
    with pytest.raises(ModelLoadError, match=f"tensor {name} does not go into the model once: {words}"):
        load_tiny(tiny_model("llama"))


def test_tensor_in_two_files(copy_of: Callable[[str], Path]) -> None:
    directory = shard(copy_of("llama"), with_index=False)
    save_file({"model.norm.weight": torch.zeros(64)}, directory / "more.safetensors")
    with pytest.raises(ModelLoadError, match=r"more\.safetensors: tensor 'model\.norm\.weight' is also in"):
        load_tiny(directory)


def test_truncated_file(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("llama")
    content = (directory / SINGLE_NAME).read_bytes()
    (directory / SINGLE_NAME).write_bytes(content[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated: tensor '"):
        load_tiny(directory)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, r"names gone\.safetensors, which is missing"),
        ({"weight_map": {"a": "../model.safetensors"}}, "weight_map must be"),
        ({"weight_map": {"a": 3}}, "weight_map must be"),
        ({}, "'weight_map' is missing"),
        ([], "must hold a JSON object"),
    ],
)
def test_bad_index(index: object, words: str, copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("llama")
    (directory / SINGLE_NAME).unlink()
    (directory / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=words):
        load_tiny(directory)


def test_no_safetensors(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("llama")
    (directory / SINGLE_NAME).unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors file$"):
        load_tiny(directory)
    (directory / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin cannot be used, convert to safetensors"):
        load_tiny(directory)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_loaded_model_needs_its_files_no_more(name: str, copy_of: Callable[[str], Path]) -> None:
    """Nobody who overwrites a checkpoint in place changes, or ends, the engine that has loaded it."""
    directory = copy_of(name)
    model = load_tiny(directory)
    before = logits(model)
    size = (directory / SINGLE_NAME).stat().st_size
    (directory / SINGLE_NAME).write_bytes(bytes(size))
    assert torch.equal(logits(model), before)


def test_the_pages_of_a_finished_layer_are_given_back(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    monkeypatch.setattr(SafetensorsFile, "release", lambda self, info: released.append(info.name))
    directory = copy_of("llama")
    load_tiny(directory)
    assert sorted(released) == sorted(load_file(directory / SINGLE_NAME))


@pytest.mark.parametrize("name", quick_models(sorted(TINY_MODELS), SOME_MODELS))
def test_dummy_weights_need_only_a_config(name: str, copy_of: Callable[[str], Path]) -> None:
    directory = copy_of(name)
    (directory / SINGLE_NAME).unlink()
    first, again, other = (load_tiny(directory, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(other))
    assert torch.isfinite(logits(first)).all()


def test_dummy_weights_depend_on_seed_and_name() -> None:
    def filled(seed: int, name: str) -> Tensor:
        slot = Slot(torch.empty(64, 64), "normal")
        RandomWeights(seed).fill([(name, slot)])
        return slot.target

    assert torch.equal(filled(0, "a"), filled(0, "a"))
    assert not torch.equal(filled(0, "a"), filled(0, "b"))
    assert not torch.equal(filled(0, "a"), filled(1, "a"))
    assert filled(0, "a").std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(name: str, dtype: str, tiny_model: Callable[[str], Path]) -> None:
    wide = logits(load_tiny(tiny_model(name)))
    narrow = logits(load_tiny(tiny_model(name), dtype=dtype))
    assert narrow.dtype == torch.float32
    assert (narrow - wide).norm() < 0.1 * wide.norm()


def test_bfloat16_checkpoint_loads_exactly(copy_of: Callable[[str], Path]) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({key: value.bfloat16() for key, value in tensors.items()})

    directory = rewrite(copy_of("gemma2"), halve)
    stored = load_file(directory / SINGLE_NAME)["model.norm.weight"]
    for dtype in ("float32", "bfloat16"):
        weight = load_tiny(directory, dtype=dtype).get_parameter("model.norm.weight")
        assert torch.equal(weight, 1.0 + stored.float()), "Gemma's weight minus one, completed in float32"


def test_learned_positions_bound_the_context(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 257, but the model has learned 256 positions"):
        load_tiny(tiny_model("gpt2"), max_model_len=257)


def test_weights_that_cannot_fit(copy_of: Callable[[str], Path]) -> None:
    huge = {"vocab_size": 1 << 24, "hidden_size": 1 << 20, "num_attention_heads": 4}
    with pytest.raises(ModelLoadError, match="not enough memory for the weights"):
        load_tiny(copy_of("llama"), load_format="dummy", hf_overrides=huge)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_ignored_layers_keep_their_precision(quantization: str, tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model("qwen2")
    exact, rounded = load_tiny(directory), load_tiny(directory, quantization=quantization)
    everything = {"ignore": ["model.layers.*_proj", "lm_head"]}
    ignored = load_tiny(directory, quantization=quantization, quantization_config=everything)
    assert torch.equal(logits(ignored), logits(exact))
    assert 0 < (logits(rounded) - logits(exact)).norm() < 0.5 * logits(exact).norm()


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("head", [None, "int8", "int4"])
def test_the_head_has_a_kind_of_its_own(
    head: str | None, quantization: str, name: str, tiny_model: Callable[[str], Path]
) -> None:
    """In a model whose head is the embedding, too; a table that is only looked up is left alone."""
    options = {"head": head, "group_size": 64} if head == "int4" else {"head": head} if head else {}
    model = load_tiny(tiny_model(name), quantization=quantization, quantization_config=options)
    packed = {
        names[0]: layer.packed for names, layer in model.checkpoint_layers() if isinstance(layer, MatrixLayer)
    }
    heads = [packed.pop(key) for key in ("lm_head", "model.embed_tokens") if key in packed]
    assert [one and (one.scheme.kind, one.scheme.group_size) for one in heads] == [
        (head or "int8", 64 if head == "int4" else 32),
        *([None] if name == "llama" else []),
    ]
    kinds = {name: one and one.scheme.kind for name, one in packed.items()}
    assert {kind for name, kind in kinds.items() if "q_proj" not in name} == {quantization}
    exact = logits(load_tiny(tiny_model(name)))
    assert 0 < (logits(model) - exact).norm() < 0.5 * exact.norm()


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
        {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    ],
    ids=["SmolLM2-135M", "Llama-3.2-1B"],
)
def test_int4_takes_at_most_4_9_bits_for_each_weight(
    sizes: dict[str, int], tiny_model: Callable[[str], Path]
) -> None:
    """Bits per weight count all matrices but the head, with everything that is stored for them."""
    overrides = {**sizes, "head_dim": 64, "num_hidden_layers": 1}
    model = load_tiny(tiny_model("llama"), load_format="dummy", quantization="int4", hf_overrides=overrides)
    packed = [
        matrix
        for _, layer in model.checkpoint_layers()
        if isinstance(layer, MatrixLayer) and layer is not model.lm_head
        for matrix in (layer.packed, getattr(layer, "packed_values", None))
        if matrix is not None
    ]
    assert {each.scheme.kind for each in packed} == {"int4", "int8"}
    assert 8 * sum(each.nbytes for each in packed) <= 4.9 * sum(each.outputs * each.inputs for each in packed)


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("head", ["int8", "int4"])
def test_the_head_alone_is_rounded(head: str, name: str, tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model(name), dtype="bfloat16", quantization_config={"head": head})
    packed = [
        (layer is model.lm_head, layer.packed)
        for _, layer in model.checkpoint_layers()
        if isinstance(layer, MatrixLayer) and layer.packed is not None
    ]
    assert {weights.scheme.kind for is_head, weights in packed if is_head} == {head}
    assert {weights.scheme.kind for is_head, weights in packed if not is_head} == {"float"}
    exact = logits(load_tiny(tiny_model(name)))
    assert 0 < (logits(model) - exact).norm() < 0.5 * exact.norm()


def test_a_head_cannot_be_ignored_and_have_a_kind(tiny_model: Callable[[str], Path]) -> None:
    for pattern in ("lm_head", "model.embed"):
        both = {"head": "int8", "ignore": [pattern]}
        with pytest.raises(ConfigError, match=f"head is 'int8', but ignore leaves it alone by '{pattern}'"):
            load_tiny(tiny_model("qwen2"), quantization="int4", quantization_config=both)


def test_an_ignored_name_that_no_layer_bears(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="ignore names 'lm_haed', which no layer bears"):
        load_tiny(tiny_model("llama"), quantization="int8", quantization_config={"ignore": ["lm_haed"]})


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.zeros(2)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError) as error:
        load_tiny(directory)
    for part in (
        "'lm_head.weight' has shape [263, 64]",
        "'model.extra' has no place",
        "'model.norm.weight' is in none",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(("says", "has"), [(6, 8), (9, 8)])
def test_wrong_number_of_experts_is_reported_once_with_both(
    says: int, has: int, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelLoadError) as error:
        load_tiny(tiny_model("qwen3moe"), hf_overrides={"num_experts": says})
    told = str(error.value)
    layers = "model.layers.0.mlp.experts and 2 more layers"
    assert f"config.json says {says} experts, and the files have {has} in {layers}" in told
    assert not re.search(r"experts\.[678]\.", told)
    for layer in range(3):  # of which the rows of routers follow
        at = f"'model.layers.{layer}.mlp.gate.weight'"
        assert f"{at} has shape [{has}, 64], config.json implies [{says}, 64]" in told
