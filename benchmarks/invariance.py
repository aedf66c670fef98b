"""What sums of fixed slices cost (`--tp-invariant`): `python -m benchmarks.invariance [--hidden 1024] [--layers 8]`.

A made-up Llama, by engines of one rank and of two, each with and without, in turn. Prints the time of a prompt of 256
tokens and of a step of one token, each the median over rounds, and by how much they are longer with slices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import SamplingParams

ROUNDS, PROMPT, TOKENS = 9, 256, 32
CASES = [(ranks, invariant) for ranks in (1, 2) for invariant in (False, True)]


def written(directory: Path, hidden: int, layers: int) -> Path:
    heads = hidden // 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def started(model: Path, ranks: int, invariant: bool, quantization: str | None) -> LLMEngine:
    return LLMEngine(
        EngineConfig.from_args(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            cpu_threads=1,
            max_model_len=512,
            max_num_seqs=1,
            max_num_batched_tokens=PROMPT,
            num_gpu_blocks_override=64,
            enable_prefix_caching=False,
            tensor_parallel_size=ranks,
            tp_invariant=invariant,
            quantization=quantization,
        )
    )


def timed(engine: LLMEngine, name: str) -> tuple[float, float]:
    """Seconds of the prompt, and of each step behind it."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": list(range(PROMPT))}, params)
    began = time.perf_counter()
    engine.step()
    prompt_s, began, steps = time.perf_counter() - began, time.perf_counter(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return prompt_s, (time.perf_counter() - began) / steps


def report(found: Mapping[tuple[int, bool], list[tuple[float, float]]]) -> None:
    for ranks in (1, 2):
        for index, what in enumerate((f"a prompt of {PROMPT} tokens", "a step of one token")):
            plain, sliced = (
                1e3 * statistics.median(times[index] for times in found[ranks, invariant])
                for invariant in (False, True)
            )
            print(
                f"{ranks} rank{'s' * (ranks > 1)}: {what} takes {plain:.2f} ms, with slices {sliced:.2f} ms "
                f"({sliced / plain - 1:+.1%})"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024, help="features, a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--quantization", help="as of quire serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = written(Path(directory), args.hidden, args.layers)
        engines = {case: started(model, *case, args.quantization) for case in CASES}
    found: dict[tuple[int, bool], list[tuple[float, float]]] = {case: [] for case in CASES}
    for number in range(ROUNDS):
        for case, engine in engines.items():
            found[case].append(timed(engine, f"{number}"))
    report({case: times[1:] for case, times in found.items()})  # the first round records steps
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
