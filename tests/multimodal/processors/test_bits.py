# SPDX-License-Identifier: Apache-2.0
"""Processors against transformers' Pillow backend: equal bits and equal numbers of placeholders, for any image."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from quire.errors import StartupError, ValidationError
from quire.multimodal.processors.base import Prepared, Processor, make_processor
from tests.multimodal.processors.checkpoints import CASES, Case

MODES = ("RGB", "L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "YCbCr")
HARD_SIZES = ((1, 1), (200, 1), (1, 200), (97, 89), (2, 389), (400, 2), (336, 336), (28, 28), (29, 27))
SIZES = st.sampled_from(HARD_SIZES) | st.tuples(st.integers(1, 400), st.integers(1, 400))


def drawn(size: tuple[int, int], mode: str, seed: int) -> Image.Image:
    """An image of noise and a gradient; every pixel counts."""
    random = np.random.default_rng(seed)
    height, width = size
    if mode == "I;16":
        return Image.fromarray(random.integers(0, 2**16, size, dtype=np.uint16))
    colors = random.integers(0, 256, (height, width, 4), dtype=np.uint8)
    colors[..., 0] = np.arange(width, dtype=np.uint8)
    image = Image.fromarray(colors, "RGBA") if mode in ("RGBA", "LA") else Image.fromarray(colors[..., :3])
    return image.convert(mode)


@pytest.fixture(scope="module", params=sorted(CASES.keys() - {"llama4", "phi4"}))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def processor(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return case.read(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def oracle(case: Case) -> Any:
    options = {name: value for name, value in case.image.items() if name != "image_processor_type"}
    return case.oracle()(**options)


def expected(oracle: Any, case: Case, image: Image.Image) -> dict[str, np.ndarray]:
    """Return the result of transformers as arrays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = oracle(image, return_tensors="np", **case.call)
    return {name: np.asarray(value) for name, value in found.items()}


@given(size=SIZES, mode=st.sampled_from(MODES), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_floats_equal_those_of_transformers(
    case: Case, processor: Processor, oracle: Any, size: tuple[int, int], mode: str, seed: int
) -> None:
    assume(max(size) / min(size) <= case.ratio)
    image = drawn(size, mode, seed)
    floats = processor.floats(processor.prepare(image, {}).arrays)
    theirs = expected(oracle, case, image)
    assert "pixel_values" in floats
    for name, array in floats.items():
        assert array.dtype == theirs[name].dtype
        assert array.shape == theirs[name].shape
        assert array.tobytes() == theirs[name].tobytes(), name


EXPANDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llava": ("llava", "Llava", {"patch_size": 14, "num_additional_image_tokens": 1}),
    "llava-siglip": ("llava", "Llava", {"patch_size": 14, "num_additional_image_tokens": 0}),
    "llava-next": ("llava_next", "LlavaNext", {"patch_size": 14, "num_additional_image_tokens": 1}),
    "llava-onevision": (
        "llava_onevision",
        "LlavaOnevision",
        {"num_image_tokens": 9, "vision_aspect_ratio": "anyres_max_4"},
    ),
    "qwen2-vl": ("qwen2_vl", "Qwen2VL", {"image_token": "<|image_pad|>"}),
    "qwen3-vl": ("qwen2_vl", "Qwen2VL", {"image_token": "<|image_pad|>"}),
    "gemma3": ("gemma3", "Gemma3", {}),
    "gemma3-crops": ("gemma3", "Gemma3", {}),
    "gemma4": ("gemma4", "Gemma4", {"boi_token": "<|image>", "eoi_token": "<image|>"}),
    "minicpmv": (
        "minicpmv4_6",
        "MiniCPMV4_6",
        {
            "slice_mode": True,
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
        },
    ),
    "paligemma": ("paligemma", "PaliGemma", {"image_seq_length": 16}),
    "smolvlm": ("smolvlm", "SmolVLM", {"image_seq_len": 4, "global_image_token": "<global-img>"}),
    "idefics3-whole": ("idefics3", "Idefics3", {"image_seq_len": 4, "global_image_tag": "<global-img>"}),
    "pixtral": ("pixtral", "Pixtral", {"patch_size": 8, "spatial_merge_size": 1}),
    "mistral3": ("pixtral", "Pixtral", {"patch_size": 7, "spatial_merge_size": 2}),
    "internvl": ("internvl", "InternVL", {"image_seq_length": 4, "image_token": "<IMG_CONTEXT>"}),
}
"""Case -> module, class and attributes of transformers' processor, whose expansion needs nothing else of it."""
TOKENS = {
    "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "fake_image_token": "<fake_token_around_image>",
    "start_image_token": "<img>", "end_image_token": "</img>",
    "full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n",
}  # fmt: skip


def pixtral_rows(rows: int, columns: int) -> str:
    """Return the text of transformers' processor, whose module needs torchvision."""
    return ("[IMG]" * columns + "[IMG_BREAK]") * (rows - 1) + "[IMG]" * columns + "[IMG_END]"


def expanded_by_transformers(name: str, oracle: Any, processor: Processor, image: Image.Image) -> str:
    module, kind, attributes = EXPANDERS[name]
    strategy = "full" if name in ("llava-siglip", "llava-onevision") else "default"
    own = {
        **TOKENS,
        "image_token": processor.placeholder,
        "vision_feature_select_strategy": strategy,
        **attributes,
    }
    case = CASES[name]
    more = {"return_row_col_info": True} if "image_seq_len" in attributes else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = dict(oracle([image], return_tensors="np", **case.call, **more))
    if name in ("pixtral", "mistral3"):
        height, width = inputs["image_sizes"][0]
        return pixtral_rows(height // case.call["patch_size"], width // case.call["patch_size"])
    called = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    me = SimpleNamespace(image_processor=oracle, **own)
    theirs = getattr(called, f"{kind}Processor")
    for helper in ("_get_number_of_features", "_get_unpadded_features"):
        if hasattr(theirs, helper):
            setattr(me, helper, partial(getattr(theirs, helper), me))
    divisor = {"image_token_divisor": 16} if name == "minicpmv" else {}
    text: str = theirs.replace_image_token(me, inputs, 0, **divisor)
    return text


@given(size=SIZES)
@settings(max_examples=40, deadline=None)
def test_placeholders_equal_those_of_transformers(
    case: Case, processor: Processor, oracle: Any, size: tuple[int, int]
) -> None:
    assume(max(size) / min(size) <= case.ratio)
    name = next(name for name, other in CASES.items() if other is case)
    if name not in EXPANDERS:
        pytest.skip("the same expansion as another case's")
    image = drawn(size, "RGB", 0)
    assert expanded(processor.prepare(image, {}), processor) == expanded_by_transformers(
        name, oracle, processor, image
    )


def expanded(prepared: Prepared, processor: Processor) -> str:
    """The text in place of a marker, every placeholder in full."""
    first, *others = prepared.text.split(processor.placeholder)
    runs = ["".join(token * count for token, count in run.pieces) for run in prepared.runs]
    return first + "".join(run + other for run, other in zip(runs, others, strict=True))


def test_an_unknown_option_is_refused_in_words(processor: Processor) -> None:
    for options in ({"longest_side": 1}, {"images_kwargs": {"longest_side": 1}}):
        with pytest.raises(ValidationError, match="has 'longest_side', but this model's options are"):
            processor.checked_options(options)
    for options in ([], {"images_kwargs": 1}):
        with pytest.raises(ValidationError, match="must be an object"):
            processor.checked_options(options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen2-vl", {"max_pixels": "many"}, "max_pixels must be an integer"),
        ("qwen2-vl", {"min_pixels": 10**7, "max_pixels": 10**6}, "min_pixels must be at most max_pixels"),
        ("qwen2-vl", {"size": {"shortest_edge": 2**30, "longest_edge": 2**30}}, "resized to"),
        ("smolvlm", {"do_image_splitting": 1}, "do_image_splitting must be true or false"),
        ("pixtral", {"size": {"longest_edge": 0}}, "longest_edge must be an integer"),
        ("internvl", {"min_patches": 5, "max_patches": 4}, "min_patches is 5"),
        ("gemma4", {"max_soft_tokens": 71}, "max_soft_tokens must be one of 70, 140"),
        ("gemma3", {"do_pan_and_scan": "yes"}, "do_pan_and_scan must be true or false"),
        ("gemma3", {"pan_and_scan_max_num_crops": 10**6}, "max_num_crops must be an integer"),
        ("internvl", {"max_patches": 10**6}, "max_patches must be an integer"),
    ],
)
def test_a_bad_option_of_a_request_is_refused_in_words(
    tmp_path: Path, name: str, options: dict[str, Any], words: str
) -> None:
    processor = CASES[name].read(tmp_path)
    with pytest.raises(ValidationError, match=words):
        processor.prepare(drawn((40, 40), "RGB", 0), processor.checked_options(options))


def test_options_of_a_request_change_the_size(tmp_path: Path) -> None:
    processor = CASES["qwen2-vl"].read(tmp_path)
    image = drawn((300, 300), "RGB", 0)
    flat, scoped = (
        {"max_pixels": 28 * 28 * 9},
        {"max_pixels": 1, "images_kwargs": {"max_pixels": 28 * 28 * 9}},
    )
    grids = [
        processor.prepare(image, processor.checked_options(options)).grid for options in ({}, flat, scoped)
    ]
    assert grids == [(1, 6, 6), (1, 3, 3), (1, 3, 3)]


def test_options_of_the_operator_replace_those_of_the_files(tmp_path: Path) -> None:
    processor = CASES["qwen2-vl"].read(tmp_path, max_pixels=28 * 28 * 9)
    assert processor.prepare(drawn((300, 300), "RGB", 0), {}).grid == (1, 3, 3)


def test_files_inside_the_processors_are_read(tmp_path: Path) -> None:
    case = CASES["pixtral"]
    image = drawn((33, 44), "RGB", 0)
    outside = case.read(tmp_path).prepare(image, {})
    (tmp_path / "preprocessor_config.json").unlink()
    read = make_processor(case.architecture, case.write(tmp_path, inside=True), {})
    assert read is not None
    assert read.prepare(image, {}).runs == outside.runs


def test_a_checkpoint_without_files_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"neither preprocessor_config\.json nor"):
        make_processor("Qwen2VLForConditionalGeneration", tmp_path, {})
    assert make_processor("LlamaForCausalLM", tmp_path, {}) is None


def test_a_step_that_is_switched_off_is_refused(tmp_path: Path) -> None:
    case = replace(CASES["gemma3"], image={"do_normalize": False})
    with pytest.raises(StartupError, match="do_normalize = false is not supported"):
        case.read(tmp_path)


def test_an_image_that_is_too_long_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="one side at most 200 times the other"):
        CASES["qwen2-vl"].read(tmp_path).prepare(drawn((1, 201), "RGB", 0), {})


def test_a_request_asks_for_crops_of_a_long_image(tmp_path: Path) -> None:
    processor = CASES["gemma3"].read(tmp_path)
    image = drawn((300, 900), "RGB", 0)
    found = processor.prepare(image, processor.checked_options({"do_pan_and_scan": True}))
    assert found.arrays["pixels"].shape == (4, 56, 56, 3)
    assert len(found.runs) == len(processor.prepare(image, {}).runs) + 3 == 4
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 1, "pan_and_scan_max_num_crops": 6}
    with pytest.raises(ValidationError, match="7 pixels has no 6 crops; use a larger"):
        processor.prepare(drawn((1, 7), "RGB", 0), processor.checked_options(options))


@pytest.mark.parametrize(("mode", "side"), [("16x", 56), ("4x", 28)])
def test_minicpm_counts_embeddings_by_its_mergers(tmp_path: Path, mode: str, side: int) -> None:
    case = replace(
        CASES["minicpmv"], image={"downsample_mode": mode}, config={"downsample_mode": mode}, processor={}
    )
    prepared = case.read(tmp_path).prepare(drawn((side * 2, side * 3), "RGB", 0), {"slice_mode": False})
    height, width = prepared.arrays["pixels"].shape[:2]
    assert prepared.runs[0].pieces == (("<|image_pad|>", height // side * (width // side)),)
    assert prepared.text == "<image_id>\0</image_id><image><|image_pad|></image>"
    with pytest.raises(StartupError, match="downsample_mode"):
        replace(case, image={"downsample_mode": "8x"}).read(tmp_path)
