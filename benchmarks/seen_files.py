# SPDX-License-Identifier: Apache-2.0
"""Images beside llama.cpp's server, in turn, of the same files.

    python -m benchmarks.seen_files --tools build/bin [--precision Q8_0] [--folder FOLDER] [--rounds 5]

`--tools` has llama.cpp's `llama-server` and `llama-quantize`. The files, made once in the folder, have random weights:
a language model of half a billion parameters (`benchmarks/models/dummy-0.5b`), and LLaVA 1.5's CLIP-L encoder for
336 x 336 pixels in half precision. Both servers stay up; who waits uses no processor. Prints, of new images each time,
the median seconds of one request's first token and of eight requests with 32 tokens at once, with the ratio.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from PIL import Image

from benchmarks.compare import checkpoint
from benchmarks.compare.workers import gguf_file
from benchmarks.served import QUIRE, free_port, wait_until_ready

WIDTH, INNER, NUM_BLOCKS, NUM_HEADS, SIDE, PATCH = 1024, 4096, 23, 16, 336, 14
HIDDEN = 896
"""Of the language model."""
NUM_AT_ONCE, NUM_OUTPUT, CONTEXT = 8, 32, 1024
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_encoder(path: Path) -> None:
    """Write the encoder with the names of llama.cpp's first converter, without the last block, which is not read."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_string("clip.vision.mm_patch_merge_type", "flat")
    writer.add_vision_block_count(NUM_BLOCKS)
    writer.add_vision_image_size(SIDE)
    writer.add_vision_patch_size(PATCH)
    writer.add_vision_embedding_length(WIDTH)
    writer.add_vision_feed_forward_length(INNER)
    writer.add_vision_projection_dim(768)
    writer.add_vision_head_count(NUM_HEADS)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean(CLIP_MEAN)
    writer.add_vision_image_std(CLIP_STD)

    def matrix(name: str, *shape: int) -> None:
        drawn = random.standard_normal(shape, dtype=np.float32) * 0.02
        writer.add_tensor(name, drawn.astype(np.float16))

    def vector(name: str, size: int, value: float = 0.0) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    def norm(name: str) -> None:
        vector(f"{name}.weight", WIDTH, 1.0)
        vector(f"{name}.bias", WIDTH)

    def linear(name: str, width: int, inner: int) -> None:
        matrix(f"{name}.weight", width, inner)
        vector(f"{name}.bias", width)

    vector("v.class_embd", WIDTH)
    matrix("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    matrix("v.position_embd.weight", (SIDE // PATCH) ** 2 + 1, WIDTH)
    norm("v.pre_ln")
    for number in range(NUM_BLOCKS):
        block = f"v.blk.{number}"
        norm(f"{block}.ln1")
        norm(f"{block}.ln2")
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            linear(f"{block}.{part}", WIDTH, WIDTH)
        linear(f"{block}.ffn_down", INNER, WIDTH)  # the first one, by the converter's names
        linear(f"{block}.ffn_up", WIDTH, INNER)
    linear("mm.0", HIDDEN, WIDTH)
    linear("mm.2", HIDDEN, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prepared(folder: Path, tools: Path, precision: str) -> tuple[Path, Path]:
    """Return the files of the language model and of the encoder, after making what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, model, encoder = folder / "BF16.gguf", folder / f"{precision}.gguf", folder / "mmproj-F16.gguf"
    if not whole.exists():
        gguf_file.write(checkpoint.ensure(folder), whole, characters=True)
    if not model.exists():
        subprocess.run([tools / "llama-quantize", "--pure", whole, model, precision], check=True)
    if not encoder.exists():
        write_encoder(encoder)
    return model, encoder


@contextmanager
def running(command: Sequence[str | Path], url: str) -> Iterator[str]:
    """Run a server until the block ends; return its address once it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, image: bytes, num_tokens: int) -> int:
    """Send an image with a text; return the number of tokens of the prompt."""
    link = "data:image/png;base64," + base64.b64encode(image).decode()
    content = [
        {"type": "image_url", "image_url": {"url": link}},
        {"type": "text", "text": "what?" * 6},
    ]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        usage: dict[str, int] = json.load(reply)["usage"]
    assert usage["completion_tokens"] == num_tokens, usage
    return usage["prompt_tokens"]


class Load:
    """New images for requests."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(1)

    def image(self) -> bytes:
        """Return a PNG that no server has seen, of a few large squares, so that decoding it takes no time."""
        colours = self._random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(colours).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(file, "png")
        return file.getvalue()

    def seconds(self, url: str, num_requests: int, num_tokens: int) -> float:
        images = [self.image() for _ in range(num_requests)]
        with ThreadPoolExecutor(num_requests) as pool:
            start = time.perf_counter()
            list(pool.map(lambda image: ask(url, image, num_tokens), images))
            return time.perf_counter() - start


def commands(model: Path, encoder: Path, tools: Path, template: Path) -> dict[str, tuple[list[Any], str]]:
    """Return name -> command and address of each server."""
    ports = [str(free_port()) for _ in range(2)]
    ours = [
        *QUIRE, "serve", model, "--mmproj", encoder, "--port", ports[0], "--chat-template", template,
        "--max-num-seqs", str(NUM_AT_ONCE), "--max-model-len", str(CONTEXT), "--gpu-memory-utilization", "0.3",
    ]  # fmt: skip
    theirs = [
        tools / "llama-server", "-m", model, "--mmproj", encoder, "--port", ports[1], "--jinja",
        "--chat-template-file", template, "-np", str(NUM_AT_ONCE), "-c", str(CONTEXT * NUM_AT_ONCE), "-t", "2",
        "--no-webui",
    ]  # fmt: skip
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    return {"quire": (ours, addresses[0]), "llama.cpp": (theirs, addresses[1])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, required=True, help="directory of llama.cpp's programs")
    parser.add_argument("--precision", default="Q8_0", help="of the language model, by llama.cpp's names")
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/.seen_files"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model, encoder = prepared(args.folder, args.tools, args.precision)
    template = args.folder / "template.jinja"
    template.write_text(TEMPLATE)
    sides, load = commands(model, encoder, args.tools, template), Load()
    with running(*sides["quire"]) as ours, running(*sides["llama.cpp"]) as theirs:
        print({url: ask(url, load.image(), 1) for url in (ours, theirs)}, "tokens of a prompt", flush=True)
        for name, num_requests, num_tokens in (("first", 1, 1), ("eight", NUM_AT_ONCE, NUM_OUTPUT)):
            pairs = [
                tuple(load.seconds(url, num_requests, num_tokens) for url in (ours, theirs))
                for _ in range(args.rounds)
            ]
            mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(their / our for our, their in pairs)
            print(
                f"{name:6} quire {mine:.3f} s, llama.cpp {other:.3f} s: {ratio:.2f} times as fast", flush=True
            )


if __name__ == "__main__":
    main()
