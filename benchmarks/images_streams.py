# SPDX-License-Identifier: Apache-2.0
"""Time between the tokens of running streams while an image is encoded, beside the time before it.

    python -m benchmarks.images_streams [--streams 8] [--quantization int8] [--rounds 2] [--slice-ms 30]

The server has Gemma 3's tower (SigLIP for 896 x 896 pixels: 4,096 patches, 27 layers of 1,152 channels) before a
language model of the shape of Gemma 3 270M; random weights. A round begins streams of letters, waits, and sends an
image among them; the streams' gaps count until its first token. The goal: a 99th percentile of at most twice that
without it.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.served import server
from tests.engine.conftest import byte_level_tokenizer

SIDE, NUM_EMBEDDINGS = 896, 256
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": SIDE, "patch_size": 14,
}  # fmt: skip
TEXT = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "sliding_window": 512, "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
}  # fmt: skip
TOKENS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<start_of_image>{% endif %}{% endfor %}{% endfor %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
QUIET_S, NUM_TOKENS, LIMIT_S = 8.0, 3000, 300.0


def write_model(directory: Path) -> list[int]:
    """Write a directory without weights; return the ids of the letters."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(TOKENS))
    keys = ("image_token_index", "boi_token_index", "eoi_token_index")
    ids = dict(zip(keys, map(tokenizer.token_to_id, TOKENS), strict=True))
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", **ids}
    config |= {"vision_config": SIGLIP, "text_config": TEXT, "mm_tokens_per_image": NUM_EMBEDDINGS}
    names = dict(zip(("image_token", "boi_token", "eoi_token"), TOKENS, strict=True))
    size = {"height": SIDE, "width": SIDE}
    files: dict[str, Any] = {
        "config.json": config,
        "preprocessor_config.json": {"image_processor_type": "Gemma3ImageProcessor", "size": size},
        "processor_config.json": {
            "processor_class": "Gemma3Processor",
            "image_seq_length": NUM_EMBEDDINGS,
            **names,
        },
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": TEMPLATE},
    }
    for name, values in files.items():
        (directory / name).write_text(json.dumps(values))
    tokenizer.save(str(directory / "tokenizer.json"))
    return [tokenizer.token_to_id(letter) for letter in LETTERS]


class Stream(threading.Thread):
    """Request whose tokens are letters, with the time of each; ends with the server's answer or by `close`."""

    def __init__(self, url: str, number: int, letters: list[int]) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT_S)
        content = [{"type": "text", "text": f"stream {number}: " + LETTERS * 2}]
        self._body = json.dumps(
            {
                "messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": NUM_TOKENS,
                "ignore_eos": True, "allowed_token_ids": letters,
            }
        )  # fmt: skip
        self._closed = False

    def run(self) -> None:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", self._body, headers)
        reply = self._connection.getresponse()
        while not self._closed and (line := reply.readline()):
            if b'"content":"' in line.replace(b" ", b"") and b'"content":""' not in line.replace(b" ", b""):
                self.times.append(time.perf_counter())
        self._connection.close()

    def close(self) -> None:
        self._closed = True
        self.join(LIMIT_S)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between tokens that came in this time."""
        inside = [each for each in self.times if begin <= each <= end]
        return [1000 * (after - before) for before, after in pairwise(inside)]


def ask_about_an_image(url: str, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    image = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What?"}]
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT_S)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = reply.read()
    assert reply.status == 200, answer
    connection.close()


def measure(url: str, args: argparse.Namespace, letters: list[int], seed: int) -> float:
    """Print the gaps of a round; return the ratio of the 99th percentiles."""
    streams = [Stream(url, number, letters) for number in range(args.streams)]
    for stream in streams:
        stream.start()
    while not all(len(stream.times) > 8 for stream in streams):
        time.sleep(0.05)
    begin = time.perf_counter()
    time.sleep(QUIET_S)
    sent = time.perf_counter()
    ask_about_an_image(url, seed)
    end = time.perf_counter()
    for stream in streams:
        stream.close()
    found = []
    for name, first, last in (("without", begin, sent), ("with", sent, end)):
        gaps = [gap for stream in streams for gap in stream.gaps(first, last)]
        shown = [float(np.percentile(gaps, part)) for part in (50, 90, 99, 100)]
        found.append(shown[2])
        text = ", ".join(
            f"{part} {ms:.1f} ms" for part, ms in zip(("p50", "p90", "p99", "max"), shown, strict=True)
        )
        print(f"{name:8} {text} ({len(gaps)} gaps in {last - first:.1f} s)", flush=True)
    return found[1] / found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--quantization", choices=("int8", "int4"), help="else bfloat16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slice-ms", type=float, help="--max-encoder-slice-ms of the server")
    args = parser.parse_args()
    flags = ["--load-format", "dummy", "--max-model-len", "4096", "--max-num-seqs", str(args.streams + 1)]
    flags += ["--gpu-memory-utilization", "0.2"]
    flags += ["--quantization", args.quantization] if args.quantization else []
    flags += ["--max-encoder-slice-ms", str(args.slice_ms)] if args.slice_ms else []
    with tempfile.TemporaryDirectory() as name:
        letters = write_model(Path(name))
        with server(name, flags) as url:
            ratios = [measure(url, args, letters, seed) for seed in range(args.rounds)]
    print(
        f"99th percentile, with by without: {statistics.median(ratios):.2f} (median of {len(ratios)} rounds)"
    )


if __name__ == "__main__":
    main()
