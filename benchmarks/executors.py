"""What a step costs more because its rank is a process of its own: `python -m benchmarks.executors [--overlapped]`.

One token at a time of a model of one tiny layer, by an engine with the executor `uni` and one with `mp`, in turn.
Prints microseconds per step, each the median over rounds of a request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import SamplingParams

ROUNDS, TOKENS = 15, 200
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def started(directory: Path, executor: str, overlapped: bool) -> LLMEngine:
    return LLMEngine(
        EngineConfig.from_args(
            model=str(directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            cpu_threads=1,
            max_model_len=512,
            max_num_seqs=1,
            num_gpu_blocks_override=64,
            distributed_executor_backend=executor,
            async_scheduling=overlapped,
        )
    )


def seconds_per_step(engine: LLMEngine, name: str) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": [1, 2, 3]}, params)
    engine.step()
    began, steps = time.perf_counter(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--overlapped", action="store_true", help="plan a step while the one before is computed"
    )
    overlapped = parser.parse_args().overlapped
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        engines = {name: started(Path(directory), name, overlapped) for name in ("uni", "mp")}
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(ROUNDS):
        for name, engine in engines.items():
            found[name].append(seconds_per_step(engine, f"{number}"))
    uni, mp = (1e6 * statistics.median(times) for times in found.values())
    print(f"a step takes {uni:.0f} us with uni and {mp:.0f} us with mp: {mp - uni:+.0f} us")
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
