# SPDX-License-Identifier: Apache-2.0
"""Models of transformers on our attention, cache and matrices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.layers.kv_cache import kv_cache_specs
from quire.layers.shard import Shard
from quire.models.base import CausalLM
from quire.models.built_in import BUILT_IN
from quire.models.hf_config import read_fully
from quire.models.json_object import JsonObject
from quire.models.loader import without_weights
from quire.models.multimodal import WRAPPERS
from quire.models.registry import ModelRegistry
from quire.models.transformers_backend.reader import read_transformers
from tests.fixtures import tiny_models
from tests.fixtures.folded import folded
from tests.fixtures.hosted_models import HOSTED, NOT_MADE, NOT_READ, REFUSED
from tests.fixtures.quick import quick
from tests.fixtures.thread_ranks import InProcess
from tests.fixtures.tiny_models import TINY_MODELS, write_tiny_model
from tests.models.harness import load_tiny, logits_of, prepared_config
from tests.models.test_parity import assert_close, oracle_logits, prompts
from tests.models.test_tensor_parallel import logits, needs_kernels, together
from tools.models_page import REFUSED as REFUSALS
from tools.models_page import RUN

LENGTHS = (1, 5, 40)
QUICK = ("bert", "camembert", "gemma4-unified", "modernbert-decoder")
"""Those of `HOSTED` that are no minute's matter; the others are `more`."""


def hosted(directory: Path, **args: object) -> torch.nn.Module:
    """A checkpoint, run by transformers' code; contexts end where the tables of RoBERTa's positions do."""
    return load_tiny(directory, model_impl="transformers", **{"max_model_len": 254} | args)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.more) for name in sorted(HOSTED)]
)
def test_logits_equal_those_of_transformers_itself(name: str, tiny_model: Callable[[str], Path]) -> None:
    sequences = prompts(LENGTHS)
    model = hosted(tiny_model(name))
    expected = oracle_logits(tiny_model(name), sequences)
    assert max(logits.abs().max().item() for logits in expected) > 0.5, "logits too small to tell anything"
    assert_close(logits_of(model, sequences, chunk_sizes=[max(LENGTHS)]), expected)
    assert_close(logits_of(model, sequences, chunk_sizes=[3, 1, 7]), expected)


@pytest.mark.parametrize(
    "name",
    [
        *("llama-tied-bias", "gemma3", "llama-yarn", "phi3-window-partial", "stablelm-parallel"),
        *("mixtral", "nanochat-biased", "phimoe", "diffllama", "gptoss"),
    ],
)
def test_a_family_of_ours_has_the_same_logits_either_way(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    assert name in TINY_MODELS
    sequences = prompts(LENGTHS)
    ours = logits_of(load_tiny(tiny_model(name)), sequences, chunk_sizes=[7])
    assert_close(logits_of(hosted(tiny_model(name)), sequences, chunk_sizes=[7]), ours)


@pytest.mark.parametrize("name", ["llama-tied-bias", "mixtral", "bert"])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(name: str, tiny_model: Callable[[str], Path]) -> None:
    sequences = prompts(LENGTHS)
    model = hosted(tiny_model(name))
    together = logits_of(model, sequences, chunk_sizes=[3, 1, 7])
    for sequence, rows in zip(sequences, together, strict=True):
        (alone,) = logits_of(model, [sequence], chunk_sizes=[16])
        assert torch.equal(alone, rows)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_matrices_and_experts_are_quantized(quantization: str, tiny_model: Callable[[str], Path]) -> None:
    args = {"quantization": quantization, "quantization_config": {"group_size": 32}}
    model = hosted(
        tiny_model("mixtral"), **args if quantization == "int4" else {"quantization": quantization}
    )
    kinds = [layer.method.name for _, layer in model.checkpoint_layers() if hasattr(layer, "method")]
    assert kinds.count(quantization) >= 3 * (4 + 2 * 4), "q, k, v, o and the experts of every layer"
    (logits,) = logits_of(model, prompts((5,)), chunk_sizes=[5])
    assert logits.isfinite().all()


@needs_kernels
@pytest.mark.parametrize(
    "name", ["llama-tied-bias", "granite-swa", pytest.param("laguna", marks=pytest.mark.more), "hy-v3"]
)
def test_ranks_share_a_model_by_its_plan(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Heads with their sinks and gates, features of MLPs and of experts, tokens of tables: half of each."""

    def share(model: CausalLM) -> tuple[Tensor, int, set[int]]:
        heads = {spec.num_kv_heads for spec in kv_cache_specs(model).values()}  # type: ignore[attr-defined]
        sizes = [part.nbytes for _, layer in model.checkpoint_layers() for part in layer.tensors().values()]
        return logits(model), sum(sizes), heads

    options = {"model_impl": "transformers", "max_model_len": 254}
    alone, whole, _ = share(load_tiny(tiny_model(name), **options))
    (first, size, heads), (second, *_) = together(tiny_model(name), 2, share, **options)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=2e-4, atol=2e-4)
    assert size < 0.6 * whole
    assert heads == {1}


def test_ranks_want_a_plan(tiny_model: Callable[[str], Path]) -> None:
    config = prepared_config(tiny_model("bert"), model_impl="transformers", max_model_len=254)
    with pytest.raises(
        ConfigError, match=r"BertLMHeadModel of transformers cannot be sharded .* no tensor-par"
    ):
        without_weights(config, Shard.of_group(InProcess.group(2)[0]))


def test_heads_that_ranks_cannot_share_evenly_are_refused(tiny_model: Callable[[str], Path]) -> None:
    config = prepared_config(tiny_model("llama"), model_impl="transformers")
    with pytest.raises(ConfigError, match=r"q_proj: 2 units of 32 outputs cannot be divided evenly among 4"):
        without_weights(config, Shard.of_group(InProcess.group(4)[0]))


QUICK_REFUSED = ("axk2", "bert-encoder", "doge", "gptj", "hrm-text", "inkling", "lfm3", "roformer", "zamba")


@pytest.mark.parametrize("name", quick(sorted(REFUSED), QUICK_REFUSED))
def test_unsupported_model_is_refused_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, reason = REFUSED[name]
    monkeypatch.setitem(tiny_models.TINY_MODELS, name, make)
    directory = write_tiny_model(name, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        load_tiny(directory, model_impl="transformers")
    assert str(error.value).startswith(f"{config['architectures'][0]} of transformers: ")


def test_learned_positions_that_begin_behind_padding_are_fewer(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 256, but may be at most 255"):
        hosted(tiny_model("roberta"), max_model_len=256)


def test_model_implementation_can_be_chosen(tiny_model: Callable[[str], Path]) -> None:
    ours, theirs = "quire.models.decoder:", "quire.models.transformers_backend.model:"
    llama, biogpt = tiny_model("llama"), tiny_model("biogpt")
    assert prepared_config(llama).model_class.startswith(ours)
    assert prepared_config(llama, model_impl="transformers").model_class.startswith(theirs)
    assert prepared_config(biogpt).model_class.startswith(theirs)
    with pytest.raises(UnsupportedModelError, match="'BioGptForCausalLM' is not supported; of the"):
        prepared_config(biogpt, model_impl="quire")
    with pytest.raises(UnsupportedModelError, match="has no model 'XverseForCausalLM'"):
        ModelRegistry.place_of("XverseForCausalLM", "transformers")


@folded("architecture", sorted(NOT_READ))
def test_multimodal_model_is_refused_by_its_config(architecture: str) -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    (kind,) = [kind for kind, name in NAMES.items() if name == architecture]
    values = transformers.CONFIG_MAPPING[kind]().to_dict()
    config = JsonObject("config.json", values | {"architectures": [architecture]}, refused=[])
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=NOT_READ[architecture]):
        read_fully(architecture, config, read_transformers)


def architectures(makers: Iterable[Callable[[], Any]]) -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[make().model_type] for make in makers}


def test_every_causal_lm_of_transformers_is_listed() -> None:
    """Every architecture is listed, so a new version of transformers fails this test until its new ones are tried."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    run = architectures(HOSTED.values())
    refused = architectures(make for make, _ in REFUSED.values()) - run
    assert len(run) == len(HOSTED) >= 39
    assert not run & BUILT_IN.keys()
    assert {*RUN} == run
    assert REFUSALS.keys() == (refused | NOT_READ.keys() | NOT_MADE) - BUILT_IN.keys()
    known = BUILT_IN.keys() | WRAPPERS.keys() | run | REFUSALS.keys()
    assert {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()} <= known
    assert [*RUN] == sorted(RUN, key=str.lower)
    assert [*REFUSALS] == sorted(REFUSALS, key=str.lower)
