# SPDX-License-Identifier: Apache-2.0
"""All engines are timed by the same arithmetic; quire's own worker runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.compare.cases import CASES, Case, Phase
from benchmarks.compare.engines.base import Rate
from benchmarks.compare.engines.python_engine import rates
from benchmarks.compare.engines.quire import Quire
from benchmarks.compare.workers import gguf_file, quantized_checkpoint, worker
from benchmarks.compare.workers import quire as quire_worker


class Steady:
    """Needs a second per prompt token and ten per output token of a request, and is its own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[tuple[int, int, int]] = []

    def generate(self, prompts: worker.Prompts, output_len: int) -> list[int]:
        self.asked.append((len(prompts), len(prompts[0]), output_len))
        self.now += sum(len(prompt) + 10 * output_len for prompt in prompts)
        return [output_len] * len(prompts)


@pytest.mark.parametrize(
    ("phase", "rate", "lengths"),
    [
        (Phase.PREFILL, 2 * 40 / (2 * 40 + 2 * 50), [5]),
        (Phase.DECODE, 2 * 4 / (2 * 40), [1, 5]),
        (Phase.WHOLE, 2 * 5 / (2 * 40 + 2 * 50), [5]),
    ],
)
def test_rate_of_a_phase(phase: Phase, rate: float, lengths: list[int]) -> None:
    engine = Steady()
    case = Case("case", "", 2, 40, 5, phase)
    measured = worker.tokens_per_second(case, engine.generate, random.Random(0), lambda: engine.now)
    assert measured == pytest.approx(rate)
    assert engine.asked == [(2, 40, length) for length in lengths]


def test_an_engine_that_stops_early_has_no_rate() -> None:
    with pytest.raises(RuntimeError, match=r"asked for 32 tokens, got \[31\]"):
        worker.tokens_per_second(CASES["batch"], lambda prompts, output_len: [31], random.Random(0))


def test_rates_are_found_among_an_engines_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def load(model: Path, precision: str) -> worker.Generate:
        print(f"INFO loading {model} {precision}")
        return lambda prompts, output_len: [output_len] * len(prompts)

    worker.run(load, ["model", "bf16", "batch", "prefill"])
    found = list(rates(capsys.readouterr().out.splitlines()))
    assert [rate.case for rate in found] == ["batch", "prefill"]
    assert all(isinstance(rate, Rate) and rate.rate > 0 for rate in found)


@pytest.mark.parametrize("precision", Quire.precisions)
def test_quire_runs(
    precision: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quire_worker, "MAX_MODEL_LEN", 64)
    generate = quire_worker.load(tiny_model("qwen2"), precision)
    assert generate([[3, 4, 5], [6, 7, 8]], 4) == [4, 4]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape that is compared, but for its sizes, which are multiples of 128 and small."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 320}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).bfloat16().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("precision", ["GPTQ g128", "AWQ g128", "Q8_0"])
def test_quire_runs_files(
    precision: str, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GGUF in the type that llama.cpp's tool makes others of."""
    monkeypatch.setattr(quire_worker, "MAX_MODEL_LEN", 64)
    path = tmp_path / ("model.gguf" if precision == "Q8_0" else "model")
    if precision == "Q8_0":
        gguf_file.write(wide, path)
    else:
        quantized_checkpoint.write(wide, path, precision.partition(" ")[0].lower())
    assert quire_worker.load(path, precision)([[3, 4, 5], [6, 7, 8]], 4) == [4, 4]


def test_experts_of_a_file_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    """In the shape of the sparse model that is compared."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 32}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, **heads)).bfloat16().save_pretrained(checkpoint)
    gguf_file.write(checkpoint, path)
    logits = [_first_logprobs(of) for of in (checkpoint, path)]
    assert logits[0] == pytest.approx(logits[1], abs=1e-5)


def _first_logprobs(model: Path) -> list[float]:
    from quire import LLM, SamplingParams

    llm = LLM(str(model), dtype="bfloat16", max_model_len=64, max_num_seqs=1, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [3, 4, 5, 6]}], params, use_tqdm=False)
    (found,) = output.outputs[0].logprobs or []
    return [found[token].logprob for token in sorted(found)]
