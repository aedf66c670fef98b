# SPDX-License-Identifier: Apache-2.0
"""Adapters of models that pool: of transformers' models without a head, and with heads of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from quire import LLM
from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.startup import prepare
from quire.errors import ModelLoadError, ValidationError
from quire.kernels import cpu
from quire.lora.checkpoint import read_adapter
from quire.lora.targets import Targets
from quire.models.loader import load_model
from tests.end_to_end.test_pooled_models import CUT, assert_close, hidden_states, prompts
from tests.fixtures.pooled import pool, pooling_core, write_model
from tests.fixtures.quick import quick
from tests.fixtures.tiny_encoders import TINY_ENCODERS, encoder_oracle
from tests.fixtures.tiny_models import write_tiny_tokenizer
from tests.lora.adapters import extend, linear_shapes, merge, write_adapter
from tests.models.harness import load_tiny

ALONE = sorted(name for name in TINY_ENCODERS if "-" not in name or name in ("embedding-gemma", "jina-v3"))
"""Encoders without a head, whose adapters do not say what stands before all names in those with one."""
ADAPTERS = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 3}
NOT_COMPUTED = "pooler"
"""What makes a vector of the first token, which encoders need not compute."""


def of_layers(oracle: nn.Module) -> dict[str, tuple[int, int]]:
    """The linear modules of a model of transformers, as PEFT names them."""
    return {name: shape for name, shape in linear_shapes(oracle).items() if NOT_COMPUTED not in name}


def request_of(directory: Path, number: int = 1) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, str(directory))


def means(model: nn.Module, texts: list[list[int]]) -> list[Tensor]:
    return [nn.functional.normalize(hidden.mean(0), dim=0) for hidden in hidden_states(model, texts)]


def bits(found: Sequence[NDArray[np.float32]]) -> list[bytes]:
    return [one.tobytes() for one in found]


@pytest.mark.parametrize("name", quick(ALONE, ("bert", "gte", "embedding-gemma")))
def test_encoder_adapter_equals_merging(
    name: str, tiny_encoder: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, texts = tiny_encoder(name), prompts((5, 17, 30))
    oracle = encoder_oracle(name, directory)
    adapter = write_adapter(tmp_path / "adapter", of_layers(oracle))
    plain = [nn.functional.normalize(hidden.mean(0), dim=0) for hidden in states(oracle, texts)]
    merge(oracle, adapter, {})
    merged = [nn.functional.normalize(hidden.mean(0), dim=0) for hidden in states(oracle, texts)]
    assert all((one - other).abs().max() > 0.01 for one, other in zip(plain, merged, strict=True))
    core, own = pooling_core(directory, **ADAPTERS), request_of(adapter)
    mixed = pool(core, texts, adapters=[own, None, own])
    assert_close(mixed, [merged[0], plain[1], merged[2]])
    alone = pool(core, texts, adapters=[own, None, own], together=False)
    assert not cpu.available() or bits(alone) == bits(mixed)


@torch.inference_mode()
def states(model: nn.Module, texts: list[list[int]]) -> list[Tensor]:
    return [model(torch.tensor([text])).last_hidden_state[0] for text in texts]


@pytest.mark.parametrize(("name", "class_name"), [("llama", "LlamaModel"), ("opt", "OPTModel")])
def test_adapter_without_head_pools_as_if_merged(name: str, class_name: str, tmp_path: Path) -> None:
    model, texts = write_model(name, tmp_path / "model", class_name), prompts((5, 17))
    adapter = write_adapter(tmp_path / "adapter", linear_shapes(model))
    merge(model, adapter, {})
    core = pooling_core(tmp_path / "model", pooler_config={"pooling_type": "MEAN"}, **ADAPTERS)
    assert_close(pool(core, texts, adapters=[request_of(adapter)] * 2), means(model, texts))


HEADS: dict[str, tuple[str, Sequence[str]]] = {
    "bert": ("Bert", ("classifier",)),
    "roberta": ("Roberta", ("classifier.dense", "classifier.out_proj")),
    "distilbert": ("DistilBert", ("pre_classifier", "classifier")),
}
"""Family -> its class, and the layers of its head, which PEFT saves whole (`modules_to_save`)."""


@torch.inference_mode()
def probabilities(model: Any, texts: list[list[int]]) -> list[Tensor]:
    return [model(torch.tensor([text])).logits[0].softmax(-1) for text in texts]


def with_other_head(directory: Path, oracle: nn.Module, layers: Sequence[str], seed: int = 0) -> Path:
    """Let an adapter have other weights and biases of these, which the oracle gets, too."""
    torch.manual_seed(seed)
    tensors = {}
    for name in layers:
        for kind, parameter in oracle.get_submodule(name).named_parameters():
            own = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
            tensors[f"{name}.{kind}"] = own
            with torch.no_grad():
                parameter.copy_(own)
    return extend(directory, tensors, modules_to_save=[layers[0].partition(".")[0]], task_type="SEQ_CLS")


@pytest.mark.parametrize("name", quick(HEADS, ("roberta",)))
def test_each_adapter_of_an_encoder_has_a_head_of_its_own(
    name: str, tiny_encoder: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, texts = tiny_encoder(f"{name}-texts"), prompts((5, 17, 30))
    expected = [probabilities(encoder_oracle(f"{name}-texts", directory), texts[:1])[0]]
    requests: list[LoRARequest | None] = [None]
    for number in (1, 2):
        oracle = encoder_oracle(f"{name}-texts", directory)
        shapes = {key: shape for key, shape in of_layers(oracle).items() if "classifier" not in key}
        adapter = write_adapter(tmp_path / str(number), shapes, seed=number)
        merge(oracle, adapter, {})
        with_other_head(adapter, oracle, HEADS[name][1], seed=number)
        expected.append(probabilities(oracle, [texts[number]])[0])
        requests.append(request_of(adapter, number))
    core = pooling_core(directory, **ADAPTERS)
    mixed = pool(core, texts, adapters=requests)
    assert_close(mixed, expected)
    assert not cpu.available() or bits(pool(core, texts, adapters=requests, together=False)) == bits(mixed)


@pytest.mark.parametrize("class_name", ["LlamaForSequenceClassification", "GPT2ForTokenClassification"])
def test_an_adapter_of_a_language_model_has_a_head_of_its_own(class_name: str, tmp_path: Path) -> None:
    name, head = ("llama", "score") if class_name.startswith("Llama") else ("gpt2", "classifier")
    oracle = write_model(name, tmp_path / "model", class_name, num_labels=3)
    texts = prompts((5, 17))
    plain = probabilities(oracle, texts)
    shapes = {key: shape for key, shape in linear_shapes(oracle).items() if key != head}
    adapter = write_adapter(tmp_path / "adapter", shapes)
    merge(oracle, adapter, {})
    with_other_head(adapter, oracle, [head])
    core, own = pooling_core(tmp_path / "model", **CUT, **ADAPTERS), request_of(adapter)
    assert_close(pool(core, texts, adapters=[own, own]), probabilities(oracle, texts))
    assert_close(pool(core, texts, adapters=[None, own])[:1], plain[:1])


def test_an_adapter_of_a_heads_own_product_counts(
    tiny_encoder: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, texts = tiny_encoder("bert-texts"), prompts((5, 17))
    oracle = encoder_oracle("bert-texts", directory)
    adapter = write_adapter(tmp_path, linear_shapes(oracle), rank=2)
    merge(oracle, adapter, {})
    core = pooling_core(directory, **ADAPTERS)
    found = pool(core, texts, adapters=[request_of(adapter)] * 2)
    assert_close(found, probabilities(oracle, texts))


BAD_HEADS: dict[str, tuple[dict[str, Tensor], str]] = {
    "classes": (
        {"classifier.weight": torch.ones(4, 64)},
        r"has shape \[4, 64\]; the model's layer implies \[3, 64\]",
    ),
    "both": (
        {"classifier.weight": torch.ones(3, 64)},
        "is the whole weight of classifier, which also has lora_A and lora_B",
    ),
    "other": (
        {"bert.encoder.layer.0.output.dense.weight": torch.ones(64, 96)},
        "is neither embedding nor head",
    ),
    "unknown": ({"score.weight": torch.ones(3, 64)}, "is for score, which adapters cannot change"),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_head_that_does_not_fit_is_refused(
    name: str, tiny_encoder: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors, problem = BAD_HEADS[name]
    shapes = {"classifier" if name == "both" else "bert.pooler.dense": (3 if name == "both" else 64, 64)}
    adapter = extend(write_adapter(tmp_path, shapes), tensors)
    targets = Targets(load_tiny(tiny_encoder("bert-texts")))
    with pytest.raises(ModelLoadError, match=problem):
        read_adapter(adapter, targets, 16, torch.float32)


def without_head(directory: Path, oracle: Any, class_name: str) -> Path:
    """The checkpoint of a classifier's body, as it was before anybody thought of classes."""
    body = oracle.base_model
    if class_name.endswith("ForCausalLM"):
        body = getattr(transformers, class_name)(oracle.config)
        body.base_model.load_state_dict(oracle.base_model.state_dict())
    body.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return directory


@pytest.mark.parametrize(
    ("class_name", "head"),
    [("LlamaForCausalLM", "score"), ("LlamaModel", "score"), ("BertModel", "classifier")],
)
def test_an_adapter_brings_the_head_that_the_model_has_not(
    class_name: str, head: str, tiny_encoder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each its own; one without is refused."""
    if class_name == "BertModel":
        oracle = encoder_oracle("bert-texts", tiny_encoder("bert-texts"))
    else:
        oracle = write_model("llama", tmp_path / "whole", "LlamaForSequenceClassification", num_labels=3)
    base = without_head(tmp_path / "base", oracle, class_name)
    texts, requests, expected = prompts((5, 17)), [], []
    state = {key: value.clone() for key, value in oracle.state_dict().items()}
    shapes = {key: shape for key, shape in of_layers(oracle).items() if key != head}
    for number, text in enumerate(texts, 1):
        oracle.load_state_dict(state)
        adapter = write_adapter(tmp_path / str(number), shapes, seed=number)
        merge(oracle, adapter, {})
        with_other_head(adapter, oracle, [head], seed=number)
        requests.append(request_of(adapter, number))
        expected += probabilities(oracle, [text])
    core = pooling_core(base, convert="classify", **ADAPTERS)
    assert_close(pool(core, texts, adapters=requests), expected)
    headless = write_adapter(tmp_path / "headless", shapes)
    config = prepare(EngineConfig.from_args(model=str(base), convert="classify", **ADAPTERS), "offline")
    problem = rf"no tensor base_model.model.{head}.weight, and the model has no head of its own"
    with pytest.raises(ModelLoadError, match=problem):
        read_adapter(headless, Targets(load_model(config)), 16, torch.float32)


def test_pooling_by_a_missing_head_is_refused(tmp_path: Path) -> None:
    oracle = write_model("llama", tmp_path / "whole", "LlamaForSequenceClassification")
    base = without_head(tmp_path / "base", oracle, "LlamaModel")
    llm = LLM(str(base), convert="classify", device="cpu", max_model_len=64, **ADAPTERS)
    with pytest.raises(
        ValidationError, match="no head of its own, only its adapters have one: name an adapter"
    ):
        llm.classify([[1, 2, 3]], use_tqdm=False)
    with pytest.raises(ModelLoadError, match=r"tensor 'score.weight' is in none of the files"):
        LLM(str(base), convert="classify", device="cpu", max_model_len=64)
