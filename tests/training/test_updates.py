# SPDX-License-Identifier: Apache-2.0
"""After an update an engine has the bits of a fresh one with those weights; after a failed one, the bits of before."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.errors import ConflictError, UnavailableError, ValidationError
from quire.training.trainer import WeightServer, describe, remove_segment, write_segment
from tests.fixtures.quick import quick
from tests.training.checkpoints import (
    OPTIONS,
    WAYS,
    changed,
    finished,
    fresh,
    results,
    tensors_of,
    trainer,
)

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "overlapped": {"async_scheduling": True},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two replicas": {"data_parallel_size": 2},
}
MODELS = ("llama", "llama-tied-bias", "phi3", "mixtral", "gpt2", "deepseekv3", "bamba", "gemma3")


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """Return two checkpoints of a model."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            place = tmp_path_factory.mktemp("second") / name
            made[name] = tiny_model(name), changed(tiny_model(name), place)
        return made[name]

    return of


@pytest.fixture
def llm(pair: Callable[[str], tuple[Path, Path]]) -> Iterator[LLM]:
    engine = LLM(str(pair("llama")[0]), **OPTIONS)
    yield engine
    engine.shutdown()


def check_both_ways(first: Path, second: Path, way: str, **args: Any) -> None:
    """Update to the second checkpoint and back, with warm caches, and compare with fresh engines."""
    before, after = fresh(first, **args), fresh(second, **args)
    assert before[0] != after[0]
    llm = LLM(str(first), **{**OPTIONS, **args})
    try:
        for place, (expected, sums) in ((second, after), (first, before)):
            results(llm)
            WAYS[way](llm, place)
            assert results(llm) == expected
            assert llm.weights.checksums() == sums
    finally:
        llm.shutdown()


@pytest.mark.parametrize("way", WAYS)
def test_every_update_method_equals_a_fresh_engine(
    pair: Callable[[str], tuple[Path, Path]], way: str
) -> None:
    check_both_ways(*pair("llama"), way, dtype="float32")


@pytest.mark.parametrize("form", quick(FORMATS, ("bfloat16", "int8", "int4")))
def test_every_format_gives_the_bits_of_a_fresh_engine(
    pair: Callable[[str], tuple[Path, Path]], form: str
) -> None:
    check_both_ways(*pair("llama"), "directory", **FORMATS[form])


@pytest.mark.parametrize("model", quick(MODELS, ("llama-tied-bias", "phi3")))
def test_every_model_gives_the_bits_of_a_fresh_engine(
    pair: Callable[[str], tuple[Path, Path]], model: str
) -> None:
    check_both_ways(*pair(model), "directory", dtype="bfloat16")


def test_disk_tier_keeps_old_and_new_blocks_apart(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    first, second = pair("llama")
    expected, _ = fresh(second)
    args = {**OPTIONS, "kv_store": str(tmp_path / "store"), "swap_space": 0.01, "block_size": 16}
    llm = LLM(str(first), **args)
    old = results(llm)
    llm.weights.load(str(second))
    assert results(llm) == expected
    llm.reset_prefix_cache()
    assert results(llm) == expected
    llm.weights.load(str(first))
    assert results(llm) == old
    llm.shutdown()


def test_kept_requests_go_on_with_the_new_weights(pair: Callable[[str], tuple[Path, Path]]) -> None:
    first, second = pair("llama")
    llm = LLM(str(first), **OPTIONS)
    engine, params = llm.llm_engine, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = {"a": [3, 1, 4, 1, 5] * 5, "b": [2, 7, 1, 8]}
    for name, prompt in prompts.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    so_far: dict[str, list[int]] = {}
    while min(map(len, so_far.values()), default=0) < 6 or len(so_far) < 2:
        so_far.update({one.request_id: list(one.outputs[0].token_ids) for one in engine.step()})
    llm.weights.begin("keep")
    with pytest.raises(ConflictError):
        engine.step()
    llm.weights.update({"path": str(second)})
    llm.weights.finish()
    ends = finished(engine)
    llm.shutdown()
    other = LLM(str(second), **OPTIONS)
    for name, prompt in prompts.items():
        start = len(so_far[name])
        assert ends[name][:start] == so_far[name]
        rest = SamplingParams(max_tokens=20 - start, temperature=0.0, ignore_eos=True)
        (output,) = other.generate({"prompt_token_ids": prompt + so_far[name]}, rest, use_tqdm=False)
        assert ends[name][start:] == list(output.outputs[0].token_ids)
    other.shutdown()


KEPT = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
MIXES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 0),
    "overlapped": ({"async_scheduling": True}, 2),
    "two ranks": ({"tensor_parallel_size": 2}, 0),
}
"""Options of an engine, and the most tokens that are in flight when it is paused."""


def mixed_by_transformers(first: Path, second: Path, prompt: list[int], so_far: list[int]) -> list[int]:
    """Return the greedy continuation of tokens computed with the first weights, by the second over that cache."""
    old, new = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (first, second))
    with torch.no_grad():
        cache = old(torch.tensor([[*prompt, *so_far[:-1]]]), use_cache=True).past_key_values
        tokens = list(so_far)
        while len(tokens) < KEPT.max_tokens:
            step = new(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
            tokens.append(int(step.logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("how", quick(MIXES, ("plain",)))
def test_mixed_requests_keep_tokens_of_old_weights(
    pair: Callable[[str], tuple[Path, Path]], how: str
) -> None:
    """Their tokens are those of new weights over an old cache, by transformers; no other request sees that cache."""
    (first, second), (more, num_in_flight) = pair("llama"), MIXES[how]
    options = {**OPTIONS, "dtype": "float32", **more}
    llm = LLM(str(first), **options)
    engine, prompts = llm.llm_engine, {"a": [3, 1, 4, 1, 5] * 7, "b": [2, 7, 1, 8]}
    for name, prompt in prompts.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, KEPT)
    so_far: dict[str, list[int]] = {}
    while min(map(len, so_far.values()), default=0) < 6 or len(so_far) < 2:
        so_far.update({one.request_id: list(one.outputs[0].token_ids) for one in engine.step()})
    llm.weights.load(str(second), mode="mixed")
    engine.add_request("again", {"prompt_token_ids": prompts["a"]}, KEPT)
    ends = finished(engine)
    for name, prompt in prompts.items():
        counts = range(len(so_far[name]), len(so_far[name]) + num_in_flight + 1)
        ways = [mixed_by_transformers(first, second, prompt, ends[name][:count]) for count in counts]
        assert ends[name] in ways
    longer = [*prompts["a"], *ends["a"]]
    after = [llm.generate({"prompt_token_ids": one}, KEPT, use_tqdm=False) for one in (prompts["a"], longer)]
    sums = llm.weights.checksums()
    llm.shutdown()
    other = LLM(str(second), **options)
    for expected, one in zip(after, (prompts["a"], longer), strict=True):
        (output,) = other.generate({"prompt_token_ids": one}, KEPT, use_tqdm=False)
        assert output.outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert ends["again"] == list(after[0][0].outputs[0].token_ids)
    assert other.weights.checksums() == sums
    other.shutdown()


def test_sleep_at_level_2_wakes_with_the_new_weights(
    llm: LLM, pair: Callable[[str], tuple[Path, Path]]
) -> None:
    _, second = pair("llama")
    expected, _ = fresh(second)
    llm.weights.load(str(second), "two")
    llm.sleep(2)
    with pytest.raises(ValidationError, match="asleep"):
        llm.weights.load(str(second))
    llm.wake_up()
    assert results(llm) == expected
    assert llm.weights.version == "two"


def test_update_with_the_cache_asleep_wakes_with_it(
    llm: LLM, pair: Callable[[str], tuple[Path, Path]]
) -> None:
    _, second = pair("llama")
    expected, _ = fresh(second)
    llm.sleep(2)
    llm.wake_up(["weights"])
    llm.weights.load(str(second))
    llm.wake_up()
    assert results(llm) == expected


def unfit(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    """Return damaged tensors."""
    name = next(one for one in tensors if one.endswith("q_proj.weight"))
    if how == "missing":
        tensors.pop(name)
    elif how == "extra":
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    elif how == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif how == "dtype":
        tensors[name] = tensors[name].to(torch.int32)
    else:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[3] = float(how)
    return tensors


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "is in none of the files"),
        ("extra", "has no place"),
        ("shape", "has shape"),
        ("dtype", "is int32"),
        ("nan", "not finite"),
        ("-inf", "not finite"),
    ],
)
def test_tensors_that_do_not_fit_leave_the_old_weights(
    llm: LLM, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, how: str, words: str
) -> None:
    old, sums = results(llm), llm.weights.checksums()
    save_file(unfit(tensors_of(pair("llama")[1]), how), tmp_path / "model.safetensors")
    with pytest.raises(ValidationError, match=words) as caught:
        llm.weights.load(str(tmp_path))
    assert tempfile.gettempdir() not in str(caught.value)
    assert (results(llm), llm.weights.checksums()) == (old, sums)
    assert llm.weights.version == "default"


def test_segments_that_are_wrong_add_nothing(llm: LLM, pair: Callable[[str], tuple[Path, Path]]) -> None:
    old, tensors = results(llm), tensors_of(pair("llama")[1])
    name = f"quire-wrong-{os.getpid()}"
    info = write_segment(name, dict(list(tensors.items())[:2]))
    try:
        llm.weights.begin()
        bad: list[tuple[Any, str]] = [
            ({**info, "segment": "../etc/passwd"}, "no name of a segment"),
            ({**info, "segment": "quire-no-such"}, "cannot be opened"),
            ({**info, "shapes": [[4096, 4096], [64]]}, "the tensors take"),
            ({**info, "names": ["a", "a"]}, "twice"),
            ({**info, "names": ["a"]}, "one length"),
            ({**info, "dtype_names": ["complex64", "float32"]}, "dtype"),
            ({**info, "shapes": [[-1], [True]]}, "shape"),
            ([], "parts"),
            (["x"], "objects"),
            ({"path": "relative"}, "absolute"),
            ({"path": "/no/such/place"}, "does not exist"),
            (describe(tensors), "no trainer"),
        ]
        for one, words in bad:
            with pytest.raises(ValidationError, match=words):
                llm.weights.update(one)
        llm.weights.update(info)
        with pytest.raises(ValidationError, match="sent before"):
            llm.weights.update(info)
        with pytest.raises(ValidationError, match="is in none of the files"):
            llm.weights.finish()
    finally:
        remove_segment(name)
    assert results(llm) == old


def test_trainer_that_dies_amid_an_update_changes_nothing(
    llm: LLM, pair: Callable[[str], tuple[Path, Path]]
) -> None:
    old, tensors = results(llm), tensors_of(pair("llama")[1])
    total = sum(tensor.nbytes for tensor in tensors.values())

    def die(server: WeightServer) -> None:
        assert server._engine is not None
        server._engine.sendall(total.to_bytes(8, "little") + bytes(total // 2))
        server._engine.shutdown(socket.SHUT_RDWR)

    with trainer(die) as server:
        llm.weights.connect(server.address)
        llm.weights.begin()
        with pytest.raises(ValidationError, match="closed the connection"):
            llm.weights.update(describe(tensors))
        with pytest.raises(ValidationError, match="no trainer"):
            llm.weights.update(describe(tensors))
        llm.weights.abort()
    assert results(llm) == old
    with pytest.raises(UnavailableError, match="cannot be reached"):
        llm.weights.connect(server.address)


def test_second_updater_is_refused_until_the_first_ends(llm: LLM) -> None:
    first = llm.weights.begin()
    with pytest.raises(ConflictError, match="open"):
        llm.weights.begin()
    with pytest.raises(ConflictError, match="another"):
        llm.weights.finish(update_id="0123")
    with pytest.raises(ValidationError, match="no tensors"):
        llm.weights.finish(update_id=first)
    with pytest.raises(ConflictError, match="no weight update"):
        llm.weights.abort()
    llm.weights.abort(llm.weights.begin())
    assert len(results(llm)) == 6


@pytest.mark.more
def test_a_hundred_updates_leave_memory_and_disk_flat(pair: Callable[[str], tuple[Path, Path]]) -> None:
    llm = LLM(str(pair("llama")[0]), **OPTIONS)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    for _ in range(10):
        llm.weights.load(str(pair("llama")[1]))
    before = resident()
    for number in range(100):
        llm.weights.load(str(pair("llama")[number % 2]))
    assert resident() - before < 16 * 2**20
    assert len(list(Path(tempfile.gettempdir()).glob("quire-weights-*"))) <= 8  # other tests' included
    directory = llm.weights._brackets._in_use.directory
    llm.shutdown()
    assert not directory.exists()


def test_gguf_models_are_refused_with_a_message(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.training.bracket.is_gguf", lambda path: True)
    with pytest.raises(ValidationError, match="GGUF"):
        llm.weights.begin()
    assert not llm.llm_engine.is_sleeping
