# SPDX-License-Identifier: Apache-2.0
"""Cost of a constraint: tokens per second with and without a JSON schema, in turns, on one engine.

    python benchmarks/structured.py [MODEL] [--batch-size 16] [--num-tokens 200] [--num-rounds 8] [--json FILE]
    python benchmarks/structured.py --large --quantization int8 --num-tokens 40 --num-rounds 4

Every request generates the same number of tokens either way. The schema is such that its texts never end before: a list
of objects without a bound. Printed are the medians over the rounds, and of each round's ratio. `--large` is a model of
half a billion random weights, with 151,936 tokens that are made up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.grammar_libraries import vocabulary
from quire import LLM, SamplingParams
from quire.config import DEMO_MODEL
from quire.engine.tokenizer_files import BYTE_OF_CHAR
from quire.sampling_params import StructuredOutputsParams

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 4, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
            "address": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
        "required": ["name", "age", "tags", "address"],
        "additionalProperties": False,
    },
}
LARGE = Path(__file__).parent / "models" / "dummy-0.5b"
PROMPT = "A list of people, as JSON: "


@dataclass(frozen=True)
class Cost:
    """Cost of a constraint for one model and batch size."""

    model: str
    batch_size: int
    num_tokens: int
    free_tokens_per_s: float
    constrained_tokens_per_s: float
    loss: float
    """1 - constrained / free, the median over the rounds."""

    def line(self) -> str:
        return (
            f"{self.model}, batch {self.batch_size}: {self.free_tokens_per_s:.0f} tokens/s free, "
            f"{self.constrained_tokens_per_s:.0f} with a schema, {self.loss:.1%} less"
        )


def tokens_per_s(llm: LLM, args: argparse.Namespace, constraint: StructuredOutputsParams | None) -> float:
    """Return the rate of one round."""
    params = [
        SamplingParams(
            structured_outputs=constraint,
            seed=seed,
            max_tokens=args.num_tokens,
            ignore_eos=constraint is None,
        )
        for seed in range(args.batch_size)
    ]
    started = time.perf_counter()
    outputs = llm.generate([PROMPT] * args.batch_size, params, use_tqdm=False)
    duration = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / duration


def write_large(directory: Path) -> None:
    """The shape of `models/dummy-0.5b` with a tokenizer of made-up tokens, which encodes a text byte by byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    config = json.loads((LARGE / "config.json").read_text())
    spelled = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    *tokens, end = vocabulary(config["vocab_size"])
    symbols = ["".join(spelled[byte] for byte in token) for token in tokens]
    ids = {symbol: token_id for token_id, symbol in enumerate([*symbols, end.decode()])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end.decode(), special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end.decode()}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    ends = {"bos_token_id": None, "eos_token_id": len(tokens)}
    (directory / "config.json").write_text(json.dumps(config | ends))


def measure(args: argparse.Namespace, model: str, **options: Any) -> Cost:
    llm = LLM(
        model,
        max_num_seqs=args.batch_size,
        max_model_len=1024,
        enable_prefix_caching=False,
        quantization=args.quantization,
        num_scheduler_steps=1,  # which is what a constraint leaves
        **options,
    )
    constraint = StructuredOutputsParams(json=SCHEMA)
    for warm_up in (None, constraint):
        tokens_per_s(llm, args, warm_up)
    rounds = [
        (tokens_per_s(llm, args, None), tokens_per_s(llm, args, constraint)) for _ in range(args.num_rounds)
    ]
    free, constrained = zip(*rounds, strict=True)
    loss = statistics.median(1 - slow / fast for fast, slow in rounds)
    medians = statistics.median(free), statistics.median(constrained)
    return Cost(model, args.batch_size, args.num_tokens, *medians, loss)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEMO_MODEL)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=200)
    parser.add_argument("--num-rounds", type=int, default=8)
    parser.add_argument("--quantization")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.large:
        with tempfile.TemporaryDirectory() as directory:
            write_large(Path(directory))
            cost = replace(measure(args, directory, load_format="dummy"), model="dummy-0.5b")
    else:
        cost = measure(args, args.model)
    print(cost.line())
    if args.json:
        args.json.write_text(json.dumps(asdict(cost)))


if __name__ == "__main__":
    main()
