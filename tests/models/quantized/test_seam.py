# SPDX-License-Identifier: Apache-2.0
"""Tests that hold for every encoding: the page, other ways to load, and files that contradict themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelLoadError, StartupError, UnsupportedModelError
from quire.layers.matrix import MatrixLayer
from quire.layers.quantized.bitsandbytes import STORAGES
from quire.layers.quantized.codec import codec_of
from quire.models.hf_config import read_hf_config
from quire.models.json_object import JsonObject
from quire.models.loader import load_model
from quire.models.quantized.reader import METHODS
from quire.models.weight_files import SINGLE_NAME
from tests.fixtures.folded import folded
from tests.models.harness import load_tiny, prepared_config
from tests.models.quantized.checkpoints import error_of_logits, same, write
from tests.models.quantized.test_awq import CONFIG as AWQ
from tests.models.quantized.test_gptq import WRITERS, Writer
from tests.models.quantized.test_published_encodings import CASES, but_head
from tests.models.test_expert_parallel import logits, of_replicas
from tools.quantized_page import EXAMPLES, PAGE, page

FP8 = CASES["fp8-tensor"]


def test_page_matches_the_code() -> None:
    assert Path(PAGE).read_text() == page(), "run: python -m tools.quantized_page"


def form(config: dict[str, Any]) -> tuple[Any, ...]:
    """Return a config's encoding of a linear layer; all sizes above 1 count as one."""
    found = METHODS.resolve(config["quant_method"])(JsonObject("config.json", config))
    encoding = found.encoding_of(DOWN)
    assert encoding is not None
    options = {
        key: min(value, 2) if key in ("group_size", "grid_outputs", "grid_inputs") else value
        for key, value in encoding.options.items()
    }
    return found.method, encoding.kind, tuple(sorted(options.items()))


def test_the_logits_of_every_row_are_tested() -> None:
    """Experts in MXFP4 are by tests/models/test_mxfp4.py."""
    of_gptq = [writer.config() for (writer,) in (each.values for each in WRITERS)]
    tested = [dict(case.config) for case in CASES.values()] + of_gptq
    forms = {form(config) for config in (*tested, AWQ)}
    assert {
        form(example.config) for example in EXAMPLES if example.config["quant_method"] != "mxfp4"
    } <= forms


def test_numbers_stay_packed(llama: Path, tmp_path: Path) -> None:
    """In four bits, where a format has them, and not as the floats that they stand for."""
    writer = Writer(4, 128)
    path, _ = write(llama, tmp_path, writer.config(), writer, but_head)
    kinds = {
        layer.matrix().scheme.kind
        for _, layer in load_tiny(path).checkpoint_layers()
        if isinstance(layer, MatrixLayer) and ".mlp." in layer.name
    }
    assert kinds == {"int4"}


@pytest.mark.parametrize("name", ["ct-w4a16-asym-reordered", "ct-int8-channel", "bnb-nf4", "fp8-blocks"])
def test_packed_weights_are_kept_in_a_file(name: str, llama: Path, tmp_path: Path) -> None:
    path, _ = write(llama, tmp_path / "model", dict(CASES[name].config), CASES[name].writer, but_head)
    config = prepared_config(path, packed_weights_cache=str(tmp_path / "cache"))
    same(*(load_model(config) for _ in range(2)))


@pytest.mark.parametrize("kind", ["gptq", "gptq in any order", "fp8"])
@pytest.mark.parametrize("family", ["deepseekv3", "qwen2moe", "phi3", "gptneox"])
def test_all_kinds_of_layers_read_it(
    family: str, kind: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Parts of one module in two layers, experts, q, k and v in one tensor, and in turns."""
    gptq = Writer(4, 32, reordered=kind == "gptq in any order")
    writer, config = (FP8.writer, dict(FP8.config)) if kind == "fp8" else (gptq, gptq.config())
    left = ("lm_head", "embed_out", "gate")
    paths = write(tiny_model(family), tmp_path, config, writer, lambda name: not name.endswith(left))
    assert error_of_logits(*paths) < 1e-4


@pytest.mark.parametrize("name", ["ct-int8-channel", "bnb-nf4", "fp8-tensor"])
def test_experts_are_distributed_whole(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Whether they are cut by axes, kept in rows of any length, or have scales that stand for all of a matrix."""
    case = CASES[name]
    path, _ = write(
        tiny_model("qwen2moe"), tmp_path, dict(case.config), case.writer, lambda name: "experts." in name
    )
    found, _ = of_replicas(path, 1, enable_expert_parallel=True)
    assert torch.equal(found, logits(load_tiny(path)))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_requantized_on_request(quantization: str, llama: Path, tmp_path: Path) -> None:
    case = CASES["ct-fp8-channel"]
    paths = write(llama, tmp_path, dict(case.config), case.writer, but_head)
    same(*(load_tiny(path, quantization=quantization) for path in paths))


@pytest.mark.parametrize("name", ["ct-w4a16-g128", "fp8-tensor", "ct-nvfp4"])
def test_random_weights_need_no_file(name: str, llama: Path, tmp_path: Path) -> None:
    path, _ = write(llama, tmp_path, dict(CASES[name].config), CASES[name].writer, but_head)
    (path / SINGLE_NAME).unlink()
    load_tiny(path, load_format="dummy")


def changed(path: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    """The checkpoint with another tensor of that name."""
    tensors = load_file(path / SINGLE_NAME)
    tensors[name] = change(tensors[name])
    save_file(tensors, path / SINGLE_NAME)
    return path


DOWN = "model.layers.1.mlp.down_proj"


def test_absent_group_is_named(llama: Path, tmp_path: Path) -> None:
    writer = Writer(4, 64, reordered=True)
    path, _ = write(llama, tmp_path, writer.config(), writer, but_head)
    changed(path, f"{DOWN}.g_idx", lambda order: order + 1)
    with pytest.raises(ModelLoadError, match=f"{DOWN}: g_idx names group 6; there are 6"):
        load_tiny(path)


def test_zero_points_of_symmetric_numbers_are_checked(llama: Path, tmp_path: Path) -> None:
    writer = Writer(4, 64)
    path, _ = write(llama, tmp_path, writer.config(sym=True), writer, but_head)
    with pytest.raises(ModelLoadError, match="sym is true, but qzeros are not all 8"):
        load_tiny(path)


def state(**changes: Any) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        said = json.loads(bytes(tensor.tolist())) | changes
        return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (state(blocksize=32), "says blocksize 32; it must be 64"),
        (state(shape=[3, 5]), r"says shape \(3, 5\), and weight has 98304 numbers"),
        (state(shape=[384, 256]), r"of a matrix \[384, 256\], config.json implies \[256, 384\]"),
        (state(shape=None), "is no JSON object with blocksize and a shape of two"),
        (lambda tensor: tensor + 9, "is no JSON object"),
    ],
)
def test_mismatched_bitsandbytes_state_is_refused(
    change: Callable[[Tensor], Tensor], message: str, llama: Path, tmp_path: Path
) -> None:
    case = CASES["bnb-nf4"]
    path, _ = write(llama, tmp_path, dict(case.config), case.writer, but_head)
    changed(path, f"{DOWN}.weight.quant_state.bitsandbytes__nf4", change)
    with pytest.raises(ModelLoadError, match=message):
        load_tiny(path)


@pytest.mark.parametrize(("found", "called"), [(1, r"1 \(col32\)"), (3, r"3 \(col_ampere\)"), (9, "9")])
def test_integers_of_bitsandbytes_must_lie_in_rows(
    found: int, called: str, llama: Path, tmp_path: Path
) -> None:
    case = CASES["bnb-int8"]
    path, _ = write(llama, tmp_path, dict(case.config), case.writer, but_head)
    changed(path, f"{DOWN}.weight_format", lambda tensor: torch.full_like(tensor, found))
    with pytest.raises(ModelLoadError, match=rf"{DOWN}: weight_format is {called}; it must be 0 \(row\)"):
        load_tiny(path)


@pytest.mark.parametrize("kind", STORAGES)
def test_bytes_of_bitsandbytes_may_be_called_otherwise(kind: str, llama: Path) -> None:
    config = dict(CASES["bnb-nf4"].config) | {"bnb_4bit_quant_storage": kind}
    found = read_hf_config(llama, {"quantization_config": config}).quantization
    assert found is not None
    encoding = found.encoding_of(DOWN)
    assert encoding is not None
    assert codec_of(encoding).tensors(256, 384)["weight"].dtype is STORAGES[kind]


def torchao(kind: str, version: int = 2, **data: Any) -> dict[str, Any]:
    kinds = {"default": {"_type": kind, "_version": version, "_data": data}}
    return {"quant_method": "torchao", "quant_type": kinds, "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("key", ["fqn_to_config", "module_fqn_to_config"])
def test_torchao_config_may_be_given_by_names(key: str, llama: Path, tmp_path: Path) -> None:
    """The whole name, then a pattern, then all others; and null is floats."""
    four, eight = ("ao-int4", "ao-int8")
    of = {name: CASES[name].config["quant_type"]["default"] for name in (four, eight)}
    found = {
        "re:.*mlp.*": of[eight],
        r"re:.*\.mlp\.up_proj\.weight": of[four],
        "_default": of[four],
        "model.layers.1.mlp.up_proj": None,
        "model.layers.0.self_attn.q_proj.weight": of[eight],
    }

    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        is_eight = weight.shape in ((384, 256), (256, 384), (256, 256)) and next(turns)
        return CASES[eight if is_eight else four].writer(weight, random)

    # In the order of the file: down, gate, up of the first layer, k, o, q, v; then the second layer.
    turns = iter([True, True, True, False, True, True, True, False, False])
    left = ("lm_head", "layers.1.mlp.up_proj")
    paths = write(
        llama, tmp_path, torchao("FqnToConfig", **{key: found}), writer, lambda name: not name.endswith(left)
    )
    same(*map(load_tiny, paths), tolerance=1e-6)


def test_keys_and_values_may_be_all_that_is_quantized(llama: Path) -> None:
    """As ModelOpt writes it: no algorithm for weights."""
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    found = read_hf_config(llama, {"quantization_config": config}).quantization
    assert found is not None
    assert found.encoding_of(DOWN) is None
    assert found.cache_scales


CT = dict(CASES["ct-w4a16-g128"].config)


def weights(**options: Any) -> dict[str, Any]:
    return CT | {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4} | options}}}


@folded(
    ("config", "kind", "message"),
    [
        (
            CT | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            UnsupportedModelError,
            "sparse-24-bitmask",
        ),
        (CT | {"format": "marlin-24"}, UnsupportedModelError, "format = 'marlin-24' with 4 bits"),
        (CT | {"rotation": "hadamard"}, UnsupportedModelError, 'rotation = "hadamard" is not supported'),
        (CT | {"moe_sparsity_config": {"a": 1}}, UnsupportedModelError, "moe_sparsity_config = "),
        (weights(strategy="channel", grid="odd"), UnsupportedModelError, "g: weights: grid = "),
        (CT | {"ignore": ["re:("]}, ModelLoadError, r"'\(' is none"),
        (weights(strategy="mystery"), UnsupportedModelError, 'strategy = "mystery"'),
        (weights(strategy="group"), ModelLoadError, "'group_size' is missing"),
        (weights(strategy="group", group_size=0), ModelLoadError, "group_size must be an integer"),
        (weights(strategy="channel", num_bits=5), UnsupportedModelError, "num_bits = 5"),
        ({"quant_method": "awq", "bits": 3}, UnsupportedModelError, "bits = 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, UnsupportedModelError, "gemv"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ModelLoadError, "two positive integers"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, UnsupportedModelError, "W4A8"),
        ({"quant_method": "modelopt"}, ModelLoadError, "'quant_algo' is missing"),
        ({"quant_method": "bitsandbytes"}, ModelLoadError, "load_in_4bit"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "int4"},
            UnsupportedModelError,
            "bnb_4bit_quant_storage",
        ),
        (torchao("Int4WeightOnlyConfig", 1), UnsupportedModelError, "_version = 1"),
        (
            torchao("Int4WeightOnlyConfig", int4_packing_format={"_data": "PRESHUFFLED"}),
            UnsupportedModelError,
            'int4_packing_format: _data = "PRESHUFFLED"',
        ),
        (torchao("FqnToConfig", fqn_to_config={"re:(": None}), ModelLoadError, r"'\(' is none"),
        (torchao("MysteryConfig"), UnsupportedModelError, "MysteryConfig"),
        ({"quant_method": "hqq", "quant_config": {"x": {}}}, ModelLoadError, "'nbits' is missing"),
        ({"bits": 4}, ModelLoadError, "'quant_method' is missing"),
        ({"method": "mystery"}, UnsupportedModelError, "method = 'mystery' is not supported"),
        ({"quant_method": "awq", "bits": 4, "format": "marlin"}, UnsupportedModelError, 'format = "marlin"'),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(
    config: dict[str, Any], kind: type[StartupError], message: str, llama: Path
) -> None:
    with pytest.raises(kind, match=message):
        read_hf_config(llama, {"quantization_config": config})


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quantize_config.json", {"method": "awq", "bits": 4, "format": "gemm"}, "awq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "awq"),
    ],
)
def test_a_file_of_the_tool_will_do(
    name: str, content: dict[str, Any], method: str, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / name).write_text(json.dumps(content))
    found = read_hf_config(tmp_path, {}).quantization
    assert found is not None
    assert found.method == method


@pytest.mark.parametrize(
    ("config", "noted"),
    [
        (CT | {"kv_cache_scheme": {"num_bits": 8}}, ["kv_cache_scheme: keys and values are kept"]),
        (weights(strategy="channel"), []),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            ["activation_scheme: activations are rounded"],
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            ["kv_cache_quant_algo: keys and values are kept"],
        ),
    ],
    ids=["ct", "ct-none", "fp8", "modelopt"],
)
def test_deviations_from_the_quantization_config_are_noted(
    config: dict[str, Any], noted: list[str], llama: Path
) -> None:
    found = read_hf_config(llama, {"quantization_config": config}).quantization
    assert found is not None
    assert [
        note.split("quantization_config: ")[1][: len(words)]
        for note, words in zip(found.notes, noted, strict=True)
    ] == noted


def test_notes_reach_the_log(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = dict(FP8.config) | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    path, _ = write(llama, tmp_path, config, FP8.writer, but_head)
    with caplog.at_level("INFO"):
        load_tiny(path)
    assert "kv_cache_scheme: keys and values are kept as --kv-cache-dtype says" in caplog.text
