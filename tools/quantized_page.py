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
# Quantised checkpoints

This page is generated: `python -m tools.quantized_page`.

A directory whose config.json has a `quantization_config` (or a file of the tool's beside it: quantize_config.json,
quant_config.json, hf_quant_config.json) is served like any other; nothing has to be said:

```
quire serve path/to/model-GPTQ-Int4
```

Where one of quire's packed formats holds exactly the numbers of the file, they are packed as they are: weights are
those of the checkpoint. What is left of error is that of the mode ([quantization](quantization.md)): "fast", the
default, rounds the activations of integers to 8 bits on a CPU; `--quantization-config '{"mode": "precise"}'` does not,
and "checkpoint" rounds them [as the file says](#activations).
Everything else ("floats") is decoded in float32 while it loads and kept as `--dtype` says: `--dtype float32` keeps it
exactly, in four bytes for each weight. "Shifted" are numbers with zero points or minimums.

Device: where there are kernels that multiply by what is kept. Error: what the fast mode does to the two factors of a
product on a CPU, relative and of normal values: it rounds them to integers of 8 bits; the precise mode does not, and
what a GPU does is [below](#activations). Of floats it is that of `--dtype bfloat16`, in all modes. Speed depends on
what is kept alone.
"""
_MEASURED = """
Speed: how many times as fast as in bfloat16 the matrices of half a billion parameters are multiplied in the fast mode,
by one row (decode) and by {prefill_rows} (prefill), on {threads} threads of {machine}, {date}, by `python -m
benchmarks.weight_formats`; int4 of `--quantization` is {int4[0]:.2f} and {int4[1]:.2f}.
"""

NOTES = """
The tensors in the files decide which modules are quantized, the output head included; the config says how. So a
module that the config leaves alone (`ignore`, `modules_to_not_convert`, `dynamic` and others) and that is stored
quantized is read as such, and one that is stored in floats stays in floats. Without files (`--load-format dummy`)
names in such lists are matched as transformers does: the beginning of a module's name up to a dot, as a regular
expression, or its end. Different bits in different layers are followed. Where modules that quire merges (q, k and v;
gate and up) are quantised differently, the merged matrix is kept in int8 if they are integers all (int4, int8 and
IQ4, in groups as small as the smallest), with the numbers of the file; else it is decoded to floats. With
`--quantization` weights are decoded and rounded anew.

The tests hold for every row that logits are within 1e-4, in float32 and the precise mode, of transformers' with the
weights that the method's definition makes of the file, and that two ranks share it where its groups can be cut.

Inputs whose groups are in any order (`desc_act`, `actorder`) stand group after group in memory, and activations are
gathered in that order. Modules that are merged must agree on it, as those of GPTQ do. Where they do not, in experts, in
the head, and where a rank has some of the inputs, weights become floats. What the order is is read of the files
(`g_idx`, `weight_g_idx`), whatever the config says of it.

Experts may be one by one, also in families that keep those of a layer in one tensor (Llama 4, gpt-oss), as tools leave
them that look for linear layers: in any form. gpt-oss's may also be in lists, as Unsloth has them for bitsandbytes
(`experts.gate_up_projs.3`, whose outputs are gate and up in turn, beside `router.linear`): in 4 bits, in LLM.int8() or
in floats. Where those of a layer are one module (Granite, JetMoE) its tensors may be stacks of what one matrix has, in
all forms but those that have a matrix's numbers all in a row (bitsandbytes, HQQ). Where they are a parameter that no
module bears (Llama 4, gpt-oss, Qwen 3.5), a stack may be in MXFP4 (OpenAI's layout), in FP8 as transformers writes it
(`fp8`, per matrix or in blocks, and `fbgemm_fp8`), and, transposed as Llama 4's, in ModelOpt's FP8 and NVFP4, with one
scale for all of a stack. Floats may be in either form, too.

A table of tokens that is quantised in the files becomes floats of `--dtype`, unless it is the output head, too.

## Activations

A checkpoint may say that activations are to be rounded as well. What is done instead, unless `--quantization-config
'{"mode": "checkpoint"}'` is given:

| a checkpoint says | CPU | GPU |
|---|---|---|
| int8 (w8a8), a scale per token or static | 8 bits, 64 values a scale; "precise": not rounded | not rounded |
| E4M3, a scale per token; weights per output or matrix | not rounded | the same, by the same formula |
| E4M3, static; weights per output or matrix | not rounded | E4M3, a scale per token |
| E4M3, weights in blocks | not rounded | not rounded |
| 4 bits (NVFP4, MXFP4) | 8 bits, 64 values a scale; "precise": not rounded | not rounded |
| not at all | integers, 4-bit floats: 8 bits, 64 values a scale (groups: 32); "precise": not rounded | not rounded |

"checkpoint" (CPU) follows the file to the letter: what a linear layer, or an expert's matrix, is multiplied by is
rounded to int8 or E4M3 by the formula of those who define it, in float32, with a scale for each token, for each group
or block of its inputs, or the one in the file (`input_scale`, `input_zero_point`), and then multiplied as in the
precise mode. int8 with one scale for a token, found or static, with a zero point or without, meets int8 weights with a
scale per output as the integers that both are. Zero points are taken out of their sums by what the integers of each
output come to, which is counted while loading. 64 products at a time are summed exactly, and all of them where they
come to less than 2^24, before they are scaled; so a result is within 4e-7 of what the magnitudes of its products come
to, nearer than float32 sums in order, and each row has its bits in any batch. All else is widened again and multiplied
as floats: E4M3, too, by weights in E4M3, after one more pass over the activations, for no instruction set here
multiplies it. Modules that are merged keep scales of their own. Nothing else is rounded: where weights alone are
quantised it is the precise mode. Experts are called one by one, and without tapes. Refused with a message that says so:
activations of 4 bits, a scale that all tokens of a step share (results would depend on the batch), latent attention
(whose products are not a linear layer's own), experts with adapters or with `--enable-expert-parallel`, and ranks that
have parts of what shares a scale.
bitsandbytes' LLM.int8() computes in 8 bits, which its files do not ask for, and stays with weights.

It is for those who compare: "fast" rounds less, and takes no more time.
Of the logits of the model in the box, its weights floats, by `python -m benchmarks.activations`:

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
How many times as fast as in bfloat16 (as above) matrices are multiplied in mode "checkpoint":

| rounding, by weights in | decode | prefill |
|---|---|---|
"""

LAST_NOTES = """
## Keys and values

With `--kv-cache-dtype fp8` (GPU) keys and values are kept as the checkpoint says: divided by its scales, of a layer or
of each head, and rounded to E4M3. They are `k_scale` and `v_scale` of the attention block, of `k_proj` and `v_proj`, or
`output_scale` of these; a layer without has 1. With `--kv-cache-dtype int8` (CPU) so are those of a checkpoint that
asks for int8 (`kv_cache_scheme` of compressed-tensors, symmetric, static); any other has a scale for each vector, which
is found as it is kept. Where a config asks for rounded activations, keys or values, the log says so by the name of the
key.

## Limits

- Refused, by name: sparse weights, transforms and keys that are unknown (compressed-tensors), GPTQ's marlin layout,
  AWQ's gemv layout, bits that the table does not have, LLM.int8() in another layout than rows (`weight_format`),
  quantised scales (HQQ), torchao's int4 in layouts of one kind of GPU (preshuffled, int32, tiles of AMD's).
- Latent attention (DeepSeek) has no cache in fp8, so scales for one are left out.
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
    _Example("NF4, scales quantised or not", _BNB | {"bnb_4bit_quant_type": "nf4"}),
    _Example("FP4, scales quantised or not", _BNB | {"bnb_4bit_quant_type": "fp4"}),
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
