# SPDX-License-Identifier: Apache-2.0
"""Speed of every architecture, with random weights of about half a billion parameters.

    python -m benchmarks.families [--only LlamaForCausalLM ...] [--rounds 2] [--record]

Each is the tests' tiny model of it, but wider, and with its layers repeated until there are enough parameters: so sizes
are of no published model, and alike in all. Printed are billions of parameters, tokens per second of one request of few
tokens, and prompt tokens per second of one of 512, the best of some rounds, in bfloat16 as `--matmul-precision auto`
multiplies it. `--record` writes the numbers with the date and the machine, and docs/models.md with them: run it in the
root of the repository, and on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.entrypoints.cli.doctor import cpu_model
from quire.kernels import cpu
from quire.models import loader
from quire.models.built_in import BUILT_IN
from quire.models.checkpoint import read_model_config
from quire.models.registry import ModelRegistry
from tests.fixtures.kinds import MODELS
from tests.fixtures.tiny_models import write_tiny_model
from tools.models_page import PAGE, SPEEDS, models_page

PARAMETERS = 5e8
PROMPT, NUM_DECODED = 512, 16
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
LAYERS = r"^(num(_hidden|_transformer)?|n)_layers?$"
FACTORS = (
    (r"vocab_size", 120),
    (r"max_position|n_positions|seq_?len|n_ctx|max_length|max_context", 8),
    (r"sliding_window$|window_size|attention_chunk_size", 64),
    (r"head_?dim$|d_head$|kv_channels|per_head$|rotary_dim", 4),
    (r"heads|n_head$|query_groups$|query_group_num$", 4),
    (r"hidden_size|intermediate_size|n_embd|n_inner|d_model|model_dim|proj_dim|ffn_(dim|hidden_size)$", 16),
    (r"rank|lru_width|d_ssm|d_state|state_size|value_dim", 16),
)
"""By how much integers grow, by what their names have in them; the first that fits counts."""
GROWING = rf"{LAYERS}|num_kv_shared_layers|max_window_layers|moe_layer_end_index"
"""Numbers that grow with the number of layers."""
NUMBERS_OF_LAYERS = r"layer_indices|_idx$|layer_ids|only_layers|moe_layers|bskcn_\d|attn_layers|kda_layers"
FREQUENCIES = r"(short|long)_factor"
"""Lists with a number for each pair of a head's rotated values."""
OF_PARTS = r"(mlp|ssm)_multipliers|time_step_limit"
"""Lists that have as many numbers whatever the number of layers."""


def enlarged(config: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """A tiny model's config.json, made wider and so many times as deep."""
    depth = next((config[key] for key in config if re.search(LAYERS, key)), None)
    return _enlarged(config, depth or len(config["layers_block_type"]), repeats)


def _enlarged(config: Mapping[str, Any], depth: int, repeats: int) -> dict[str, Any]:
    return {key: _grown(key, value, depth, repeats) for key, value in config.items()}


def _grown(key: str, value: Any, depth: int, repeats: int) -> Any:
    if isinstance(value, dict):
        return _enlarged(value, depth, repeats)
    if isinstance(value, list):
        return _grown_list(key, value, depth, repeats)
    if type(value) is not int:
        return value
    if re.search(GROWING, key):
        return value * repeats
    return value * next((factor for pattern, factor in FACTORS if re.search(pattern, key)), 1)


def _grown_list(key: str, values: list[Any], depth: int, repeats: int) -> list[Any]:
    if re.search(NUMBERS_OF_LAYERS, key):
        return [number + depth * repeat for repeat in range(repeats) for number in values]
    if re.search(FREQUENCIES, key):
        return [value for value in values for _ in range(4)]
    if key == "attention_types":
        return [[kinds, count * repeats] for kinds, count in values]
    if re.search(OF_PARTS, key):
        return values
    if key == "mlp_layer_types":  # which are dense first, and then sparse
        return values + values[-1:] * depth * (repeats - 1)
    grown = [_grown(key, value, depth, repeats) for value in values]
    return grown * repeats if len(values) == depth else grown


def num_parameters(directory: Path) -> int:
    """Return the number of parameters of the model that config.json describes."""
    config = EngineConfig.from_args(model=str(directory), dtype="bfloat16", device="cpu")
    arch = read_model_config(directory, config.model.hf_overrides, config.model.model_impl)
    place = ModelRegistry.place_of(arch.architecture, config.model.model_impl)
    model = loader.without_weights(
        replace(config, model_dir=str(directory), model_arch=arch, model_class=place)
    )
    return sum(parameter.numel() for parameter in model.parameters())


def write_large(tiny: Path, directory: Path) -> int:
    """A checkpoint without weights, of which there would be about `PARAMETERS`; returns how many."""
    directory.mkdir()
    for name in TOKENIZER:
        shutil.copy(tiny / name, directory)
    config = json.loads((tiny / "config.json").read_text())

    def counted(repeats: int) -> int:
        (directory / "config.json").write_text(json.dumps(enlarged(config, repeats)))
        return num_parameters(directory)

    once, twice = counted(1), counted(2)
    return counted(max(1, round(1 + (PARAMETERS - once) / (twice - once))))


def tiny_models(folder: Path, wanted: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """The first tiny checkpoint of each architecture that is wanted."""
    left = set(wanted)
    for name in MODELS:
        directory = write_tiny_model(name, folder / name)
        (architecture,) = json.loads((directory / "config.json").read_text())["architectures"]
        if architecture in left:
            left.remove(architecture)
            yield architecture, directory


class Speed(NamedTuple):
    """Billions of parameters; tokens per second of one request, and of a prompt."""

    billions: float
    decode: float
    prefill: float


def measured(directory: Path, rounds: int) -> tuple[float, float]:
    """Tokens per second of one request in decode, and of a prompt."""
    llm = LLM(
        str(directory),
        load_format="dummy",
        dtype="bfloat16",
        device="cpu",
        max_model_len=PROMPT + 2,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )

    def seconds(num_prompt: int, num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([[5] * num_prompt], params, use_tqdm=False)
        return time.perf_counter() - start

    try:
        seconds(8, 4)
        decode = _least(lambda: seconds(8, 1 + NUM_DECODED) - seconds(8, 1), rounds)
        return NUM_DECODED / decode, PROMPT / _least(lambda: seconds(PROMPT, 1), rounds)
    finally:
        llm.llm_engine.shutdown()


def _least(run: Callable[[], float], rounds: int) -> float:
    return min(run() for _ in range(rounds))


def record(speeds: Mapping[str, Speed]) -> None:
    """Write the numbers, and the page that has them."""
    about = {
        "date": datetime.now(UTC).strftime("%d %B %Y").lstrip("0"),
        "machine": f"{cpu_model()} ({cpu.status()})",
        "threads": torch.get_num_threads(),
        "speeds": {name: [round(each, 2) for each in speed] for name, speed in sorted(speeds.items())},
    }
    SPEEDS.write_text(json.dumps(about, indent=1) + "\n")
    PAGE.write_text(models_page())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(BUILT_IN), default=list(BUILT_IN), metavar="ARCHITECTURE"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    speeds: dict[str, Speed] = {}
    print(f"{'architecture':36} {'billions':>8} {'decode':>8} {'prefill':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for architecture, tiny in tiny_models(Path(folder), args.only):
            directory = tiny.with_name(f"{tiny.name}-large")
            billions = write_large(tiny, directory) / 1e9
            speed = speeds[architecture] = Speed(billions, *measured(directory, args.rounds))
            print(
                f"{architecture:36} {speed.billions:8.2f} {speed.decode:8.1f} {speed.prefill:8.0f}",
                flush=True,
            )
    if args.record:
        record(speeds)
        print(f"{SPEEDS} and {PAGE} are written")


if __name__ == "__main__":
    main()
