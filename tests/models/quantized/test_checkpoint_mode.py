# SPDX-License-Identifier: Apache-2.0
"""The mode "checkpoint": activations rounded as files say, beside transformers with the definer's formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.cpu import library
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.shard import Shard
from quire.models.loader import load_model
from quire.models.weight_files import SINGLE_NAME
from quire.worker import recorded_forward
from tests.models.harness import load_tiny, logits_of, prepared_config
from tests.models.quantized.checkpoints import IDS, Writer, same, write
from tests.models.quantized.test_experts import taken_apart
from tests.models.quantized.test_published_encodings import FP8_BLOCKS, compressed, fp8, group, int8

NO_STEP: Any = None
"""Nothing but adapters looks at it."""
CHECKPOINT = {"quantization_config": {"mode": "checkpoint"}}
Formula = Callable[[Tensor], Tensor]


def rounded(x: Tensor, scale: Tensor | float, zero: Tensor | float = 0.0) -> Tensor:
    """compressed-tensors' integers of 8 bits."""
    return ((x / scale + zero).clamp(-128, 127).round() - zero) * scale


def to_e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def dynamic_int8(x: Tensor) -> Tensor:
    return rounded(x, x.abs().amax(-1, keepdim=True) / 127.5)


def asymmetric_int8(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    return rounded(x, scale, (-128 - low / scale).clamp(-128, 127).round())


def dynamic_e4m3(x: Tensor) -> Tensor:
    return to_e4m3(x, x.abs().amax(-1, keepdim=True) / 448)


def in_blocks(size: int) -> Formula:
    def formula(x: Tensor) -> Tensor:
        return dynamic_e4m3(x.unflatten(-1, (-1, size))).flatten(-2)

    return formula


def with_static(writer: Writer, scale: float, zero: int | None = None) -> Writer:
    """With numbers for activations, which lie in one of the shapes that tools give them."""

    def written(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        tensors, floats = writer(weight, random)
        more = {"input_scale": torch.tensor(scale)}
        if zero is not None:
            more["input_zero_point"] = torch.tensor([zero], dtype=torch.int8)
        return tensors | more, floats

    return written


def activations(form: str, weights: dict[str, Any], **said: Any) -> dict[str, Any]:
    return compressed(form, group(**weights) | {"input_activations": {"num_bits": 8} | said})


INT8 = {"num_bits": 8, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKEN = {"strategy": "token", "dynamic": True}
TENSOR = {"strategy": "tensor", "dynamic": False}
CASES: dict[str, tuple[dict[str, Any], Writer, Formula]] = {
    "int8-token": (activations("int-quantized", INT8, **TOKEN), int8(1), dynamic_int8),
    "int8-token-asym": (
        activations("int-quantized", INT8, **TOKEN, symmetric=False),
        int8(1),
        asymmetric_int8,
    ),
    "int8-tensor": (
        activations("int-quantized", INT8, **TENSOR),
        with_static(int8(1), 0.03),
        lambda x: rounded(x, 0.03),
    ),
    "int8-tensor-asym": (
        activations("int-quantized", INT8, **TENSOR, symmetric=False),
        with_static(int8(1), 0.03, 9),
        lambda x: rounded(x, 0.03, 9.0),
    ),
    "fp8-token": (activations("float-quantized", FP8, **TOKEN, type="float"), fp8(1), dynamic_e4m3),
    "fp8-group": (
        activations(
            "float-quantized",
            FP8 | {"strategy": "block", "block_structure": [128, 128]},
            strategy="group",
            group_size=128,
            dynamic=True,
            type="float",
        ),
        fp8(128, 128),
        in_blocks(128),
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        with_static(fp8(0, scalar=True), 0.005),
        lambda x: to_e4m3(x, 0.005),
    ),
    "fp8-blocks": (FP8_BLOCKS, fp8(64, 64, name="weight_scale_inv"), in_blocks(64)),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"], "activation_scale_ub": 1.5},
        fp8(1),
        lambda x: to_e4m3(x, x.abs().amax(-1, keepdim=True).clamp(max=1.5) / 448),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        with_static(fp8(0, scalar=True), 0.005),
        lambda x: to_e4m3(x, 0.005),
    ),
    "torchao": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int8DynamicActivationInt8WeightConfig"}},
        },
        lambda weight, random: (
            {
                "_weight_qdata": (made := int8(1)(weight, random))[0]["weight"],
                "_weight_scale": made[0]["weight_scale"],
            },
            made[1],
        ),
        dynamic_int8,
    ),
}


def but_head(name: str) -> bool:
    return name != "lm_head"


@torch.inference_mode()
def expected(floats: Path, formula_of: Callable[[str], Formula]) -> Tensor:
    """Logits by transformers, with a formula for what each linear layer is multiplied by, by its name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and but_head(name):
            formula = formula_of(name)
            module.register_forward_pre_hook(lambda _, args, formula=formula: (formula(args[0]), *args[1:]))
    return model(torch.tensor(IDS)).logits[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_products_are_those_of_rounded_activations(
    case: tuple[dict[str, Any], Writer, Formula], llama: Path, tmp_path: Path
) -> None:
    config, writer, formula = case
    quantized, floats = write(llama, tmp_path, dict(config), writer, but_head)
    model = load_tiny(quantized, **CHECKPOINT)
    same(model, load_tiny(floats), tolerance=1e-6)
    layers = [layer for _, layer in model.checkpoint_layers() if isinstance(layer, Linear)]
    assert len(layers) == 8
    for layer in layers:
        x = torch.randn(7, layer.inputs, generator=torch.Generator().manual_seed(1))
        want = formula(x).double() @ layer.unpacked().double().t()
        torch.testing.assert_close(layer.sums(x, NO_STEP).double(), want, rtol=1e-4, atol=1e-5)
        assert (want - x.double() @ layer.unpacked().double().t()).norm() > 1e-3 * want.norm()


@pytest.mark.parametrize("name", ["int8-token", "fp8-blocks"])
def test_logits_are_near_those_of_rounded_activations(name: str, llama: Path, tmp_path: Path) -> None:
    """A value halfway between two quantized values rounds to either side, by the last bits of a sum, so that the
    activations of later tokens differ."""
    config, writer, formula = CASES[name]
    quantized, floats = write(llama, tmp_path, dict(config), writer, but_head)
    want, plain = (expected(floats, lambda _, each=each: each) for each in (formula, lambda x: x))
    got = logits_of(load_tiny(quantized, **CHECKPOINT), IDS, chunk_sizes=[5])[0]
    assert (got - want).norm() < 0.5 * (plain - want).norm()
    assert (got[0] - want[0]).norm() < 0.5 * (plain[0] - want[0]).norm()


def test_modules_of_one_matrix_may_have_scales_of_their_own(llama: Path, tmp_path: Path) -> None:
    """q, k and v, which read the same rows, and gate and up."""
    scales = {"q_proj": 0.03, "k_proj": 0.05, "gate_proj": 0.02}
    config, writer, _ = CASES["int8-tensor"]
    quantized, _ = write(llama, tmp_path, dict(config), writer, but_head)
    tensors = load_file(quantized / SINGLE_NAME)
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf == "input_scale":
            tensors[name] = torch.tensor(scales.get(module.rpartition(".")[2], 0.03))
    save_file(tensors, quantized / SINGLE_NAME)
    block: Any = load_tiny(quantized, **CHECKPOINT).get_submodule("model.layers.1")
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    for layer, sizes, given in (
        (block.self_attn.qkv_proj, (256, 64, 64), (0.03, 0.05, 0.03)),
        (block.mlp.gate_up_proj, (384, 384), (0.02, 0.03)),
    ):
        parts = layer.unpacked().split(sizes)
        want = torch.cat([rounded(x, scale) @ part.t() for scale, part in zip(given, parts, strict=True)], 1)
        torch.testing.assert_close(layer.sums(x, NO_STEP), want, rtol=1e-4, atol=1e-5)


def test_weights_alone_are_multiplied_as_in_the_precise_mode(llama: Path, tmp_path: Path) -> None:
    config = compressed("int-quantized", group(**INT8))
    path, _ = write(llama, tmp_path, config, int8(1), but_head)
    precise = {"quantization_config": {"mode": "precise"}}
    models = (load_tiny(path, **options) for options in (CHECKPOINT, precise))
    one, other = (logits_of(model, IDS, chunk_sizes=[5])[0] for model in models)
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["int8-token", "fp8-blocks", "int8-tensor", "int8-tensor-asym"])
def test_neither_batches_nor_chunks_change_bits(name: str, llama: Path, tmp_path: Path) -> None:
    config, writer, _ = CASES[name]
    path, _ = write(llama, tmp_path, dict(config), writer, but_head)
    model = load_tiny(path, **CHECKPOINT)
    alone = logits_of(model, IDS, chunk_sizes=[64])[0]
    others = [[5, 6, 7], *IDS, [200] * 11]
    assert torch.equal(logits_of(model, others, chunk_sizes=[3])[1], alone)


@pytest.mark.parametrize("name", ["int8-tensor", "int8-tensor-asym", "fp8-blocks"])
def test_ranks_shard_weights_with_own_scales(name: str, llama: Path, tmp_path: Path) -> None:
    config, writer, _ = CASES[name]
    paths = write(llama, tmp_path, dict(config), writer, but_head)
    quantized, floats = (
        load_model(prepared_config(path, **options), Shard(1, 2))
        for path, options in zip(paths, (CHECKPOINT, {}), strict=True)
    )
    same(quantized, floats, tolerance=1e-6)
    rounds = [
        layer.input_quantization is not None
        for _, layer in quantized.checkpoint_layers()
        if isinstance(layer, MatrixLayer) and "layers." in layer.name
    ]
    assert rounds == [True] * 8


def test_packed_file_has_the_sums_for_zero_points(llama: Path, tmp_path: Path) -> None:
    config, writer, _ = CASES["int8-tensor-asym"]
    path, _ = write(llama, tmp_path, dict(config), writer, but_head)
    models = [load_tiny(path, packed_weights_cache=str(tmp_path / "kept"), **CHECKPOINT) for _ in range(2)]
    sums = [
        [layer.packed.code_sums for _, layer in model.checkpoint_layers() if isinstance(layer, Linear)]
        for model in models
    ]
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))
    one, other = (logits_of(model, IDS, chunk_sizes=[5])[0] for model in models)
    assert torch.equal(one, other)


def without(path: Path, leaf: str, tensor: Tensor | None = None) -> Path:
    """The checkpoint with no such tensor of any module, or with this one."""
    tensors = load_file(path / SINGLE_NAME)
    kept = {name: each for name, each in tensors.items() if not name.endswith(leaf)}
    others = {} if tensor is None else {name: tensor.clone() for name in tensors if name.endswith(leaf)}
    save_file(kept | others, path / SINGLE_NAME)
    return path


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            None,
            r"q_proj: the config says that activations have a scale, but there is no .*q_proj.input_scale",
        ),
        (torch.ones(3), r"q_proj.input_scale' has shape \[3\]; it must be one number"),
        (torch.tensor(0.0), r"q_proj.input_scale' holds 0.0, which is no scale"),
        (torch.tensor(torch.inf), r"q_proj.input_scale' holds inf, which is no scale"),
    ],
)
def test_malformed_scale_is_refused(tensor: Tensor | None, message: str, llama: Path, tmp_path: Path) -> None:
    config, writer, _ = CASES["int8-tensor"]
    path, _ = write(llama, tmp_path, dict(config), writer, but_head)
    with pytest.raises(ModelLoadError, match=message):
        load_tiny(without(path, ".input_scale", tensor), **CHECKPOINT)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"num_bits": 4}, "with 4 bits"),
        ({"strategy": "tensor", "dynamic": True}, "with dynamic scales with strategy 'tensor'"),
        ({"strategy": "channel", "dynamic": False}, "with static scales with strategy 'channel'"),
    ],
)
def test_unsupported_activation_rounding_is_refused(
    said: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    path, _ = write(llama, tmp_path, activations("int-quantized", INT8, **said), int8(1), but_head)
    with pytest.raises(ConfigError, match=f"mode checkpoint cannot quantize the input of .*q_proj {message}"):
        load_tiny(path, **CHECKPOINT)
    load_tiny(path, quantization_config={"mode": "precise"})


@pytest.mark.parametrize("family", ["qwen2moe", "gptoss", "nemotronh"])
def test_experts_round_before_both_products(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Gated, with biases, and without gates."""
    config, writer, _ = CASES["int8-token"]
    source = tmp_path / "apart"
    source.mkdir()
    tensors = taken_apart(load_file(tiny_model(family) / SINGLE_NAME), interleaved=True)
    save_file(tensors, source / SINGLE_NAME)
    (source / "config.json").write_bytes((tiny_model(family) / "config.json").read_bytes())
    path, _ = write(source, tmp_path, dict(config), writer, lambda name: ".experts." in name)
    model = load_tiny(path, **CHECKPOINT)
    layer = next(each for each in model.modules() if isinstance(each, Experts))
    x = torch.randn(6, layer._hidden_size, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2], [1, 0], [0, 2]], dtype=torch.int32)
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(2)) + 0.1
    want = torch.zeros_like(x)
    for token, (numbers, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for number, share in zip(numbers, shares, strict=True):
            expert: Any = layer.get_submodule(str(number))
            row = dynamic_int8(x[token : token + 1])
            up = expert.up._activated(product(expert.up, row))
            if family == "nemotronh":
                up = up.relu().square()
            want[token] += share * product(expert.down_proj, dynamic_int8(up))[0]
    torch.testing.assert_close(layer(x, chosen, weights, NO_STEP), want, rtol=1e-3, atol=1e-3)
    alone = layer(x[2:3], chosen[2:3], weights[2:3], NO_STEP)
    assert torch.equal(alone[0], layer(x, chosen, weights, NO_STEP)[2])


def product(layer: Linear, x: Tensor) -> Tensor:
    made = x @ layer.unpacked().float().t()
    return made if layer.bias is None else made + layer.bias.float()


@pytest.mark.parametrize("options", [{"enable_lora": True}, {"enable_expert_parallel": True}], ids=str)
def test_experts_that_are_elsewhere_or_adapted_are_refused(
    options: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    config, writer, _ = CASES["int8-token"]
    path, _ = write(tiny_model("qwen2moe"), tmp_path, dict(config), writer, lambda name: "experts." in name)
    with pytest.raises(ConfigError, match=r"experts\.0.*gate_proj in "):
        load_tiny(path, **CHECKPOINT, **options)


def test_ranks_with_parts_of_a_shared_scale_are_refused(llama: Path, tmp_path: Path) -> None:
    config, writer, _ = CASES["int8-token"]
    path, _ = write(llama, tmp_path, dict(config), writer, but_head)
    with pytest.raises(
        ConfigError, match="o_proj: a scale covers all inputs of a token, which are split over ranks"
    ):
        load_model(prepared_config(path, **CHECKPOINT), Shard(0, 2))


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize("name", ["int8-token", "int8-tensor-asym", "fp8-tensor"])
def test_recorded_graphs_include_activation_rounding(
    name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, writer, _ = CASES[name]
    path, _ = write(llama, tmp_path, dict(config), writer, but_head)
    recorded: list[recorded_forward.RecordedGraph] = []
    record = recorded_forward.record
    monkeypatch.setattr(
        recorded_forward, "record", lambda *args: recorded.append(record(*args)) or recorded[-1]
    )
    params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=2) for n in (5, 9)]
    outputs = []
    for eager in (True, False):
        options = CHECKPOINT | {"skip_tokenizer_init": True, "enforce_eager": eager, "max_num_seqs": 4}
        llm = LLM(str(path), dtype="float32", max_model_len=64, **options)
        made = llm.generate([[5, 6, 7], [9] * 20], params, use_tqdm=False)
        outputs.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in made])
        assert bool(recorded) is not eager
    assert outputs[0] == outputs[1]
