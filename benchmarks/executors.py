# SPDX-License-Identifier: Apache-2.0
"""Cost per step of a rank in a process of its own: `python -m benchmarks.executors [--overlapped]`.

One token at a time of a model of one tiny layer, by an engine with the executor `uni` and one with `mp`, in turn.
Prints microseconds per step, each the median over rounds of a request.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks import made_up

ROUNDS, TOKENS = 15, 200
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--overlapped", action="store_true", help="plan a step while the one before is computed"
    )
    overlapped = parser.parse_args().overlapped
    with tempfile.TemporaryDirectory() as directory:
        model = made_up.written(Path(directory), **SIZES)
        engines = {
            name: made_up.started(model, distributed_executor_backend=name, async_scheduling=overlapped)
            for name in ("uni", "mp")
        }
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(ROUNDS):
        for name, engine in engines.items():
            found[name].append(made_up.timed(engine, f"{number}", [1, 2, 3], TOKENS)[1])
    uni, mp = (1e6 * statistics.median(times) for times in found.values())
    print(f"a step takes {uni:.0f} us with uni and {mp:.0f} us with mp: {mp - uni:+.0f} us")
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
