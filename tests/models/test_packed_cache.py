# SPDX-License-Identifier: Apache-2.0
"""The cache of packed weights gives back what was written, or nothing; whatever goes wrong, the model still loads."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import CheckpointNames
from quire.models import packed_cache
from quire.models.bounded_directory import GIB, BoundedDirectory
from quire.models.decoder import DecoderForCausalLM
from quire.models.packed_cache import PAGE, SUFFIX, PackedCache, packed_key
from quire.models.safetensors_file import SafetensorsFile
from quire.models.weight_files import SINGLE_NAME
from quire.models.weights import CheckpointWeights
from tests.fixtures.quick import quick
from tests.models.harness import load_tiny, logits_of, prepared_config

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef" * 4
PROMPT = [[5, 9, 100, 3, 77, 42, 42, 8, 1]]
TENSORS = {
    "a/weight": torch.arange(7, dtype=torch.bfloat16),
    "b/packed.data": torch.arange(3 * PAGE, dtype=torch.int64).to(torch.uint8).view(3, 64, 64),
    "b/packed.scales": torch.linspace(-1, 1, 2048).view(2, 1024),
}
QUANTIZATIONS: list[dict[str, Any]] = [
    {},
    {"quantization": "int8"},
    {"quantization": "int4", "quantization_config": {"head": "int4"}},
]


def cache_in(directory: Path, key: str = KEY, limit: int = GIB) -> PackedCache:
    return PackedCache(BoundedDirectory(directory, SUFFIX, limit), "tiny", key)


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return cache_in(tmp_path / "made" / "on demand")


def same(read: dict[str, Tensor] | None, written: dict[str, Tensor] = TENSORS) -> bool:
    assert read is not None
    assert read.keys() == written.keys()
    return all(
        read[name].dtype == written[name].dtype and torch.equal(read[name], written[name]) for name in read
    )


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_written_weights_are_read_back(cache: PackedCache, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.read() is None
    assert caplog.text == ""
    cache.write(TENSORS)
    assert same(cache.read())
    assert only_file(cache.path.parent) == cache.path


def test_every_tensor_begins_a_page_of_a_safetensors_file(cache: PackedCache) -> None:
    cache.write(TENSORS)
    infos = SafetensorsFile(cache.path).tensors
    assert [infos[name].start % PAGE for name in TENSORS] == [0, 0, 0]
    others = load_file(cache.path)
    assert same({name: others[name] for name in TENSORS})


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_seen(position: float, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = cache_in(tmp_path_factory.mktemp("flipped"))
    cache.write(TENSORS)
    content = bytearray(cache.path.read_bytes())
    content[int(position * len(content))] ^= 1 << bit
    cache.path.write_bytes(content)
    assert cache.read() is None


WORD_PAIRS = st.tuples(st.integers(0, 2 * PAGE // 8 - 1), st.integers(0, 2 * PAGE // 8 - 1))


def damaged(directory: Path, damage: Callable[[bytearray], None]) -> bool:
    """Whether the pages of b/packed.data differ from what was written, and are taken all the same."""
    cache = cache_in(directory)
    cache.write(TENSORS)
    start = SafetensorsFile(cache.path).tensors["b/packed.data"].start
    content = bytearray(cache.path.read_bytes())
    data = content[start : start + 2 * PAGE]
    before = bytes(data)
    damage(data)
    content[start : start + 2 * PAGE] = data
    cache.path.write_bytes(content)
    return bytes(data) != before and cache.read() is not None


@given(words=WORD_PAIRS, size=st.sampled_from([1, 2, 4, 8]))
@example(words=(0, 1), size=8)
def test_seal_swapped_words_are_seen(
    words: tuple[int, int], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, second = (8 * word for word in words)

    def swap(data: bytearray) -> None:
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )

    assert not damaged(tmp_path_factory.mktemp("swapped"), swap)


@given(words=WORD_PAIRS, byte=st.integers(0, 7), bit=st.integers(0, 7), other=st.integers(0, 63))
def test_seal_detects_two_flipped_bits(
    words: tuple[int, int], byte: int, bit: int, other: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def flip(data: bytearray) -> None:
        data[8 * words[0] + byte] ^= 1 << bit
        data[8 * words[1] + byte] ^= 1 << bit  # the same bit, which goes the other way in half of the cases

    def flip_another(data: bytearray) -> None:
        data[8 * words[0] + byte] ^= 1 << bit
        data[8 * words[1] + other // 8] ^= 1 << other % 8

    assert not damaged(tmp_path_factory.mktemp("same"), flip)
    assert not damaged(tmp_path_factory.mktemp("another"), flip_another)


@given(halves=st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1)), words=WORD_PAIRS)
def test_seal_sum_sees_a_swap_of_mirrored_words(halves: tuple[int, int], words: tuple[int, int]) -> None:
    (low, high), (first, second) = halves, (word % (PAGE // 8) for word in words)
    page = torch.zeros(PAGE // 4, dtype=torch.int32)
    page[2 * first : 2 * first + 2] = torch.tensor([low, high], dtype=torch.int32)
    page[2 * second : 2 * second + 2] = torch.tensor([high, low], dtype=torch.int32)
    swapped = page.clone()
    pair = page[2 * first : 2 * first + 2].clone()
    swapped[2 * first : 2 * first + 2] = page[2 * second : 2 * second + 2]
    swapped[2 * second : 2 * second + 2] = pair
    sums = [packed_cache._sums(one.view(torch.uint8)) for one in (page, swapped)]
    assert (sums[0] == sums[1]) == torch.equal(page, swapped)


@pytest.mark.parametrize("size", [0, 7, 8, 100, PAGE, 3 * PAGE + 5, -1])
def test_half_a_file_is_seen_and_replaced(
    size: int, cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write(TENSORS)
    whole = cache.path.read_bytes()
    cache.path.write_bytes(whole[:size])
    assert cache.read() is None
    assert "packing the weights again" in caplog.text
    cache.write(TENSORS)
    assert cache.path.read_bytes() == whole


def test_swapped_pages_are_seen(cache: PackedCache) -> None:
    cache.write(TENSORS)
    content = cache.path.read_bytes()
    start = SafetensorsFile(cache.path).tensors["b/packed.scales"].start
    first, second = content[start : start + PAGE], content[start + PAGE : start + 2 * PAGE]
    assert first != second
    cache.path.write_bytes(content.replace(first + second, second + first))
    assert cache.read() is None


def test_a_file_of_another_key_is_not_taken(cache: PackedCache) -> None:
    cache.write(TENSORS)
    other = cache_in(cache.path.parent, KEY[::-1])
    cache.path.rename(other.path)
    assert other.read() is None


def test_a_file_that_is_no_cache_is_not_taken(cache: PackedCache, tiny_model: Callable[[str], Path]) -> None:
    cache.write(TENSORS)
    shutil.copyfile(tiny_model("llama") / SINGLE_NAME, cache.path)
    assert cache.read() is None


@pytest.mark.item(49)
def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = cache_in(tmp_path / "file")
    cache.write(TENSORS)
    assert "packed weights cannot be stored" in caplog.text
    assert cache.read() is None


def test_a_directory_that_is_only_readable_is_read(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write(TENSORS)
    open_file = Path.open

    def read_only(path: Path, mode: str = "r", *args: Any) -> Any:
        if mode != "rb":
            raise OSError(30, "Read-only file system")
        return open_file(path, mode, *args)

    monkeypatch.setattr(Path, "open", read_only)
    other = cache_in(cache.path.parent, KEY[::-1])
    other.write(TENSORS)
    assert "packed weights cannot be stored" in caplog.text
    assert "Read-only file system" in caplog.text
    assert same(cache.read())
    assert only_file(cache.path.parent) == cache.path


@pytest.mark.item(53)
def test_a_full_disk_leaves_nothing_behind(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(pages: Tensor) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "_sums", full)
    cache.write(TENSORS)
    assert "No space left on device" in caplog.text
    assert list(cache.path.parent.iterdir()) == []


def test_files_of_a_killed_writer_are_deleted_live_ones_kept(cache: PackedCache) -> None:
    cache.path.parent.mkdir(parents=True, exist_ok=True)
    abandoned, written = (cache.path.with_name(f".another.safetensors.{end}") for end in ("0" * 8, "1" * 8))
    for draft in (abandoned, written):
        draft.write_bytes(b"half of it")
    with written.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.write(TENSORS)
    assert sorted(cache.path.parent.iterdir()) == sorted([cache.path, written])


def test_racing_writers_and_readers_see_whole_files(cache: PackedCache) -> None:
    def work(turn: int) -> bool:
        if turn % 2:
            cache.write(TENSORS)
            return True
        read = cache.read()
        return read is None or same(read)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))
    assert only_file(cache.path.parent) == cache.path


WRITER = """
import sys
from pathlib import Path
from tests.models.test_packed_cache import TENSORS, cache_in
print("ready", flush=True)
sys.stdin.read()
for _ in range(10):
    cache_in(Path(sys.argv[1])).write(TENSORS)
"""


@pytest.mark.more
def test_racing_processes_leave_one_whole_file(cache: PackedCache) -> None:
    command = [sys.executable, "-c", WRITER, str(cache.path.parent)]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE)) for _ in "12"
        ]
        streams = [(writer.stdin, writer.stdout) for writer in writers]
        assert [output.readline() for _, output in streams if output is not None] == [b"ready\n"] * 2
        for start in (start for start, _ in streams if start is not None):
            start.close()
        while any(writer.poll() is None for writer in writers):
            read = cache.read()
            assert read is None or same(read)
        assert [writer.returncode for writer in writers] == [0, 0]
    assert same(cache.read())
    assert only_file(cache.path.parent) == cache.path


KILLED = """
import os, signal, sys
from pathlib import Path
from quire.models import packed_cache
from tests.models.test_packed_cache import TENSORS, cache_in
sums, left = packed_cache._sums, int(sys.argv[2])
def sums_or_death(pages):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return sums(pages)
packed_cache._sums = sums_or_death
cache_in(Path(sys.argv[1])).write(TENSORS)
"""


@pytest.mark.parametrize("num_parts", quick([0, 3], [3]))
def test_a_writer_that_is_killed_leaves_nothing_to_read(num_parts: int, cache: PackedCache) -> None:
    command = [sys.executable, "-c", KILLED, str(cache.path.parent), str(num_parts)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert len(list(cache.path.parent.iterdir())) == 1
    assert cache.read() is None
    cache.write(TENSORS)
    assert same(cache.read())
    assert only_file(cache.path.parent) == cache.path


def test_file_is_the_users_alone(cache: PackedCache) -> None:
    old = os.umask(0)
    try:
        cache.write(TENSORS)
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.path.parent.stat().st_mode) == 0o700


def test_limit_smaller_than_a_file_keeps_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_in(tmp_path).write(TENSORS)
    size = only_file(tmp_path).stat().st_size
    cache_in(tmp_path, KEY[::-1], size - 1).write(TENSORS)
    assert "over the limit" in caplog.text
    assert len(list(tmp_path.iterdir())) == 1
    cache_in(tmp_path, KEY[::-1], size).write(TENSORS)
    assert only_file(tmp_path).name.startswith(f"tiny.{KEY[::-1][:32]}")


def test_a_disk_that_would_be_full_is_spared(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage("/")._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    cache.write(TENSORS)
    assert "more than half of the free disk space" in caplog.text
    assert list(cache.path.parent.iterdir()) == []


def key_of(config: EngineConfig, layout: str = "panels-1") -> str:
    with torch.device("meta"):
        return packed_key(DecoderForCausalLM(config=config), layout)


def test_the_key_follows_everything_that_decides_the_weights(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))
    moved = Path(shutil.copytree(directory, tmp_path / "moved"))
    config = prepared_config(directory)
    keys = [key_of(config, layout) for layout in ("panels-1", "panels-2", "plain")]
    for options in (*QUANTIZATIONS[1:], {"dtype": "bfloat16"}, {"load_format": "dummy"}):
        keys.append(key_of(prepared_config(directory, **options)))
    keys.append(
        key_of(prepared_config(directory, quantization="int8", quantization_config={"mode": "precise"}))
    )
    keys.append(key_of(prepared_config(directory, load_format="dummy", seed=1)))
    keys.append(key_of(prepared_config(moved)))
    other_arch = dataclasses.replace(config.arch, hidden_act="gelu")
    keys.append(key_of(dataclasses.replace(config, model_arch=other_arch)))
    with monkeypatch.context() as patch:
        patch.setattr(packed_cache, "__version__", "0.0.0")
        keys.append(key_of(config))
    other_names = CheckpointNames(
        merged={**config.arch.names.merged, "qkv_proj": ("v_proj", "k_proj", "q_proj")}
    )
    keys.append(
        key_of(dataclasses.replace(config, model_arch=dataclasses.replace(config.arch, names=other_names)))
    )
    status = (directory / SINGLE_NAME).stat()
    rewrite_in_place(directory / SINGLE_NAME, status.st_atime_ns, status.st_mtime_ns)
    keys.append(key_of(config))
    assert len(set(keys)) == len(keys)
    assert keys[-1] == key_of(prepared_config(directory, max_num_seqs=3, seed=4))


def rewrite_in_place(path: Path, *times_ns: int) -> None:
    """New content of the same size, dated back to before it was written."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times_ns[0], times_ns[1]))


@pytest.mark.parametrize("options", QUANTIZATIONS, ids=["float", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama-tied-bias", "gemma2", "opt", "gpt2"])
def test_second_start_has_the_same_bits_without_the_checkpoint(
    name: str,
    options: dict[str, Any],
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = {"packed_weights_cache": str(tmp_path), "dtype": "bfloat16", **options}
    plain, first = (
        load_tiny(tiny_model(name), dtype="bfloat16", **options),
        load_tiny(tiny_model(name), **args),
    )
    monkeypatch.delattr(CheckpointWeights, "__init__")
    second = load_tiny(tiny_model(name), **args)
    expected = logits_of(plain, PROMPT, chunk_sizes=[4])[0]
    for model in (first, second):
        assert torch.equal(logits_of(model, PROMPT, chunk_sizes=[4])[0], expected)
    for (_, one), (_, other) in zip(first.checkpoint_layers(), second.checkpoint_layers(), strict=True):
        assert same(other.tensors(), one.tensors())


def test_a_damaged_cache_is_made_again(
    tmp_path: Path, tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    args = {"packed_weights_cache": str(tmp_path), "quantization": "int8"}
    load_tiny(tiny_model("llama"), **args)
    whole = only_file(tmp_path).read_bytes()
    only_file(tmp_path).write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.INFO):
        load_tiny(tiny_model("llama"), **args)
    assert "packing the weights again" in caplog.text
    assert only_file(tmp_path).read_bytes() == whole
