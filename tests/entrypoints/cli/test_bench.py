# SPDX-License-Identifier: Apache-2.0
"""`quire bench throughput` and `latency` on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.bench.backends import BACKENDS, QuireBackend, TransformersBackend
from quire.config import EngineConfig
from quire.entrypoints.cli.main import main

ROOT = Path(__file__).parents[3]
ENGINE = ["--cpu-threads", "1", "--skip-tokenizer-init"]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> str:
    return str(tiny_model("llama"))


def test_throughput(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    lengths = ["--num-prompts", "3", "--input-len", "5", "--output-len", "4"]
    flags = [*ENGINE, "--json", str(file)]
    assert main(["bench", "throughput", "--model", model, *lengths, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Throughput: ")
    assert lines[1:] == ["Total num prompt tokens:  15", "Total num output tokens:  12"]
    content = json.loads(file.read_text())
    assert (content["num_requests"], content["total_num_tokens"]) == (3, 27)
    assert content["tokens_per_second"] == pytest.approx(27 / content["elapsed_time"])


def test_comparison_with_transformers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--num-prompts", "2", "--input-len", "5", "--output-len", "3", "--repeats", "2"]
    assert main(["bench", "throughput", "--model", model, "--compare-hf", *ENGINE, *lengths]) == 0
    quire, hf, ratio = capsys.readouterr().out.splitlines()
    assert quire.startswith("quire ")
    assert hf.startswith("hf ")
    assert float(ratio.removeprefix("Ratio of medians, quire to hf: ")) > 0


def test_latency(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    lengths = ["--batch-size", "2", "--input-len", "5", "--output-len", "3"]
    iterations = ["--num-iters-warmup", "1", "--num-iters", "3", "--json", str(file)]
    assert main(["bench", "latency", "--model", model, *ENGINE, *lengths, *iterations]) == 0
    assert capsys.readouterr().out.startswith("Avg latency: ")
    assert len(json.loads(file.read_text())["latencies"]) == 3


def test_speculation(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    lengths = ["--batch-size", "2", "--input-len", "5", "--output-len", "9", "--num-iters", "2"]
    rates = ["--acceptance-rate", "0", "--acceptance-rate", "1", "--json", str(file)]
    assert main(["bench", "speculation", "--model", model, *ENGINE, *lengths, *rates]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["acceptance 0.00", "acceptance 1.00"]
    for one in json.loads(file.read_text())["speedups"]:
        assert one["ratio"] == pytest.approx(one["with_drafts"] / one["without"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_does_exactly_the_requested_work(model: str, backend: str) -> None:
    engine = BACKENDS[backend](EngineConfig.from_args(model=model, load_format="dummy", cpu_threads=1))
    assert engine.vocab_size == 264
    for _ in range(2):
        assert [len(tokens) for tokens in engine.generate([[5, 6, 7], [8, 9, 10]], 11)] == [11, 11]


def test_backends_generate_the_same_tokens(model: str) -> None:
    config = EngineConfig.from_args(model=model, cpu_threads=1)
    prompts = [[5, 6, 7, 8], [30, 20, 10, 40]]
    assert QuireBackend(config).generate(prompts, 8) == TransformersBackend(config).generate(prompts, 8)


def test_the_dummy_model_has_half_a_billion_parameters() -> None:
    config = json.loads((ROOT / "benchmarks/models/dummy-0.5b/config.json").read_text())
    hidden, mlp, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * hidden // heads
    total = config["vocab_size"] * hidden + layers * (attention + 3 * hidden * mlp)
    assert (hidden, layers, heads, kv_heads, mlp, config["vocab_size"]) == (896, 24, 14, 2, 4864, 151936)
    assert config["tie_word_embeddings"] is True
    assert 0.49e9 < total < 0.5e9


def test_lengths_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--num-prompts", "0"]) == 2
    assert "'0' is less than 1" in capsys.readouterr().err
    assert main(["bench", "latency", "--num-iters", "0"]) == 2


def test_prompts_longer_than_the_context(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "throughput", "--model", model, "--num-prompts", "1", "--input-len", "1k", *ENGINE])
        == 2
    )
    assert "error: " in capsys.readouterr().err
