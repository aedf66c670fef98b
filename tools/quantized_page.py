# SPDX-License-Identifier: Apache-2.0
"""Generator of docs/quantized_checkpoints.md: `python -m tools.quantized_page [FILE]`.

Invariant: the format of each row's weights comes from its codec, so the page matches the loader.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.config.encoding import Encoding
from quire.kernels import ops, reference
from quire.kernels.formats import format_of
from quire.kernels.linear import RowQuantization, WeightScheme
from quire.layers.quantized.codec import codec_of
from quire.layers.quantized.method import scheme_kept
from quire.models.json_object import JsonObject
from quire.models.quantized.reader import METHODS

PAGE = Path("docs/quantized_checkpoints.md")
SPEEDS = Path("benchmarks/results/weight_formats.json")
"""Results of `python -m benchmarks.weight_formats --record`; without them the page has no speeds."""

_LAYER = "model.layers.0.mlp.up_proj"
_INPUTS = 4096
_DEVICES = {"cpu": "CPU", "triton": "GPU"}
"""Devices by the names of implementations."""
_IN_ANY_ORDER = (
    "; floats in experts, the head, where ranks have parts of the inputs, where merged modules disagree"
)

INTRODUCTION = """\
# Quantized checkpoints

This page is generated: `python -m tools.quantized_page`.

A directory whose config.json has a `quantization_config` is served like any other, without further options. The config
may also be in a file that a tool writes beside it (quantize_config.json, quant_config.json, hf_quant_config.json):

```
quire serve path/to/model-GPTQ-Int4
```

If one of quire's packed formats holds exactly the numbers of the file, the weights are packed unchanged. The remaining
error is that of the mode ([quantization](quantization.md)): "fast", the default, rounds the activations of integer
weights to 8 bits on a CPU; `--quantization-config '{"mode": "precise"}'` does not; "checkpoint" rounds them [as the
file says](#activations). All other weights ("floats") are decoded in float32 while loading and stored in `--dtype`;
`--dtype float32` stores them exactly, in four bytes each. "Shifted" numbers have zero points or minimums.

Device: devices with kernels for the stored format. Error: relative error of both factors of a matmul on a CPU in the
fast mode, which rounds them to 8-bit integers, for normally distributed values; for floats that of `--dtype bfloat16`,
in all modes. The precise mode does not round, and [below](#activations) is what a GPU does. Speed depends on the stored
format alone.
"""
_MEASURED = """
Speed: matmuls of half a billion parameters in the fast mode, relative to bfloat16, for one row (decode) and for
{prefill_rows} rows (prefill), on {threads} threads of {machine}, {date}, by `python -m benchmarks.weight_formats`.
`--quantization int4` has {int4[0]:.2f} and {int4[1]:.2f}.
"""

NOTES = """
The tensors in the files decide which modules are quantized, the output head included; the config says how.
A module that the config excludes (`ignore`, `modules_to_not_convert`, `dynamic` and others) is read as quantized if it
is stored so, and a module stored in floats stays in floats. Without files (`--load-format dummy`) names in such lists
match as in transformers: the start of a module's name up to a dot, a regular expression, or its end. Layers may differ
in bits. Where modules that quire merges (q, k and v; gate and up) are quantized differently, the merged weight is
stored in int8 with the numbers of the file if all are integers (int4, int8 and IQ4, in groups of the smallest size);
else it is decoded to floats. With `--quantization` weights are decoded and quantized anew.

For every row the tests check that logits are within 1e-4, in float32 and the precise mode, of transformers' with the
weights that the method's definition gives, and that two ranks can shard it where its groups allow.

Inputs whose groups are in arbitrary order (`desc_act`, `actorder`) are stored group by group, and activations are
gathered in that order. Merged modules must have the same order, as GPTQ's do. Where they do not, in experts, in the
head, and where a rank has some of the inputs, weights become floats. The order is read from the files (`g_idx`,
`weight_g_idx`), not from the config.

Experts may be stored one by one in any format, also in families that store a layer's experts in one tensor (Llama 4,
gpt-oss), because tools that look for linear layers write them so. gpt-oss's may also be in lists, as Unsloth writes
them for bitsandbytes (`experts.gate_up_projs.3`, whose outputs alternate between gate and up, beside `router.linear`):
in 4 bits, LLM.int8() or floats. Where a layer's experts are one module (Granite, JetMoE), its tensors may be stacks in
all formats but those that flatten a matrix (bitsandbytes, HQQ). Where they are a parameter without a module (Llama 4,
gpt-oss, Qwen 3.5), a stack may be in MXFP4 (OpenAI's layout), in FP8 as transformers writes it (`fp8`, per matrix or in
blocks, and `fbgemm_fp8`), and, transposed as Llama 4's, in ModelOpt's FP8 and NVFP4 with one scale for the stack.
Floats may have either form.

A quantized token embedding becomes floats of `--dtype`, unless it is the output head as well.

## Activations

A checkpoint may ask for rounded activations. Without `--quantization-config '{"mode": "checkpoint"}'` they are computed
as follows:

| a checkpoint says | CPU | GPU |
|---|---|---|
| int8 (w8a8), a scale per token or static | 8 bits, 64 values a scale; "precise": not rounded | not rounded |
| E4M3, a scale per token; weights per output or matrix | not rounded | the same, by the same formula |
| E4M3, static; weights per output or matrix | not rounded | E4M3, a scale per token |
| E4M3, weights in blocks | not rounded | not rounded |
| 4 bits (NVFP4, MXFP4) | 8 bits, 64 values a scale; "precise": not rounded | not rounded |
| not at all | integers, 4-bit floats: 8 bits, 64 values a scale (groups: 32); "precise": not rounded | not rounded |

Mode "checkpoint" (CPU) follows the file exactly. The input of a linear layer, or of an expert's weight, is rounded to
int8 or E4M3 in float32 by the formula of the format's authors, with a scale per token, per group or block of inputs, or
the file's (`input_scale`, `input_zero_point`), and then multiplied as in the precise mode.

- int8 inputs with one scale per token, dynamic or static, with or without a zero point, are multiplied by int8 weights
  with a scale per output as integers. Zero points are subtracted by way of the sum of each output's weights, which is
  computed while loading. 64 products at a time are summed exactly, or all of them where the sum is below 2^24, before
  they are scaled. A result is within 4e-7 of the sum of the products' magnitudes, more exact than float32 sums in
  order, and a row has the same bits in any batch.
- All others are multiplied as floats, also E4M3 by E4M3, after one more pass over the activations, because no supported
  CPU instruction multiplies E4M3.
- Merged modules keep their own scales. Nothing else is rounded: without rounded activations in the file it is the
  precise mode. Experts are computed one by one, without recorded graphs.
- Refused, with the reason: activations of 4 bits; a scale shared by all tokens of a step (results would depend on the
  batch); latent attention (whose matmuls are not a linear layer's); experts with adapters or with
  `--enable-expert-parallel`; and ranks that would divide the inputs of one scale.
- bitsandbytes' LLM.int8() computes in 8 bits, which its files do not ask for: its activations are not rounded.

The mode is for comparisons: "fast" rounds less and is as fast. Relative error of the included model's logits with float
weights, by `python -m benchmarks.activations`:

| rounding | relative error |
|---|---|
| int8, a scale per token | 2.0e-02 |
| int8, static | 6.2e-02 |
| E4M3, a scale per token | 4.8e-02 |
| E4M3, static | 4.9e-02 |
| quire's 8 bits with int8 weights | 1.6e-02 |
| quire's 8 bits with int4 weights | 1.3e-02 |
"""

_OF_ROUNDED = """
Speed of matmuls in mode "checkpoint", relative to bfloat16 (as above):

| rounding, by weights in | decode | prefill |
|---|---|---|
"""

LAST_NOTES = """
## Keys and values

With `--kv-cache-dtype fp8` (GPU) keys and values are stored as the checkpoint says: divided by its scales, per layer or
per head, and rounded to E4M3. The scales are `k_scale` and `v_scale` of the attention block or of `k_proj` and
`v_proj`, or `output_scale` of these; a layer without one has 1. With `--kv-cache-dtype int8` (CPU) the same holds for a
checkpoint that asks for int8 (`kv_cache_scheme` of compressed-tensors, symmetric, static); others have a scale per
vector, computed when it is stored. If a config asks for rounded activations, keys or values, the log names its key.

## Limits

- Refused, by name: sparse weights, transforms and unknown keys (compressed-tensors), GPTQ's marlin layout, AWQ's gemv
  layout, numbers of bits that are not in the table, LLM.int8() in layouts other than rows (`weight_format`), quantized
  scales (HQQ), torchao's int4 in layouts for one kind of GPU (preshuffled, int32, AMD's tiles).
- Latent attention (DeepSeek) has no fp8 cache, so scales for one are ignored.
- A file that disagrees with its config (shapes, group sizes, `sym`, `g_idx`) is an error at start-up that names file,
  tensor and both values.
"""


@dataclass(frozen=True)
class _Example:
    """Row of the table: its name and an example config."""

    what: str
    config: dict[str, Any]


def _compressed(what: str, form: str, **weights: Any) -> _Example:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return _Example(what, {"quant_method": "compressed-tensors", "format": form, "config_groups": groups})


def _ao(what: str, name: str, **data: Any) -> _Example:
    config = {"quant_type": {"default": {"_type": name, "_data": data}}}
    return _Example(what, {"quant_method": "torchao"} | config)


_GPTQ = {"quant_method": "gptq", "group_size": 128}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_HQQ = {"quant_method": "hqq"}
_GROUP = {"_type": "PerGroup", "_data": {"group_size": 32}}
EXAMPLES = (
    _Example("2, 3 or 4 bits, `sym`", _GPTQ | {"bits": 4, "sym": True}),
    _Example("2, 3 or 4 bits", _GPTQ | {"bits": 4, "sym": False}),
    _Example("8 bits", _GPTQ | {"bits": 8, "sym": False}),
    _Example("`desc_act`", _GPTQ | {"bits": 4, "desc_act": True}),
    _Example("4 bits, gemm", {"quant_method": "awq", "bits": 4, "group_size": 128}),
    _compressed("w4a16 (2 and 3 bits too)", "pack-quantized", num_bits=4, strategy="group", group_size=128),
    _compressed(
        "w4a16, zero points", "pack-quantized", num_bits=4, strategy="group", group_size=128, symmetric=False
    ),
    _compressed(
        "w4a16, `actorder` group",
        "pack-quantized",
        num_bits=4,
        strategy="group",
        group_size=128,
        actorder="group",
    ),
    _compressed("w8a16, per channel", "pack-quantized", num_bits=8, strategy="channel"),
    _compressed("w8a8", "int-quantized", num_bits=8, strategy="channel"),
    _compressed("fp8, per tensor", "float-quantized", num_bits=8, type="float", strategy="tensor"),
    _compressed("fp8, per channel", "float-quantized", num_bits=8, type="float", strategy="channel"),
    _compressed(
        "fp8, blocks",
        "float-quantized",
        num_bits=8,
        type="float",
        strategy="block",
        block_structure=[128, 128],
    ),
    _compressed(
        "NVFP4", "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    _compressed("MXFP4", "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    _Example("per tensor", {"quant_method": "fp8"}),
    _Example("blocks (DeepSeek-V3)", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    _Example("per output", {"quant_method": "fbgemm_fp8"}),
    _Example("FP8", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    _Example("NVFP4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    _Example("NF4, scales quantized or not", _BNB | {"bnb_4bit_quant_type": "nf4"}),
    _Example("FP4, scales quantized or not", _BNB | {"bnb_4bit_quant_type": "fp4"}),
    _Example("LLM.int8()", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    _Example(
        "1 to 4 bits, `axis` 1",
        _HQQ | {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
    ),
    _Example(
        "8 bits, `axis` 1",
        _HQQ | {"quant_config": {"weight_quant_params": {"nbits": 8, "group_size": 64, "axis": 1}}},
    ),
    _Example(
        "`axis` 0",
        _HQQ | {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 0}}},
    ),
    _ao("Int8WeightOnly, Int8DynamicActivationInt8Weight", "Int8WeightOnlyConfig"),
    _ao("IntxWeightOnly, Int8DynamicActivationIntxWeight", "IntxWeightOnlyConfig", granularity=_GROUP),
    _ao("Int4WeightOnly, plain", "Int4WeightOnlyConfig"),
    _ao(
        "Int4WeightOnly, in tiles (tinygemm)",
        "Int4WeightOnlyConfig",
        int4_packing_format={"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"},
    ),
    _ao("Float8WeightOnly, Float8DynamicActivationFloat8Weight", "Float8WeightOnlyConfig"),
    _Example("experts (gpt-oss)", {"quant_method": "mxfp4"}),
)


def page() -> str:
    """Return the whole page."""
    measured = json.loads(SPEEDS.read_text()) if SPEEDS.exists() else None
    columns = ["method", "what", "kept as", "device", "error, fast"]
    columns += [] if measured is None else ["decode", "prefill"]
    table = ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    table += [
        f"| {each.config['quant_method']} | {each.what} | {_kept(each, measured)} |" for each in EXAMPLES
    ]
    about, rounded = "", ""
    if measured is not None:
        about = _MEASURED.format(**measured, int4=measured["speeds"][OWN_INT4])
        rounded = _OF_ROUNDED + "".join(_row(name, *times) for name, times in measured["rounded"].items())
    return INTRODUCTION + about + "\n".join(table) + "\n" + NOTES + rounded + LAST_NOTES


def _row(name: str, decode: float, prefill: float) -> str:
    return f"| {name} | {decode:.2f} | {prefill:.2f} |\n"


OWN_INT4 = "int4, groups of 32"
"""Form of weights with `--quantization int4`."""


def kept_forms() -> dict[str, WeightScheme | None]:
    """Return the schemes of weights in all examples and with `--quantization int4`, by name; None: floats."""
    schemes = [WeightScheme("int4", 32), *(_scheme(_encoding(each)) for each in EXAMPLES)]
    return {_said(scheme): scheme for scheme in schemes}


def rounded_forms() -> dict[str, tuple[WeightScheme, RowQuantization]]:
    """Return the schemes of weights and the roundings of activations that checkpoints specify, by name."""
    int8, fp8 = WeightScheme("int8"), WeightScheme("fp8")
    return {
        "int8, a scale per token, by int8": (int8, RowQuantization("int8")),
        "int8, static, by int8": (int8, RowQuantization("int8", scale=0.03)),
        "int8, static, a zero point, by int8": (int8, RowQuantization("int8", scale=0.03, zero=9.0)),
        "E4M3, a scale per token, by E4M3": (fp8, RowQuantization("e4m3")),
        "E4M3, static, by E4M3": (fp8, RowQuantization("e4m3", scale=0.01)),
    }


def _kept(example: _Example, measured: Mapping[str, Any] | None) -> str:
    """Return a row's columns that come from the code, and the measured speeds of its scheme."""
    encoding = _encoding(example)
    scheme = _scheme(encoding)
    otherwise = _IN_ANY_ORDER if codec_of(encoding).reorders else ""
    columns = [_said(scheme) + otherwise, _devices(scheme), f"{100 * _error(scheme):.2g} %"]
    if measured is not None:
        columns += [f"{times:.2f}" for times in measured["speeds"][_said(scheme)]]
    return " | ".join(columns)


def _encoding(example: _Example) -> Encoding:
    method = example.config["quant_method"]
    layer = "model.layers.0.mlp.experts.0.up_proj" if method == "mxfp4" else _LAYER
    encoding = METHODS.resolve(method)(JsonObject("config.json", example.config)).encoding_of(layer)
    assert encoding is not None, f"{example} says nothing of {layer}"
    return encoding


def _scheme(encoding: Encoding) -> WeightScheme | None:
    codec = codec_of(encoding)
    needed = [name for name, stored in codec.tensors(_INPUTS, _INPUTS).items() if not stored.optional]
    return scheme_kept(codec, _INPUTS, needed)


def _said(scheme: WeightScheme | None) -> str:
    if scheme is None:
        return "floats"
    over = f"groups of {scheme.group_size}" if scheme.group_size else "a scale per output"
    return f"{scheme.kind}, {over}{'' if scheme.symmetric else ', shifted'}"


def _devices(scheme: WeightScheme | None) -> str:
    """Return the devices with kernels for the scheme; matmuls of floats are the vendor's."""
    if scheme is None:
        return "CPU, GPU"
    weight = torch.empty(0)
    rows = ops.pack_weight.implementations
    return ", ".join(_DEVICES[row.name] for row in rows if row.accepts is None or row.accepts(weight, scheme))


def _error(scheme: WeightScheme | None) -> float:
    """Return the relative error of both factors of a matmul, by the reference, for random numbers."""
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, _INPUTS, generator=random), torch.randn(16, _INPUTS, generator=random)
    if scheme is None:
        return _distance(weight.bfloat16(), weight)
    kept, whole = format_of(scheme), replace(scheme, symmetric=True)
    packed = kept.pack(weight, whole, 1, "panels")
    of_weights = _distance(kept.multiplied(packed), kept.unpack(packed))
    return math.hypot(of_weights, _distance(reference.quantized_input(packed, x), x))


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def main() -> None:
    (Path(sys.argv[1]) if sys.argv[1:] else PAGE).write_text(page())


if __name__ == "__main__":
    main()
