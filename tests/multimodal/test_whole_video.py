# SPDX-License-Identifier: Apache-2.0
"""The whole way of a video beside an image, from `LLM.generate` to the tokens and logprobs of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image

from quire import LLM, SamplingParams
from quire.multimodal.processors.base import make_processor
from quire.multimodal.processors.video import VideoFacts
from quire.outputs import RequestOutput
from tests.fixtures.seeing_models import IMAGE_TOKEN, SEEING, make_seeing

NUM_TOKENS = 5
PADS = ("<|image_pad|>", "<|video_pad|>")
NAMES = [*PADS, "<|vision_start|>", "<|vision_end|>"]
GEMMA4_NAMES = ["<|image|>", "<|audio|>", "<|video|>", "<|image>", "<image|>"]
TOKENS = {
    "minicpmv": [*PADS, "<image>", "</image>", "<slice>", "</slice>"],
    "gemma4": GEMMA4_NAMES,
    "gemma4-both-ways": GEMMA4_NAMES,
}
"""Names of the tokens from `IMAGE_TOKEN` on, where they are not `NAMES`."""
LIMITS = {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 24}
FILE = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": LIMITS}
METADATA = {"fps": 3.0, "total_num_frames": 60, "frames_indices": [0, 9, 18, 30, 45]}
TILES = {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
TILES |= {"video_token": "<|video_pad|>", "image_token": "<|image_pad|>"}
SLICES = {"patch_size": 4, "scale_resolution": 16, "max_slice_nums": 3, "use_image_id": False}
SQUARES = {"patch_size": 4, "pooling_kernel_size": 2, "do_normalize": False, "max_soft_tokens": 70}
FILES = {"qwen2-vl": FILE, "qwen2.5-vl": FILE, "qwen3-vl": FILE, "llava-onevision": TILES, "minicpmv": SLICES}
FILES |= {"gemma4": SQUARES, "gemma4-both-ways": SQUARES}


def video_token_of(name: str) -> int:
    return IMAGE_TOKEN + (2 if name.startswith("gemma4") else 1)


def write_files(name: str, path: Path) -> None:
    vocab, names = {f"t{index}": index for index in range(IMAGE_TOKEN)}, TOKENS.get(name, NAMES)
    vocab |= {name: IMAGE_TOKEN + number for number, name in enumerate(names)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(names)
    backend.save(str(path / "tokenizer.json"))
    (path / "preprocessor_config.json").write_text(json.dumps(FILES[name]))
    (path / "processor_config.json").write_text(json.dumps(FILES[name]))
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["tokens_per_second"] = 3
    (path / "config.json").write_text(json.dumps(config))


def inputs_of(
    name: str, path: Path, frames: np.ndarray, image: Image.Image, ids: list[int]
) -> dict[str, Any]:
    """Inputs of transformers' model; the processor's floats are theirs bit for bit (`processors/test_videos.py`,
    `processors/test_frames.py`).
    """
    processor = make_processor(SEEING[name].architecture, path, {})
    assert processor is not None
    videos = processor.videos
    assert videos is not None
    indices = tuple(METADATA["frames_indices"])  # type: ignore[arg-type]
    clip = videos.sample(VideoFacts(60, frames.shape[1:3], 3.0, False, indices), {})
    items = [videos.prepare(clip, iter(frames), {}), processor.prepare(image, {})]
    found = {key: value for item in items for key, value in processor.floats(item.arrays).items()}
    tensors: dict[str, Any] = {
        key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in found.items()
    }
    if name in ("llava-onevision", "minicpmv"):
        return tensors
    row = torch.tensor([ids])
    tensors["mm_token_type_ids"] = (row == IMAGE_TOKEN).long() + 2 * (row == video_token_of(name)).long()
    if name.startswith("gemma4"):
        tensors["num_frames_per_video"] = torch.tensor([len(frames)])
    if name == "qwen2.5-vl":
        tensors["second_per_grid_ts"] = torch.tensor([items[0].seconds_per_frame])
    return tensors


def found_of(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of each output, and their logprobs."""
    firsts = [output.outputs[0] for output in outputs]
    return [
        (
            list(one.token_ids),
            [position[token].logprob for token, position in zip(one.token_ids, one.logprobs, strict=True)],
        )
        for one in firsts
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.more] if name == "gemma4" else []) for name in FILES]
)
def test_a_video_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_seeing(name, tmp_path)
    write_files(name, tmp_path)
    if name == "qwen2.5-vl":
        model.model.config.vision_config.tokens_per_second = 3
    video_token = video_token_of(name)
    frames = np.random.default_rng(0).integers(0, 256, (5, 30, 44, 3), dtype=np.uint8)
    image = Image.fromarray(frames[0, :20, :20])
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=500, max_num_batched_tokens=64)
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=1
    )
    data = {"video": (frames, METADATA), "image": image}
    prompt = {"prompt_token_ids": [1, video_token, 2, IMAGE_TOKEN, 3], "multi_modal_data": data}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    llm.llm_engine.reset_prefix_cache()
    _, again = found_of(llm.generate([[5, 6, 7], prompt], params, use_tqdm=False))
    llm.shutdown()
    ((tokens, logprobs),) = found_of([output])
    assert again == (tokens, logprobs)
    ids = list(output.prompt_token_ids or [])
    assert min(ids.count(video_token), ids.count(IMAGE_TOKEN)) > 1
    with torch.inference_mode():
        more = inputs_of(name, tmp_path, frames, image, ids + tokens)
        logits = model(input_ids=torch.tensor([ids + tokens]), **more, use_cache=False).logits[0].float()
    want = logits.log_softmax(-1)[len(ids) - 1 : -1]
    assert tokens == want.argmax(-1).tolist()
    assert logprobs == pytest.approx(want.max(-1).values.tolist(), abs=2e-3)
