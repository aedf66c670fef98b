# SPDX-License-Identifier: Apache-2.0
"""`quire quantize` from end to end: what it writes is read as what was rounded, and mistakes leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, StartupError
from quire.kernels import reference
from quire.kernels.formats.search import Steps
from quire.kernels.linear import WeightScheme
from quire.quantize import files
from quire.quantize.grid import AUTO, IntegerGrid
from quire.quantize.recipe import METHODS, Recipe
from quire.quantize.run import quantize_checkpoint
from tests.models.harness import load_tiny, logits_of

IDS = [list(range(3, 40)), [7] * 9]
GROUPS_OF_32 = IntegerGrid(4, 32)
PRECISE = {"quantization_config": {"mode": "precise"}}


def quantized(
    model: Path, output: Path, method: str = "rtn", grid: IntegerGrid = GROUPS_OF_32, **options: Any
) -> Path:
    quantize_checkpoint(
        EngineConfig.from_args(model=str(model), device="cpu"), Recipe(method, grid, **options), output
    )
    return output


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()
    }


def logits(model: Path, **args: Any) -> Tensor:
    return torch.cat(logits_of(load_tiny(model, **args), IDS, chunk_sizes=[64]))


def unpacked(tensors: dict[str, Tensor], module: str, bits: int, group: int) -> Tensor:
    """Return a module's weight by the layout of compressed-tensors."""
    outputs, inputs = tensors[f"{module}.weight_shape"].tolist()
    words = tensors[f"{module}.weight_packed"].long() & 0xFFFFFFFF
    shifts = torch.arange(0, 32, bits)
    codes = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :inputs]
    zeros = torch.full((outputs, inputs // group), 1 << (bits - 1))
    if f"{module}.weight_zero_point" in tensors:
        packed = tensors[f"{module}.weight_zero_point"].long() & 0xFFFFFFFF
        zeros = ((packed.unsqueeze(1) >> shifts.view(-1, 1)) & ((1 << bits) - 1)).flatten(0, 1)[:outputs]
    steps = codes.unflatten(1, (-1, group)) - zeros.unsqueeze(-1)
    return (steps * tensors[f"{module}.weight_scale"].float().unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize(
    "grid", [IntegerGrid(4, 32), IntegerGrid(4, 32, False), IntegerGrid(8, 32, False)], ids=str
)
def test_rtn_checkpoint_equals_loading_in_int4(
    grid: IntegerGrid, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    before, after = (
        tensors_of(tiny_model("llama")),
        tensors_of(quantized(tiny_model("llama"), tmp_path / "q", grid=grid)),
    )
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        module = f"model.layers.1.{name}"
        found, weight = unpacked(after, module, grid.bits, 32), before[f"{module}.weight"]
        if grid.bits == 4:
            scheme = WeightScheme("int4", 32, grid.symmetric)
            packed = reference.pack_weight(weight, scheme)
            assert torch.equal(found, reference.unpack_weight(packed))
        assert (found - weight).norm() < (0.12 if grid.bits == 4 else 0.01) * weight.norm()
    rest = {name for name in before if "proj" not in name}
    assert all(torch.equal(before[name], after[name]) for name in rest)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert "lm_head" in config["ignore"]


def test_small_weights_in_float16_have_scales_that_it_has(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path / "half")
    module = "model.layers.1.mlp.down_proj"
    halves = {name: tensor.half() for name, tensor in tensors_of(tmp_path / "half").items()}
    small = halves[f"{module}.weight"] * 1e-4
    save_file(halves | {f"{module}.weight": small}, tmp_path / "half" / "model.safetensors")
    after = tensors_of(quantized(tmp_path / "half", tmp_path / "q"))
    change = unpacked(after, module, 4, 32) - small.float()
    grid = GROUPS_OF_32.stored_as(torch.float16)
    steps = grid.steps(small.float())
    least = grid.weights(grid.codes(small.float(), steps), steps) - small.float()
    assert after[f"{module}.weight_scale"].dtype is torch.float16
    assert torch.equal(change, least)


def test_packed_words_equal_compressed_tensors() -> None:
    """Recorded of `pack_to_int32` of its version 0.20.0, along inputs, and of zero points along outputs."""
    codes = ((torch.arange(80).reshape(10, 8) * 7 + 3) % 16).to(torch.uint8)
    written = IntegerGrid(4, 1, False).tensors(codes, Steps(torch.ones(10, 8), codes.float()), torch.float32)
    assert written["weight_packed"].tolist() == [[1299153315], [-974714581]] * 5
    assert written["weight_zero_point"].tolist() == [
        [-1280068685, 707406378, -1852730991, 134744072, 2139062143, -421075226, 1566399837, -993737532],
        [179, 42, 145, 8, 127, 230, 93, 196],
    ]
    codes = ((torch.arange(24).reshape(3, 8) * 37 + 11) % 256).to(torch.uint8)
    written = IntegerGrid(8, 1, False).tensors(codes, Steps(torch.ones(3, 8), codes.float()), torch.float32)
    assert written["weight_packed"].tolist() == [
        [2052403211, 250201247],
        [-1568843725, 907144391],
        [-895123365, 1580799215],
    ]
    assert written["weight_zero_point"].tolist() == [
        [5976843, 8411184, 10845525, 13279866, 15714207, 1371332, 3740137, 6174222]
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "mixtral", "phi3", "gemma2"])
def test_written_checkpoints_run(
    family: str, method: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """In 8 bits, so that they are nearly what they were, also where scales were moved between layers."""
    texts = tmp_path / "texts.txt"
    texts.write_text("A text of which some pages are read to calibrate. " * 8)
    calibration = {} if method == "rtn" else {"calibration": texts, "sequence_length": 64}
    path = quantized(tiny_model(family), tmp_path / "q", method, IntegerGrid(8, 16), **calibration)
    expected, found = logits(tiny_model(family)), logits(path, **PRECISE)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    # Of the tokens of a sparse model a few get another expert; a scale in the wrong place would show in all.
    assert 0 < errors.median() < 0.05


@pytest.mark.more
def test_the_model_in_the_box_bears_gptq_better_than_rounding(tmp_path: Path) -> None:
    from quire.models.checkpoint import resolve_model_dir
    from quire.quantize.calibration import CHATS

    box = resolve_model_dir("quire-demo", None, None)
    chats = {"calibration": CHATS, "num_sequences": 24}
    paths = [box] + [
        quantized(box, tmp_path / method, method, IntegerGrid(4, 64), **(chats if method == "gptq" else {}))
        for method in ("rtn", "gptq")
    ]
    ids = [load_ids(box)]
    exact, rtn, gptq = (
        torch.cat(logits_of(load_tiny(path, dtype="bfloat16"), ids, chunk_sizes=[4096])).log_softmax(-1)
        for path in paths
    )
    assert (gptq - exact).norm() < 0.9 * (rtn - exact).norm()


def load_ids(box: Path) -> list[int]:
    """A dialogue that the texts in the box do not have among the first."""
    from quire.engine.tokenizer import Tokenizer
    from quire.quantize.calibration import CHATS, read_sequences

    sequences = read_sequences(CHATS, Tokenizer.from_dir(box), 40, 256)
    return [token for sequence in sequences[30:32] for token in sequence]


def test_mistakes_are_reported_and_leave_no_files(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, there, empty = tiny_model("llama"), tmp_path / "there", tmp_path / "empty.txt"
    there.mkdir()
    empty.touch()
    for wrong, match in (
        ({"output": there}, "exists already"),
        (
            {"grid": IntegerGrid(4, 128)},
            r"--group-size 128 does not divide model.layers.0.self_attn.q_proj \(64 inputs\)",
        ),
        ({"method": "magic"}, "--method must be one of rtn, gptq, awq, awq-gptq"),
        ({"method": "gptq", "calibration": empty}, "holds no text"),
        ({"calibration": empty}, "--calibration has no effect with --method rtn"),
        ({"act_order": False}, "--act-order has no effect"),
    ):
        with pytest.raises(ConfigError, match=match):
            quantized(**({"model": llama, "output": tmp_path / "q"} | wrong))
    done = quantized(llama, tmp_path / "done")
    with pytest.raises(ConfigError, match="is quantized already"):
        quantized(done, tmp_path / "q")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_safetensors", full)
    with pytest.raises(StartupError, match="No space left on device"):
        quantized(llama, tmp_path / "q")
    assert {path.name for path in tmp_path.iterdir()} == {"there", "empty.txt", "done"}


def test_group_size_auto_is_the_largest_that_divides_all(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    llama = tiny_model("llama")
    config = EngineConfig.from_args(model=str(llama), device="cpu")
    used = quantize_checkpoint(config, Recipe("rtn", IntegerGrid(4, AUTO)), tmp_path / "q")
    inputs = [tensor.shape[1] for name, tensor in tensors_of(llama).items() if "proj" in name]
    assert used.group_size == max(size for size in (32, 64, 128) if not any(k % size for k in inputs))


def test_files_of_a_killed_run_are_cleared_a_running_ones_kept(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Killed in earnest: nothing of ours runs behind it, and the system takes its lock."""
    output, draft = tmp_path / "q", tmp_path / ".q.unfinished"
    killed = os.fork()
    if killed == 0:
        with files.new_checkpoint(output) as writer:
            writer.add({"weight": torch.ones(4)})
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert [path.name for path in draft.iterdir()] == ["0"]
    with files.new_checkpoint(tmp_path / "q") as writer:
        writer.add({"weight": torch.zeros(4)})
        with (
            pytest.raises(ConfigError, match="is being written by another process"),
            files.new_checkpoint(output),
        ):
            pass
        assert [path.name for path in draft.iterdir()] == ["0"]
        writer.finish(tiny_model("llama"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
    assert torch.equal(tensors_of(output)["weight"], torch.zeros(4))
    with pytest.raises(ConfigError, match="exists already"), files.new_checkpoint(output):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_written_checkpoint_keeps_named_chat_templates(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model("llama"), source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    (tmp_path / ".out.unfinished" / "additional_chat_templates").mkdir(
        parents=True
    )  # of a run that was killed
    with files.new_checkpoint(tmp_path / "out") as writer:
        writer.finish(source, {})
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"
