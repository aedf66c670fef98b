# SPDX-License-Identifier: Apache-2.0
"""Output and files of llama-perplexity."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from benchmarks.compare import perplexity
from benchmarks.compare.engines.llama_cpp import LlamaCpp
from benchmarks.compare.isa import ISAS
from benchmarks.compare.processes import ProgramError
from benchmarks.compare.records import Accuracy

SAVED = "[1]16.2628,[2]17.6855,[3]16.2900,\n"
COMPARED = """
chunk         PPL            ln(PPL(Q)/PPL(base))      KL Divergence         Δp RMS            Same top p
   1  16.6200 ±    2.5601   0.02173 ±    0.01113   0.02109 ±    0.00175     4.982 ±  0.567 %    87.451 ±  2.079 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  19.259145 ±   1.073704
Mean PPL(base)                :  18.518051 ±   1.005066
Cor(ln(PPL(Q)), ln(PPL(base))):  99.02%
Mean PPL(Q)/PPL(base)         :   1.040020 ±   0.008232
Mean PPL(Q)-PPL(base)         :   0.741094 ±   0.162114

====== KL divergence statistics ======
Mean    KLD:   0.057112 ±   0.001754
Minimum KLD:   0.000001

====== Token probability statistics ======
Mean    Δp: -0.381 ± 0.111 %
Maximum Δp: 48.018%
RMS Δp    :  5.633 ± 0.208 %
Same top p: 86.078 ± 0.686 %
"""


def peer_with(tmp_path: Path, printed: str) -> LlamaCpp:
    """Return llama.cpp with a tool that writes down its arguments and prints a text."""
    tool = tmp_path / "build-native" / "bin" / "llama-perplexity"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/arguments\ncat <<'END'\n{printed}END\n")
    tool.chmod(0o755)
    peer = LlamaCpp(tmp_path)
    peer._isa = ISAS["native"]
    return peer


def test_save_logits_asks_for_float32_and_returns_last_value(tmp_path: Path) -> None:
    peer = peer_with(tmp_path, SAVED)
    paths = (tmp_path / name for name in ("F32.gguf", "text"))
    model, text = paths
    found = perplexity.save_logits(peer, ISAS["native"], model, text, 3, tmp_path / "logits")
    assert found == 16.29
    common = f"-m {model} -t 2 -c 512"
    given = f"-f {text} --chunks 3 -ctk f32 -ctv f32 --kl-divergence-base {tmp_path}/logits"
    assert (tmp_path / "arguments").read_text() == f"{common} {given}\n"


def test_compared_with_reads_the_statistics_of_the_tool(tmp_path: Path) -> None:
    peer, model, logits = peer_with(tmp_path, COMPARED), tmp_path / "Q8_0.gguf", tmp_path / "logits"
    found = perplexity.compared_with(logits, 18.5181, peer, ISAS["native"], model, 60.0)
    assert found == Accuracy(5.633, 86.078, 19.259145, 18.5181)
    assert found.perplexity_change == pytest.approx(0.0400, abs=1e-4)
    asked = (tmp_path / "arguments").read_text()
    assert asked == f"-m {model} -t 2 -c 512 --kl-divergence-base {logits} --kl-divergence\n"


def test_quantized_cache_comparison_uses_flash_attention(tmp_path: Path) -> None:
    peer, model, logits = peer_with(tmp_path, COMPARED), tmp_path / "BF16.gguf", tmp_path / "logits"
    perplexity.compared_with(logits, 18.5181, peer, ISAS["native"], model, 60.0, "q8_0")
    asked = (tmp_path / "arguments").read_text()
    assert asked.startswith(f"-m {model} -t 2 -c 512 -ctk q8_0 -ctv q8_0 -fa on --kl-divergence-base")


def test_statistics_without_rms_dp_are_an_error() -> None:
    """The tool ends with 0 when it cannot read the logits."""
    with pytest.raises(ProgramError, match="printed no rms, same_top"):
        perplexity.statistics_in(["Mean PPL(Q)   :  19.259145 ±   1.073704\n"])


def test_perplexity_of_a_short_text_is_an_error() -> None:
    with pytest.raises(ProgramError, match="shorter than two chunks"):
        perplexity.perplexity_in(["\n"])


def test_chunks_in_logits_are_the_ids_of_the_text(tmp_path: Path) -> None:
    ids = list(range(2 * perplexity.CHUNK))
    head = struct.pack("=8sIii", b"_logits_", perplexity.CHUNK, 49152, 2)
    (tmp_path / "logits").write_bytes(head + struct.pack(f"={len(ids)}i", *ids) + b"log-probabilities")
    assert perplexity.chunks_in(tmp_path / "logits") == [ids[:512], ids[512:]]


def test_chunks_in_logits_of_another_size_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "logits").write_bytes(struct.pack("=8sIii", b"_logits_", 256, 49152, 2))
    with pytest.raises(ProgramError, match="chunks of 512"):
        perplexity.chunks_in(tmp_path / "logits")
