# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, beside transformers and beside prompts without, in turn; random weights.

    python -m benchmarks.images [--cases first eight turn text] [--quantization int8] [--rounds 3] [--alone]

The model is LLaVA 1.5's build: a CLIP-L tower for 336 x 336 pixels (576 embeddings) before the language model of half a
billion parameters of `benchmarks/models/dummy-0.5b`. Cases, with the median of the rounds' ratios:

    first   seconds to the first token of one prompt with a new image, beside transformers in float32
    eight   seconds of eight requests with an image of their own and 32 tokens each, beside transformers in float32
    turn    a second question about an image, beside one after a text of the same length
    text    a prompt and 32 tokens without an image, beside the language model alone
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from tests.engine.conftest import byte_level_tokenizer

TEXT_CONFIG = Path(__file__).parent / "models" / "dummy-0.5b" / "config.json"
SIDE, NUM_EMBEDDINGS = 336, 576
CLIP_L = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": SIDE, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE}, "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
}  # fmt: skip
NUM_TEXT, NUM_OUTPUT, NUM_AT_ONCE = 32, 32, 8
REST_S = 0.3
Timed = Callable[[int], float]
"""Function of a round's number that returns seconds."""


class Drawn:
    """Model directory, and prompts with new images and texts."""

    def __init__(self, directory: Path) -> None:
        tokenizer: Tokenizer = byte_level_tokenizer()
        tokenizer.add_special_tokens(["<image>"])
        self.image_token = tokenizer.token_to_id("<image>")
        self.directory = directory
        self.text_config = json.loads(TEXT_CONFIG.read_text())
        config = {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": self.image_token,
            "vision_config": CLIP_L,
            "text_config": self.text_config,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        }
        processor = {
            "processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1, "image_token": "<image>",
        }  # fmt: skip
        files = {
            "config.json": config,
            "preprocessor_config.json": PREPROCESSOR,
            "processor_config.json": processor,
            "tokenizer_config.json": {"eos_token": "<|end|>"},
        }
        for name, values in files.items():
            (directory / name).write_text(json.dumps(values))
        tokenizer.save(str(directory / "tokenizer.json"))
        self._random = np.random.default_rng(1)

    def image(self) -> Image.Image:
        return Image.fromarray(self._random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))

    def text(self, num_tokens: int = NUM_TEXT) -> list[int]:
        drawn: list[int] = self._random.integers(3, 250, num_tokens).tolist()
        return drawn

    def prompt(self) -> dict[str, Any]:
        ids = [*self.text(4), self.image_token, *self.text()]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": self.image()}}


def spent(llm: LLM, prompts: list[Any], num_tokens: int) -> tuple[float, list[Any]]:
    """Return the seconds of requests, and their outputs."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, outputs


class Hugging:
    """The same build in transformers, in float32."""

    def __init__(self, drawn: Drawn) -> None:
        import torch
        from transformers import LlavaConfig, LlavaForConditionalGeneration

        self._torch, self._drawn = torch, drawn
        self._model = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(drawn.directory)).eval()

    def seconds(self, num_prompts: int, num_tokens: int) -> float:
        torch, token = self._torch, self._drawn.image_token
        ids = [
            [*self._drawn.text(4), *[token] * NUM_EMBEDDINGS, *self._drawn.text()] for _ in range(num_prompts)
        ]
        pixels = torch.randn(num_prompts, 3, SIDE, SIDE)
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(ids), pixel_values=pixels, max_new_tokens=num_tokens,
                min_new_tokens=num_tokens, do_sample=False,
            )  # fmt: skip
        return time.perf_counter() - start


class Bench:
    """Cases; each returns the names and functions of two sides, the first of them the one that is judged."""

    def __init__(self, drawn: Drawn, args: argparse.Namespace) -> None:
        self.drawn, self.args = drawn, args
        self.llm = self.engine(drawn.directory)
        self._peer: Hugging | None = None

    def engine(self, directory: Path, **options: Any) -> LLM:
        fixed: dict[str, Any] = {"load_format": "dummy", "max_model_len": 2048, "max_num_seqs": NUM_AT_ONCE}
        fixed |= {"gpu_memory_utilization": 0.2, "quantization": self.args.quantization}
        return LLM(str(directory), **fixed | options)

    def first(self) -> dict[str, Timed]:
        return self._beside_transformers(1, 1)

    def eight(self) -> dict[str, Timed]:
        return self._beside_transformers(NUM_AT_ONCE, NUM_OUTPUT)

    def _beside_transformers(self, num_prompts: int, num_tokens: int) -> dict[str, Timed]:
        drawn = self.drawn
        sides: dict[str, Timed] = {
            "quire": lambda _: spent(self.llm, [drawn.prompt() for _ in range(num_prompts)], num_tokens)[0]
        }
        if not self.args.alone:
            self._peer = peer = self._peer or Hugging(drawn)
            sides["transformers float32"] = lambda _: peer.seconds(num_prompts, num_tokens)
        return sides

    def turn(self) -> dict[str, Timed]:
        drawn = self.drawn
        seen = drawn.prompt()
        text = {"prompt_token_ids": drawn.text(NUM_EMBEDDINGS + len(seen["prompt_token_ids"]) - 1)}

        def again(prompt: dict[str, Any]) -> Timed:
            _, (output,) = spent(self.llm, [prompt], NUM_OUTPUT)
            said = [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
            return lambda _: spent(self.llm, [{**prompt, "prompt_token_ids": [*said, *drawn.text()]}], 1)[0]

        return {"after an image": again(seen), "after a text": again(text)}

    def text(self) -> dict[str, Timed]:
        folder = self.drawn.directory / "language"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.drawn.text_config))
        alone = self.engine(folder, skip_tokenizer_init=True)

        def side(llm: LLM) -> Timed:
            return lambda _: spent(llm, [{"prompt_token_ids": self.drawn.text(256)}], NUM_OUTPUT)[0]

        return {"LLaVA": side(self.llm), "its language model": side(alone)}


CASES = ("first", "eight", "turn", "text")


def measure(name: str, sides: dict[str, Timed], num_rounds: int, *, warms_up: bool = True) -> None:
    """Warm both sides up, let them take turns, and print medians and the ratio."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-1 if warms_up else 0, num_rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            time.sleep(REST_S)
            found = sides[side](number)
            if number >= 0:
                times[side].append(found)
    ours, *others = times.values()
    medians = ", ".join(f"{side} {statistics.median(each):.3f} s" for side, each in times.items())
    ratios = [
        statistics.median(mine / theirs for mine, theirs in zip(ours, each, strict=True)) for each in others
    ]
    print(f"{name:8} {medians}" + "".join(f"; ratio {ratio:.3f}" for ratio in ratios), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--quantization", choices=("int8", "int4"), help="of quire's weights; else bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without transformers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Drawn(Path(name)), args)
        for case in args.cases:
            measure(case, getattr(bench, case)(), args.rounds)


if __name__ == "__main__":
    main()
