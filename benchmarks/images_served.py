# SPDX-License-Identifier: Apache-2.0
"""Prompts with images over HTTP, beside llama.cpp's server, in turn; the same random weights in as many bits.

    python -m benchmarks.images_served --llama-server PATH [--cases first eight] [--quantization int8] [--rounds 3]

The model is that of `benchmarks.images`. quire reads it as a directory in bfloat16, rounded with `--quantization`;
llama.cpp as two files in GGUF, in F16, or in Q8_0 for int8. Both servers get the same requests, and both have two
threads; where one waits, it uses no processor. Cases, with the median of the rounds' ratios:

    first   seconds of a request with a new image and one token
    eight   seconds of eight requests at once, each with an image of its own and 32 tokens; a third of the rounds
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from benchmarks.compare.workers.gguf_file import add_sizes
from benchmarks.images import CLIP_L, NUM_AT_ONCE, NUM_OUTPUT, Drawn, Timed, measure
from benchmarks.served import free_port, server, wait_until_ready

TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<image>{% endif %}{% endfor %}{% endfor %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""For llama.cpp, which puts markers into the text itself."""
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
KINDS = {None: GGMLQuantizationType.F16, "int8": GGMLQuantizationType.Q8_0}
NUM_READ_BLOCKS = 23
"""Blocks of the encoder that are read: all 24 but the last, as the last but one is projected."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
THREADS = str(os.cpu_count())


def write_weights(directory: Path) -> None:
    """Draw the weights of a directory that has its config, in bfloat16."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    config = LlavaConfig.from_pretrained(directory)
    model = LlavaForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(directory / "drawn", max_shard_size="100GB")
    shutil.move(directory / "drawn" / "model.safetensors", directory / "model.safetensors")
    (directory / "chat_template.jinja").write_text(TEMPLATE)


class Files:
    """The model as two files in GGUF."""

    def __init__(self, directory: Path, drawn: Drawn, kind: GGMLQuantizationType) -> None:
        self._kind = kind
        self.language, self.projector = (
            directory / f"{part}-{kind.name}.gguf" for part in ("model", "mmproj")
        )
        if self.projector.exists():
            return
        tensors = load_file(drawn.directory / "model.safetensors")
        self._write_language(tensors, drawn)
        self._write_projector(tensors)

    def _write_language(self, tensors: dict[str, torch.Tensor], drawn: Drawn) -> None:
        writer = GGUFWriter(self.language, "qwen2")
        add_sizes(writer, drawn.text_config)
        add_tokenizer(writer, drawn)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, drawn.text_config["num_hidden_layers"])
        for name, tensor in tensors.items():
            if "language_model." in name and not name.endswith("lm_head.weight"):
                key = "model." + name.partition("language_model.")[2].removeprefix("model.")
                self._add(writer, names.get_name(key, (".weight", ".bias")), tensor)
        finish(writer)

    def _write_projector(self, tensors: dict[str, torch.Tensor]) -> None:
        writer = GGUFWriter(self.projector, "clip")
        writer.add_clip_has_vision_encoder(True)
        writer.add_bool("clip.has_llava_projector", True)
        writer.add_string("clip.projector_type", "mlp")
        writer.add_string("clip.vision.mm_patch_merge_type", "flat")
        writer.add_vision_block_count(NUM_READ_BLOCKS)
        writer.add_vision_image_size(CLIP_L["image_size"])
        writer.add_vision_patch_size(CLIP_L["patch_size"])
        writer.add_vision_embedding_length(CLIP_L["hidden_size"])
        writer.add_vision_feed_forward_length(CLIP_L["intermediate_size"])
        writer.add_vision_projection_dim(CLIP_L["projection_dim"])
        writer.add_vision_head_count(CLIP_L["num_attention_heads"])
        writer.add_vision_attention_layernorm_eps(1e-5)
        writer.add_vision_image_mean(MEAN)
        writer.add_vision_image_std(STD)
        for name, tensor in tensors.items():
            if (key := _projector_name(name)) is not None:
                self._add(writer, key, tensor)
        finish(writer)

    def _add(self, writer: GGUFWriter, name: str, tensor: torch.Tensor) -> None:
        kind = self._kind if tensor.dim() == 2 and "position" not in name else GGMLQuantizationType.F32
        kind = GGMLQuantizationType.F16 if tensor.dim() == 4 else kind
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)


def _projector_name(name: str) -> str | None:
    """Return the name of an image encoder's tensor in GGUF; None: it is not read."""
    name = name.removeprefix("model.")
    if name.startswith("multi_modal_projector."):
        place, _, leaf = name.removeprefix("multi_modal_projector.linear_").partition(".")
        return f"mm.{2 * int(place) - 2}.{leaf}"
    unread = f".layers.{NUM_READ_BLOCKS}." in name or "post_layernorm" in name
    if not name.startswith("vision_tower.") or unread:
        return None
    known = name.replace("vision_tower.", "vision_tower.vision_model.")
    known = known.replace("vision_model.vision_model.", "vision_model.")
    found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, NUM_READ_BLOCKS).get_name(
        known, (".weight", ".bias")
    )
    assert found is not None, name
    return found


def add_tokenizer(writer: GGUFWriter, drawn: Drawn) -> None:
    """The byte-level tokenizer, whose ids above its own vocabulary stand for nothing."""
    state = json.loads((drawn.directory / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in state["added_tokens"]}
    known = {index: text for text, index in state["model"]["vocab"].items()} | special
    count = drawn.text_config["vocab_size"]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([known.get(index, f"[unused{index}]") for index in range(count)])
    writer.add_token_types(
        [
            kinds.CONTROL if i in special else kinds.NORMAL if i in known else kinds.UNUSED
            for i in range(count)
        ]
    )
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_eos_token_id(next(iter(special)))
    writer.add_add_bos_token(False)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def llama_server(program: Path, files: Files) -> Iterator[str]:
    """The address of llama.cpp's server, with a place for each of eight requests."""
    port = free_port()
    command = [program, "-m", files.language, "--mmproj", files.projector, "--port", str(port)]
    command += ["-t", THREADS, "-np", str(NUM_AT_ONCE), "-c", str(NUM_AT_ONCE * 1024)]
    command += ["--jinja", "--chat-template", PLAIN_TEMPLATE]
    with (files.language.parent / "llama-server.log").open("w") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


class Client:
    """Requests with new images and texts."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self._random = np.random.default_rng(2)

    def body(self, num_tokens: int) -> bytes:
        buffer = io.BytesIO()
        self._drawn.image().save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        text = "".join(self._random.choice(list(LETTERS), 32))
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"\n{text}\n"}]
        options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        return json.dumps({"messages": [{"role": "user", "content": content}], **options}).encode()

    def seconds(self, url: str, num_requests: int, num_tokens: int) -> float:
        """Seconds until all of some requests at once have their answers."""
        bodies = [self.body(num_tokens) for _ in range(num_requests)]
        with ThreadPoolExecutor(num_requests) as pool:
            start = time.perf_counter()
            replies = list(pool.map(lambda body: ask(url, body), bodies))
            found = time.perf_counter() - start
        for reply in replies:
            assert reply["usage"]["completion_tokens"] == num_tokens, reply
        return found


def ask(url: str, body: bytes) -> Any:
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def run(folder: Path, args: argparse.Namespace) -> None:
    directory = folder / "model"
    directory.mkdir(parents=True, exist_ok=True)
    drawn = Drawn(directory)
    if not (directory / "model.safetensors").exists():
        write_weights(directory)
    client = Client(drawn)
    flags = ["--max-num-seqs", str(NUM_AT_ONCE), "--max-model-len", "1024", "--gpu-memory-utilization", "0.2"]
    flags += ["--quantization", args.quantization] if args.quantization else []
    with ExitStack() as stack:
        urls = {"quire": stack.enter_context(server(str(directory), flags))}
        if args.llama_server:
            files = Files(folder, drawn, KINDS[args.quantization])
            urls["llama.cpp"] = stack.enter_context(llama_server(args.llama_server, files))
        for name, url in urls.items():
            print(name, ask(url, client.body(1))["usage"]["prompt_tokens"], "tokens of a prompt", flush=True)
        for case in args.cases:
            count, length = {"first": (1, 1), "eight": (NUM_AT_ONCE, NUM_OUTPUT)}[case]
            sides = {name: timed(client, url, count, length) for name, url in urls.items()}
            rounds = args.rounds if count == 1 else max(args.rounds // 3, 1)
            measure(case, sides, rounds, warms_up=count == 1)


def timed(client: Client, url: str, num_requests: int, num_tokens: int) -> Timed:
    return lambda _: client.seconds(url, num_requests, num_tokens)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama-server", type=Path, help="llama.cpp's program; without it quire is measured alone"
    )
    parser.add_argument("--cases", nargs="+", choices=("first", "eight"), default=("first", "eight"))
    parser.add_argument("--quantization", choices=("int8",), help="of both; else bfloat16 beside F16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="of the model's files, for further runs; else a temporary one"
    )
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as name:
        run(args.folder or Path(name), args)


if __name__ == "__main__":
    main()
