# SPDX-License-Identifier: Apache-2.0
"""Loss of a model run by transformers' code: the same Llama, with quire's layers and with theirs in turn.

    python benchmarks/implementations.py [--rounds 5] [--num-layers 8]

Both have the same random weights, in bfloat16; prints the medians, and the share of our own speed that is left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from quire import LLM, SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
IMPLEMENTATIONS = ("quire", "transformers")


class Load(NamedTuple):
    """Requests that begin at once."""

    name: str
    num_requests: int
    prompt_len: int
    output_len: int


LOADS = (Load("decode, 1 x 32", 1, 8, 32), Load("prefill, 512", 1, 512, 1), Load("16 x 64/16", 16, 64, 16))


def prompts(load: Load, number: int) -> list[list[int]]:
    """Return prompts that no two runs share, so that no prefix is cached."""
    size = int(MODEL["vocab_size"])  # type: ignore[call-overload]
    rows, columns = range(load.num_requests), range(load.prompt_len)
    return [[(row * 7 + column * 13 + number) % (size - 100) + 5 for column in columns] for row in rows]


def seconds(llm: LLM, load: Load, number: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=load.output_len, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts(load, number), params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-layers", type=int, default=MODEL["num_hidden_layers"])
    args = parser.parse_args()
    model = MODEL | {"num_hidden_layers": args.num_layers}
    taken: dict[tuple[Load, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(model))
        llms = {
            name: LLM(
                directory,
                model_impl=name,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=1024,
                device="cpu",
            )
            for name in IMPLEMENTATIONS
        }
        for number in range(-1, args.rounds):  # the first is to warm up
            for load in LOADS:
                for name, llm in llms.items():
                    taken[load, name].append(seconds(llm, load, number))
    for load in LOADS:
        ours, theirs = (statistics.median(taken[load, name][1:]) for name in IMPLEMENTATIONS)
        print(f"{load.name:16} quire {ours:.3f} s   transformers {theirs:.3f} s   {ours / theirs:.0%}")


if __name__ == "__main__":
    main()
