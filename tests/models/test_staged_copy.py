# SPDX-License-Identifier: Apache-2.0
"""Loading through pinned buffers, on a stream that is as late as it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.linear import Linear
from quire.layers.slot import Slot, TensorPart, sizes
from quire.models import loader
from quire.models.base import CausalLM
from quire.models.safetensors_file import SafetensorsFile
from quire.models.staged_copy import NUM_BUFFERS, GpuCopyStream, StagedCopy
from quire.models.weight_files import SINGLE_NAME
from tests.fixtures.quick import SOME_MODELS, quick_models
from tests.fixtures.tiny_models import TINY_MODELS
from tests.models.harness import load_tiny

QUICK = {*SOME_MODELS} - {"gptoss"}
"""Its many experts take long; test_mxfp4 loads them so."""


class LateStream:
    """A `CopyStream` that copies when somebody waits for it, all that was sent before as well.

    So a buffer that is written to too early is copied with what it has then, and a layer that is finished too early
    sees what memory holds.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.calls: list[str] = []
        self._sent: list[tuple[Tensor, Slot]] = []
        self._num_copied = 0

    def memory(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def begin(self) -> None:
        self.calls.append("begin")

    def send(self, staged: Tensor, slot: Slot) -> LateCopy:
        slot.target.fill_(torch.nan if slot.target.is_floating_point() else 255)
        self._sent.append((staged, slot))
        return LateCopy(self, len(self._sent))

    def end(self) -> None:
        self.calls.append("end")
        self.copy(len(self._sent))

    @torch.no_grad()
    def copy(self, count: int) -> None:
        for staged, slot in self._sent[self._num_copied : count]:
            slot.fill(staged)
        self._num_copied = max(self._num_copied, count)


class LateCopy:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        self._stream.copy(self._number)


class Recorder:
    """Torch's module of a device, its streams and its events in one: it writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Stream(self, device: torch.device) -> Recorder:  # noqa: N802  (torch's name)
        return self

    def Event(self) -> Recorder:  # noqa: N802
        return self

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda stream: self.calls.append("compute waits for copies"))

    def wait_stream(self, stream: object) -> None:
        self.calls.append("copies wait for compute")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.calls.append("copy {")
        yield
        self.calls.append("}")

    def record(self, stream: object) -> None:
        self.calls.append("event")


def test_the_order_of_a_gpus_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    stream, target = GpuCopyStream(torch.device("cpu")), torch.zeros(3, dtype=torch.float16)
    stream.begin()
    stream.send(torch.arange(3.0), Slot(target, "normal", convert=lambda stored: stored + 1.0))
    stream.end()
    assert target.tolist() == [1.0, 2.0, 3.0]
    assert module.calls == [
        "copies wait for compute", "copy {", "event", "}", "compute waits for copies"
    ]  # fmt: skip


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CausalLM, LateStream]]:
    """Loads a tiny model by way of buffers of so many bytes."""

    def load(directory: Path, buffer_bytes: int, **args: object) -> tuple[CausalLM, LateStream]:
        stream = LateStream()
        with monkeypatch.context() as patch:
            patch.setattr(loader, "tensor_reader", lambda device: StagedCopy(stream, buffer_bytes))
            return load_tiny(directory, **args), stream

    return load


def tensors(model: CausalLM) -> dict[str, Tensor]:
    return {
        f"{names[0]} {name}": tensor
        for names, layer in model.checkpoint_layers()
        for name, tensor in layer.tensors().items()
    }


def same(ours: CausalLM, theirs: CausalLM) -> None:
    got, want = tensors(ours), tensors(theirs)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("name", quick_models(sorted(TINY_MODELS), QUICK))
@pytest.mark.parametrize("buffer_bytes", [1000, 1 << 20])
def test_staged_copy_has_the_bits_of_a_plain_load(
    name: str,
    buffer_bytes: int,
    tiny_model: Callable[[str], Path],
    staged: Callable[..., tuple[CausalLM, LateStream]],
) -> None:
    """In pieces and whole: merged, transposed, tied and shifted weights."""
    model, stream = staged(tiny_model(name), buffer_bytes)
    same(model, load_tiny(tiny_model(name)))
    assert [len(buffer) for buffer in stream.buffers] == [buffer_bytes] * NUM_BUFFERS
    assert stream.calls == ["begin", "end"] * (len(stream.calls) // 2)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_layer_is_quantized_once_it_is_loaded(
    quantization: str, tiny_model: Callable[[str], Path], staged: Callable[..., tuple[CausalLM, LateStream]]
) -> None:
    model, _ = staged(tiny_model("qwen2"), 1000, quantization=quantization)
    same(model, load_tiny(tiny_model("qwen2"), quantization=quantization))
    assert any(layer.packed is not None for layer in model.modules() if isinstance(layer, Linear))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_converted_behind_the_buffer(
    dtype: str, tiny_model: Callable[[str], Path], staged: Callable[..., tuple[CausalLM, LateStream]]
) -> None:
    model, _ = staged(tiny_model("gemma2"), 1000, dtype=dtype)
    same(model, load_tiny(tiny_model("gemma2"), dtype=dtype))


def test_a_row_that_no_buffer_holds_is_cut(tmp_path: Path) -> None:
    stored = torch.randn(3, 5, 40)
    save_file({"t": stored}, tmp_path / SINGLE_NAME)
    file = SafetensorsFile(tmp_path / SINGLE_NAME)
    target, reader = torch.empty(3, 5, 40), StagedCopy(LateStream(), 100)
    reader.fill([(file, file.tensors["t"], Slot(target, "normal"))])
    reader.close()
    assert torch.equal(target, stored)


@given(data=st.data())
def test_any_part_is_read_and_nothing_else(
    data: st.DataObject, stored_file: tuple[Tensor, SafetensorsFile]
) -> None:
    """However it lies in the file, in pieces of whatever size."""
    stored, file = stored_file
    sides = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in stored.shape]
    box = tuple(slice(*side) for side in sides)
    target = torch.full(sizes(box), torch.nan)
    slot = Slot(target, "normal", TensorPart(tuple(stored.shape), TensorPart.all(stored.shape).region, box))
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        plainly = file.read_into
        patch.setattr(
            file, "read_into", lambda start, memory: (read.append(len(memory)), plainly(start, memory))
        )
        reader = StagedCopy(LateStream(), data.draw(st.sampled_from([4, 20, 100, 1000])))
        reader.fill([(file, file.tensors["t"], slot)])
        reader.close()
    assert torch.equal(target, stored[box])
    assert sum(read) == target.nbytes


@pytest.fixture(scope="module")
def stored_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, SafetensorsFile]:
    path = tmp_path_factory.mktemp("parts") / SINGLE_NAME
    stored = torch.randn(3, 5, 7)
    save_file({"before": torch.zeros(2), "t": stored}, path)
    return stored, SafetensorsFile(path)


def test_file_truncated_since_is_reported(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / SINGLE_NAME
    save_file(load_file(tiny_model("llama") / SINGLE_NAME), path)
    file = SafetensorsFile(path)
    with path.open("r+b") as other:
        other.truncate(path.stat().st_size - 10)
    last = list(file.tensors.values())[-1]
    memory = torch.empty(last.end - last.start, dtype=torch.uint8)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated: it ends before byte"):
        file.read_into(last.start, memory)
