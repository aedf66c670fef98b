# SPDX-License-Identifier: Apache-2.0
"""Error of quire's logits against float32, for every format of weights and cache.

    python benchmarks/accuracy.py [MODEL] [--modes MODE ...] [--methods rtn gptq awq] [--also DIR ...]
                                  [--num-sequences 8] [--num-tokens 64] [--json FILE]

The reference is transformers in float32, with the weights that bfloat16 holds; the text is drawn from it, so that it is
such as the model knows. Printed are, over all positions, the relative error of the logits,
||ours - reference|| / ||reference||, the mean distance of the logprob of the token that comes next, and how often the
likeliest token is the same, and the perplexity. `--also` names checkpoints of the same model, as `quire quantize`
writes them, which are held against the reference as well; `--methods` has such written first, of `--bits` in groups of
`--group-size`, calibrated by the first `--calibration-sequences` texts in the box. A model of random weights in the
shape of half a billion parameters is made by `python -m benchmarks.compare.checkpoint DIR`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, set_seed

from quire.config import DEMO_MODEL, EngineConfig
from quire.engine.startup import prepare
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import KVCacheConfig
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.checkpoint import resolve_model_dir
from quire.models.loader import load_model
from quire.quantize.grid import IntegerGrid
from quire.quantize.recipe import METHODS, Recipe
from quire.quantize.run import quantize_checkpoint

PRECISE = {"quantization_config": {"mode": "precise"}}
MODES: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"matmul_precision": "highest"},
    "bf16, auto": {},
    "bf16, int8 cache": {"kv_cache_dtype": "int8"},
    "int8 precise": {"quantization": "int8", **PRECISE},
    "int8 fast": {"quantization": "int8"},
    "int8 fast, int8 cache": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4 precise": {"quantization": "int4", **PRECISE},
    "int4 fast": {"quantization": "int4"},
    "int4 fast, int4 head": {"quantization": "int4", "quantization_config": {"head": "int4"}},
}
"""Name -> arguments of the engine beside the weights' bfloat16."""
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Accuracy:
    """One mode against the reference."""

    mode: str
    relative_error: float
    mean_logprob_distance: float
    top1_agreement: float
    perplexity: float

    def line(self) -> str:
        """The result for people."""
        numbers = (
            f"{self.relative_error:16.2e} {self.mean_logprob_distance:18.5f} {self.top1_agreement:12.2%}"
            f" {self.perplexity:12.4f}"
        )
        return f"{self.mode:24}{numbers}"


def reference(model: str, num_sequences: int, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids [S, T] drawn from the model, and its float32 logits [S, T, V]."""
    directory = resolve_model_dir(model, None, None)
    exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).float().eval()
    exact.generation_config.eos_token_id = None  # text goes on after an end
    set_seed(seed)
    first = torch.randint(3, exact.config.vocab_size, (num_sequences, 1))
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    with torch.inference_mode():
        ids = exact.generate(first, max_new_tokens=num_tokens - 1, pad_token_id=0, **sampling)
        return ids, torch.stack([exact(row[None]).logits[0] for row in ids])


@torch.inference_mode()
def logits_of(model: CausalLM, ids: Tensor) -> Tensor:
    """One sequence [T] -> float32 [T, V], through a cache of its own."""
    num_tokens = len(ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    specs = kv_cache_specs(model)
    kv_config = KVCacheConfig(num_blocks, group_layers(specs, BLOCK_SIZE, hybrid=False), specs)
    bind_kv_cache(model, kv_config, allocate_kv_cache(kv_config, torch.device("cpu")))
    positions = torch.arange(num_tokens)
    block_ids = torch.arange(num_blocks) * kv_config.parts_per_block(kv_config.groups[0])
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=block_ids.int()[None],
        slot_mapping=block_ids[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    return model.compute_logits(model.forward(ids, positions, StepContext((metadata,))))


def compare(mode: str, model: str, options: Mapping[str, Any], ids: Tensor, expected: Tensor) -> Accuracy:
    """Load the model with the mode's options and hold its logits against the expected ones [S, T, V]."""
    args = {"dtype": "bfloat16", "block_size": BLOCK_SIZE, **options}
    loaded = load_model(prepare(EngineConfig.from_args(model=model, **args), "offline"))
    ours = torch.stack([logits_of(loaded, row) for row in ids])
    return Accuracy(
        mode=mode,
        relative_error=float((ours - expected).double().norm() / expected.double().norm()),
        mean_logprob_distance=float((_next(ours, ids) - _next(expected, ids)).abs().mean()),
        top1_agreement=float((ours.argmax(-1) == expected.argmax(-1)).double().mean()),
        perplexity=float(_next(ours, ids).mean().neg().exp()),
    )


def _next(logits: Tensor, ids: Tensor) -> Tensor:
    """Logprobs of the tokens that follow: [S, T, V] and [S, T] -> [S, T - 1]."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def measure(
    model: str, modes: Sequence[str], num_sequences: int, num_tokens: int, also: Sequence[Path] = ()
) -> list[Accuracy]:
    """Every mode, and the checkpoints `also`, on the same text."""
    ids, expected = reference(model, num_sequences, num_tokens)
    own = [compare(mode, model, MODES[mode], ids, expected) for mode in modes]
    return own + [compare(path.name, str(path), {}, ids, expected) for path in also]


def quantized(
    model: str, methods: Sequence[str], grid: IntegerGrid, num_sequences: int, into: Path
) -> list[Path]:
    """The model as `quire quantize` writes it by each method."""
    for method in methods:
        texts = {} if method == "rtn" else {"num_sequences": num_sequences}
        config = EngineConfig.from_args(model=model, device="cpu")
        quantize_checkpoint(config, Recipe(method, grid, **texts), into / method)
    return [into / method for method in methods]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEMO_MODEL)
    parser.add_argument("--num-sequences", type=int, default=8)
    parser.add_argument("--num-tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[], help="of quire quantize")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--calibration-sequences", type=int, default=128)
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="checkpoints of the same model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as written:
        grid = IntegerGrid(args.bits, args.group_size)
        also = quantized(args.model, args.methods, grid, args.calibration_sequences, Path(written))
        results = measure(args.model, args.modes, args.num_sequences, args.num_tokens, also + args.also)
    print(f"{'mode':24}{'relative error':>16} {'mean |d logprob|':>18} {'same top-1':>12} {'perplexity':>12}")
    for result in results:
        print(result.line())
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
