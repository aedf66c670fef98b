# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.kernels.recorded_variants`: does any number that varies from step to step make a kernel anew?

Every kernel of Triton's is launched with batches of many sizes, on tensors without memory, and asked which variant it
would compile. Of one choice of its constants there is to be one. Prints the kernels that have several, and those of the
package that nothing here launches. It wants a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.gpu.blanks import META, attention_metadata, empty, packed, state_metadata
from quire.config.arch import Routing
from quire.kernels import triton as package
from quire.kernels.attention_metadata import ANY_LIMITS, NO_LIMITS, AttentionMetadata
from quire.kernels.experts import ExpertAdapters, ExpertWeights
from quire.kernels.linear import WeightScheme
from quire.kernels.low_rank import LowRankStacks
from quire.kernels.triton import (
    attention,
    batch,
    bidirectional,
    copies,
    elementwise,
    experts,
    latent,
    launch,
    linear,
    logprobs,
    low_rank,
    recurrence,
    rotary,
    sampling,
    scan,
)

SIZES = (1, 2, 3, 16, 17, 48, 255, 300)
"""Rows of a batch: one, odd and even ones, and multiples of 16, which Triton would tell from each other."""
VOCAB = 151_936
"""Whose rows are cut into 38 pieces, so that halves of memory begin at odd places."""
SCHEMES = (
    WeightScheme("int8"),
    WeightScheme("int8", 32),
    WeightScheme("int4", 32),
    WeightScheme("int4", 128, symmetric=False),
    WeightScheme("nf4", 64),
    WeightScheme("fp8", vendor=False),
)
Launches = Iterator[Callable[[], object]]


class Driver:
    """Stands in for a GPU's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


class Variants:
    """Record of compiled variants: for each kernel and its constants, the specializations that were asked for."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = defaultdict(set)
        self.kernels: set[str] = set()
        self.model = ""
        """Of layers of another form, whose variants are others; empty: that of all others."""

    def ask(self, *, fn: Any, compile: dict[str, Any], **_facts: Any) -> bool:
        """A hook of Triton's; True says that nothing is to be compiled."""
        kernel = fn.jit_function
        self.kernels.add(f"{Path(kernel.fn.__code__.co_filename).stem}.{kernel.fn.__name__}")
        declared = {param.name for param in kernel.params if param.is_constexpr}
        names = [param.name for param in kernel.params]
        constants = {names[place[0]]: value for place, value in compile["constants"].items()}
        chosen = {name: value for name, value in constants.items() if name in declared}
        absent = {name for name, value in constants.items() if name not in declared and value is None}
        types = {name: kind for name, kind in compile["signature"].items() if name not in declared | absent}
        aligned = {names[place[0]] for place, value in compile["configs"][0].items() if value}
        pointers = [kind for kind in types.values() if kind.startswith("*")]
        what = f"{self.model}{fn.name} {chosen} {compile['num_warps']} {pointers} without {sorted(absent)}"
        ones = sorted(name for name, kind in types.items() if kind == "constexpr")
        widths = sorted(f"{name}: {kind}" for name, kind in types.items() if kind == "i64")
        self.found[what].add(f"{ones} are 1, {sorted(aligned)} in sixteens, {widths}")
        return True


def launches(size: int) -> Launches:
    """Yield the launches of a batch of `size` rows or requests."""
    yield from _rowwise(size)
    yield from _attention(size)
    yield from _linears(size)
    yield from _adapters(size, [640])
    yield from _experts(size)
    yield from _states(size)
    yield from _sampling(size)
    yield from _steps(size)


def _rowwise(size: int) -> Launches:
    x, heads, weight = empty(size, 128), empty(size, 12, 64)[:, :4], empty(128)
    for normed in (elementwise.rms_norm, elementwise.rms_norm_fp8):
        yield partial(normed, x, weight, 1e-6)
    yield partial(elementwise.rms_norm, heads, empty(64), 1e-6)
    yield partial(elementwise.layer_norm, x, weight, weight, 1e-6)
    yield partial(elementwise.fused_add_rms_norm, x, x, weight, 1e-6)
    yield partial(elementwise.fused_add_rms_norm_fp8, x, x, weight, 1e-6)
    yield partial(elementwise.activate, x, "gelu")
    yield partial(elementwise.silu_and_mul, x)
    yield partial(elementwise.silu_and_mul_fp8, x)
    ids, cache, table = empty(size, dtype=torch.int64), _caches(size), empty(512, 64, dtype=torch.float32)
    yield partial(elementwise.embedding, ids, empty(300, 128))
    yield partial(rotary.rotary_embedding, ids, heads, heads, table)
    yield partial(rotary.write_kv, heads, heads, *cache, ids)
    yield partial(rotary.rotary_and_write_kv, ids, heads, heads, heads, table, *cache, ids)
    yield partial(copies.copy_blocks, cache[1], cache[1], empty(size, 2, dtype=torch.int64))


def _caches(size: int) -> tuple[Tensor, Tensor]:
    """Return key and value caches without memory; the number of blocks varies with the size."""
    both = empty(2, 9 + size, 4, 16, 64)
    return both[0].transpose(2, 3), both[1]


def _attention(size: int) -> Launches:
    for lengths in ([1] * size, [size], [5, *[1] * size]):
        q, step = empty(sum(lengths), 8, 64), _longer(attention_metadata(lengths), size)
        for run in (attention.paged_attention, attention.invariant_paged_attention):
            for window in (None, 100):
                yield partial(run, q, *_caches(size), step, 0.1, sliding_window=window)
        rows = q.split([4, 2, 2], 1)
        yield partial(bidirectional.bidirectional_attention, *rows, step, 0.1)
        if size < 100:
            yield partial(bidirectional.bidirectional_attention, *rows, step, 0.1, window=size)
        latents, cache = empty(sum(lengths), 16, 512 + 64), empty(9 + size, 16, 512 + 64)
        yield partial(latent.latent_attention, latents[:, :, :512], latents[:, :, 512:], cache, step, 0.1)
    ids, rows = empty(size, dtype=torch.int64), empty(size, 576)
    table = empty(512, 64, dtype=torch.float32)
    yield partial(latent.write_latents, ids, empty(size, 16, 64), rows, empty(512), table, cache, ids, 1e-6)


def _longer(step: AttentionMetadata, size: int) -> AttentionMetadata:
    """Sequences of another length."""
    return replace(step, max_seq_len=900 * size)


def _linears(size: int) -> Launches:
    x, bias = empty(size, 768), empty(640, dtype=torch.float32)
    for scheme in SCHEMES:
        weight = packed(scheme, 640, 768)
        yield partial(linear.packed_linear, x, weight, bias)
        yield partial(linear.packed_linear, x, weight)
        yield partial(latent.per_head_linear, empty(size, 4, 768), weight)
        yield partial(linear.packed_embedding, empty(size, dtype=torch.int64), weight)
    for scheme in (*SCHEMES, WeightScheme()):
        fixed = WeightScheme(scheme.kind, scheme.group_size, scheme.symmetric, vendor=False, invariant=True)
        yield partial(linear.packed_linear, x, packed(fixed, 640, 768), bias)


def _odd_linears(size: int) -> Launches:
    """Yield linears whose number of outputs is no multiple of 16."""
    for scheme in SCHEMES:
        yield partial(linear.packed_linear, empty(size, 768), packed(scheme, 250, 768))


def _adapters(size: int, parts: list[int]) -> Launches:
    stacks = LowRankStacks.empty(4, parts, 768, 16, torch.bfloat16, META)
    for first in (0, 1, 2, 4):
        slots = empty(first + size, dtype=torch.int32)[first:]
        yield partial(low_rank.low_rank_linear, empty(size, sum(parts)), empty(size, 768), slots, stacks)


def _experts(size: int) -> Launches:
    routing, count = Routing(4, normalized=True), 16
    yield partial(experts.route, empty(size, count), None, routing)
    rows = empty(size, 128), empty(size, 4, dtype=torch.int32), empty(size, 4, dtype=torch.float32)
    for scheme in (SCHEMES[0], SCHEMES[2]):
        gate_up, down = packed(scheme, 2 * 256, 128, 2), packed(scheme, 128, 256)
        of = ExpertWeights((gate_up,) * count, (down,) * count)
        yield partial(experts.experts, *rows, of)


def _adapted_experts(size: int) -> Launches:
    count, rows = 16, empty(size, 128)
    of = ExpertWeights(*((packed(SCHEMES[0], outputs, 128),) * count for outputs in (256, 128)))
    stacks = (
        LowRankStacks.empty(2 * count, [outputs], 128, 16, torch.bfloat16, META) for outputs in (256, 128)
    )
    chosen, weights = empty(size, 4, dtype=torch.int32), empty(size, 4, dtype=torch.float32)
    yield partial(
        experts.experts, rows, chosen, weights, of, empty(size, dtype=torch.int32), ExpertAdapters(*stacks)
    )


def _states(size: int) -> Launches:
    wide = partial(empty, dtype=torch.float32)
    for lengths in ([1] * size, [size]):
        rows, step, blocks = sum(lengths), state_metadata(lengths), 9 + size
        x, channels, heads = empty(rows, 256), wide(256), wide(4)
        yield partial(scan.causal_conv, x, wide(4, 256), channels, wide(blocks, 3, 256), step, True)
        b, dt = empty(rows, 16), empty(rows, 4)
        yield partial(
            scan.selective_scan, x, x, wide(16, 256), b, b, channels, x, wide(blocks, 16, 256), step
        )
        kept = wide(blocks, 4, 16, 64)
        yield partial(scan.ssd_scan, x, dt, heads, b, b, heads, heads, None, kept, step)
        qkv, ba, kept = empty(rows, 2 * 128 + 256), empty(rows, 8), wide(blocks, 4, 64, 64)
        yield partial(recurrence.gated_delta, qkv, ba, heads, heads, kept, step)
        yield partial(recurrence.rwkv7, *[x] * 5, wide(5, 256), kept, step, 64e-5)
        gates = wide(4, 64, 128)
        yield partial(recurrence.rg_lru, x, gates, wide(4, 128), channels, wide(blocks, 256), step)


def _sampling(size: int) -> Launches:
    rows, ids = empty(size, VOCAB, dtype=torch.float32), empty(size, dtype=torch.int64)
    yield partial(logprobs.unusable_rows, rows)
    yield partial(logprobs.clear_rows, rows, empty(size, dtype=torch.bool))
    yield partial(logprobs.mask_logits, rows, ids, empty(size, -(-VOCAB // 32), dtype=torch.int32))
    places, factors = empty(size, 4, dtype=torch.int64), empty(size, 3, dtype=torch.float64)
    yield partial(logprobs.penalize_rows, rows, empty(64, 900, dtype=torch.int32), places, factors, 3 * size)
    settings, keys = empty(size, 4, dtype=torch.float64), empty(size, 2, dtype=torch.int64)
    for chosen in (None, keys):
        for limits in (NO_LIMITS, ANY_LIMITS):
            yield partial(sampling.sample_tokens, rows, settings, chosen, limits)
    for num_top in (0, 1, 5, 16, 20):
        yield partial(logprobs.token_logprobs, rows, ids, num_top)


def _steps(size: int) -> Launches:
    rows, staged = empty(400, 4096, dtype=torch.int32), empty(9000, dtype=torch.int32)
    step, ids, counts = (
        batch.StagedStep(staged, size, size),
        empty(5 * size, dtype=torch.int64),
        empty(size + 2, dtype=torch.int32),
    )
    yield partial(batch.write_segments, rows, staged, size, size, 3 * size)
    yield partial(batch.prepare_tokens, ids, ids, counts, counts, step, rows, size + 1, size)
    yield partial(batch.prepare_blocks, ids, rows, step, rows, 16, size + 1, size, 900)
    yield partial(batch.keep_sampled, rows, ids, step)


def kernels_of_the_package() -> set[str]:
    """All that some module of it launches, as module.name: `name[grid](...)`, or of the module that is named."""
    assert package.__file__ is not None
    found = set()
    for path in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = node.func.value
                if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                    found.add(f"{called.value.id}.{called.attr}")
                elif isinstance(called, ast.Name):
                    found.add(f"{path.stem}.{called.id}")
    return found


def main() -> None:
    driver.set_active(Driver())
    launch.num_processors = lambda _device: 132
    variants = Variants()
    knobs.runtime.jit_cache_hook = variants.ask
    models: dict[str, Callable[[int], Launches]] = {
        "": launches,
        "odd ": _odd_linears,
        "merged ": partial(_adapters, parts=[512, 128]),
        "experts ": _adapted_experts,
    }
    for variants.model, of_size in models.items():
        for size in SIZES:
            for run in of_size(size):
                run()
    for what, found in variants.found.items():
        if len(found) > 1:
            print(f"several: {what}: {' / '.join(sorted(found))}")
    known = kernels_of_the_package()
    print(f"not launched: {sorted(known - variants.kernels)}")
    print(f"kernels: {len(variants.kernels)}, with their constants: {len(variants.found)}")


if __name__ == "__main__":
    main()
