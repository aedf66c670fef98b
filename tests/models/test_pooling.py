# SPDX-License-Identifier: Apache-2.0
"""Tests of a pooling model's configuration by files, options and defaults, without its weights."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.pooling import HeadLayer, PoolingSpec
from quire.engine.startup import prepare
from quire.errors import ConfigError, ModelLoadError, StartupError, UnsupportedModelError, ValidationError
from quire.models.architectures import ArchitectureKind, architecture_kind
from quire.models.built_in import BUILT_IN
from quire.pooling_params import PoolingParams
from tests.fixtures.folded import folded
from tests.fixtures.pooled import write_json

QWEN = {
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
TRANSFORMER, POOLING, NORMALIZE = (
    {"type": f"sentence_transformers.models.{kind}", "path": path}
    for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "3_Normalize"))
)
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
MEAN = {"pooling_mode_mean_tokens": True}


def write_config(directory: Path, architecture: str = "Qwen3ForCausalLM", **more: Any) -> Path:
    write_json(directory / "config.json", QWEN | {"architectures": [architecture]} | more)
    return directory


def write_modules(directory: Path, *modules: dict[str, str], pooling: dict[str, Any] = MEAN) -> None:
    write_json(directory / "modules.json", list(modules))
    write_json(directory / "1_Pooling/config.json", pooling)


def prepared(directory: Path, **args: Any) -> EngineConfig:
    return prepare(EngineConfig.from_args(device="cpu", model=str(directory), **args), "offline")


def spec_of(directory: Path, **args: Any) -> PoolingSpec:
    spec = prepared(directory, **args).pooling
    assert spec is not None
    return spec


def test_language_model_generates_by_default(tmp_path: Path) -> None:
    write_config(tmp_path)
    config = prepared(tmp_path)
    assert (config.pooling, config.model.runner) == (None, "generate")
    expected = PoolingSpec(("embed", "token_embed"), "last", 64, activation="normalize")
    assert spec_of(tmp_path, runner="pooling") == spec_of(tmp_path, convert="embed") == expected
    assert prepared(tmp_path, runner="pooling").model.convert == "embed"


def test_the_files_of_sentence_transformers_are_read_in_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(tmp_path, matryoshka_dimensions=[32, 16])
    write_modules(tmp_path, TRANSFORMER, POOLING, DENSE, NORMALIZE)
    write_json(tmp_path / "1_Pooling/config.json", MEAN | {"include_prompt": False})
    activation = "torch.nn.modules.linear.Identity"
    dense = {"in_features": 64, "out_features": 40, "bias": False, "activation_function": activation}
    write_json(tmp_path / "2_Dense/config.json", dense)
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    about = {"prompts": {"query": "Q: "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    write_json(tmp_path / "config_sentence_transformers.json", about)
    with caplog.at_level(logging.INFO, "quire"):
        config = prepared(tmp_path)
    assert config.pooling == PoolingSpec(
        ("embed", "token_embed"),
        "mean",
        40,
        activation="normalize",
        matryoshka=(16, 32),
        prompts=(("query", "Q: "),),
        default_prompt="query",
        include_prompt=False,
        similarity="dot",
        head=(HeadLayer("2_Dense/linear", 64, 40, bias=False),),
    )
    assert config.model.max_model_len == 100
    assert prepared(tmp_path, max_model_len=200).model.max_model_len == 200
    assert not config.cache.enable_prefix_caching, "nobody could use it"
    for line in (
        "runner = pooling: the checkpoint has modules.json",
        "pooling = mean: from ",
        "max_model_len = 100",
    ):
        assert line in caplog.text
    assert prepared(tmp_path, runner="generate").pooling is None


@pytest.mark.parametrize(
    ("word", "pooling"),
    [("lasttoken", "last"), ("weightedmean", "weighted_mean"), (["mean", "cls"], "mean+cls")],
)
def test_the_newer_form_of_pooling_files_is_read(word: Any, pooling: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    write_modules(tmp_path, TRANSFORMER, POOLING, pooling={"embedding_dimension": 64, "pooling_mode": word})
    assert (spec_of(tmp_path).pooling, spec_of(tmp_path).activation) == (pooling, "none")


def test_joined_vectors_have_the_total_size_and_stay_joined(tmp_path: Path) -> None:
    write_config(tmp_path)
    both = {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}
    write_modules(tmp_path, TRANSFORMER, POOLING, pooling={"embedding_dimension": 64, **both})
    spec = spec_of(tmp_path)
    assert (spec.poolings, spec.size, spec.tasks) == (("cls", "last"), 128, ("embed",))
    with pytest.raises(ConfigError, match="because the model joins cls\\+last"):
        prepared(tmp_path, pooler_config={"pooling_type": "MEAN"})


def test_without_a_pooling_every_token_keeps_its_vector(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_modules(tmp_path, TRANSFORMER)
    assert (spec_of(tmp_path).tasks, spec_of(tmp_path).pooling) == (("token_embed",), "all")


def test_token_matching_follows_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(tmp_path)
    own = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    mask = {"type": "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask", "path": "4_Mask"}
    write_modules(tmp_path, TRANSFORMER, DENSE, NORMALIZE, mask)
    write_json(tmp_path / "2_Dense/config.json", {"in_features": 64, "out_features": 8} | own)
    write_json(tmp_path / "3_Normalize/config.json", own)
    write_json(
        tmp_path / "4_Mask/config.json", {"skiplist_words": ["!", "?"], "skiplist_tasks": ["document"]}
    )
    write_json(
        tmp_path / "sentence_bert_config.json", {"query_length": 32, "query_expansion": {"length": 32}}
    )
    about = {"similarity_fn_name": "meanmaxsim", "prompts": {"query": "[Q] ", "document": None}}
    write_json(tmp_path / "config_sentence_transformers.json", about)
    assert spec_of(tmp_path) == PoolingSpec(
        ("token_embed",),
        "all",
        8,
        activation="normalize",
        prompts=(("query", "[Q] "), ("document", "")),
        similarity="meanmaxsim",
        skipped_words=("!", "?"),
        side_lengths=(32, None),
        head=(HeadLayer("2_Dense/linear", 64, 8, activation="tanh"),),
    )
    assert "query expansion with mask tokens is not supported" in caplog.text


def test_pylate_token_settings_are_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_modules(tmp_path, TRANSFORMER)
    about = {
        "model_type": "ColBERT",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "document_length": 180,
    }
    about |= {"skiplist_words": ["."], "do_query_expansion": False, "similarity_fn_name": "MaxSim"}
    write_json(tmp_path / "config_sentence_transformers.json", about)
    spec = spec_of(tmp_path)
    assert (spec.prompts, spec.activation) == ((("query", "[Q] "), ("document", "[D] ")), "normalize")
    assert (spec.skipped_words, spec.side_lengths, spec.similarity) == ((".",), (None, 180), "maxsim")


@pytest.mark.parametrize(
    ("function", "num_labels", "activation"),
    [("Identity", 1, "none"), ("Identity", 3, "none"), ("Sigmoid", 1, "sigmoid"), ("Softmax", 3, "softmax")],
)
def test_cross_encoder_activation_is_read_beside_modules(
    function: str, num_labels: int, activation: str, tmp_path: Path
) -> None:
    write_config(tmp_path, "Qwen3ForSequenceClassification", num_labels=num_labels)
    write_modules(tmp_path, TRANSFORMER)
    write_json(tmp_path / "sentence_bert_config.json", {"transformer_task": "sequence-classification"})
    about = {"model_type": "CrossEncoder", "activation_fn": f"torch.nn.modules.activation.{function}"}
    write_json(tmp_path / "config_sentence_transformers.json", about)
    assert (spec_of(tmp_path).tasks, spec_of(tmp_path).activation) == (("classify",), activation)


@folded(("length", "expected"), [(90, 90), (1000, 256), (10**30, 256), (1e30, 256), (None, 256), ("x", 256)])
def test_text_length_defaults_to_that_of_the_tokenizer(length: Any, expected: int, tmp_path: Path) -> None:
    write_config(tmp_path)
    write_modules(tmp_path, TRANSFORMER, POOLING)
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": length})
    assert prepared(tmp_path).model.max_model_len == expected
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 80})
    assert prepared(tmp_path).model.max_model_len == 80


REFUSED_FILES: dict[str, tuple[str, Any, str]] = {
    "unknown-module": ("modules.json", [TRANSFORMER, {"type": "a.WordWeights", "path": ""}], "type"),
    "order": ("modules.json", [TRANSFORMER, NORMALIZE, POOLING], "must be a Transformer, then"),
    "no-list": ("modules.json", {}, "must hold a JSON list"),
    "outside": ("modules.json", [TRANSFORMER, POOLING | {"path": "../1_Pooling"}], "path must be"),
    "no-prompt": (
        "1_Pooling/config.json",
        {"pooling_mode": "weightedmean", "include_prompt": False},
        "include_prompt = false",
    ),
    "mode": ("1_Pooling/config.json", {"pooling_mode": ["cls", "median"]}, "pooling_mode"),
    "width": ("2_Dense/config.json", {"in_features": 63, "out_features": 8}, "in_features is 63"),
    "activation": (
        "2_Dense/config.json",
        {"in_features": 64, "out_features": 8, "activation_function": "a.B"},
        "activation_function",
    ),
    "residual": (
        "2_Dense/config.json",
        {"in_features": 64, "out_features": 8, "use_residual": True},
        "use_residual",
    ),
    "of-tokens": (
        "2_Dense/config.json",
        {"in_features": 64, "out_features": 8, "module_input_name": "token_embeddings"},
        "module_input_name",
    ),
    "norm-of-tokens": (
        "3_Normalize/config.json",
        {"module_output_name": "token_embeddings"},
        "module_output_name",
    ),
    "mask": (
        "modules.json",
        [TRANSFORMER, POOLING, {"type": "a.MultiVectorMask", "path": "4_Mask"}],
        "without a Pooling at most one MultiVectorMask",
    ),
    "task": ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task"),
    "chat": (
        "sentence_bert_config.json",
        {"modality_config": {"text": {}, "message": {"method": "forward"}}},
        "modality_config",
    ),
    "kwargs": ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs"),
    "cut": ("config_sentence_transformers.json", {"truncate_dim": 32}, "truncate_dim"),
    "lower": ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    "prompt": ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name"),
    "similarity": ("config_sentence_transformers.json", {"similarity_fn_name": "x"}, "similarity_fn_name"),
}


@folded("name", REFUSED_FILES)
def test_unsupported_module_is_refused_by_file_and_key(name: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    write_modules(tmp_path, TRANSFORMER, POOLING, DENSE, NORMALIZE)
    write_json(tmp_path / "2_Dense/config.json", {"in_features": 64, "out_features": 8})
    prepared(tmp_path)
    file, content, problem = REFUSED_FILES[name]
    write_json(tmp_path / file, content)
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as raised:
        prepared(tmp_path)
    assert problem in str(raised.value)
    assert file in str(raised.value)


ANSWER = {
    "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    "path": "1_LogitScore",
}
ANSWERS = {"true_token_id": 9, "false_token_id": 4}
SAYS = {"transformer_task": "text-generation", "modality_config": {"text": {}, "message": {"format": "flat"}}}


def write_answering(directory: Path, answers: dict[str, Any] = ANSWERS, **says: Any) -> None:
    write_modules(directory, TRANSFORMER, ANSWER)
    write_json(directory / "1_LogitScore/config.json", answers)
    write_json(directory / "sentence_bert_config.json", SAYS | says)


def test_language_model_scores_by_its_answer(tmp_path: Path) -> None:
    write_config(tmp_path)
    about = {"prompts": {"web": "Find."}, "default_prompt_name": "web", "activation_fn": "torch.nn.Identity"}
    write_json(tmp_path / "config_sentence_transformers.json", about)
    write_answering(tmp_path, processing_kwargs={"chat_template": {"add_generation_prompt": True}})
    spec = spec_of(tmp_path)
    assert (spec.tasks, spec.pooling, spec.size, spec.activation) == (("classify",), "last", 1, "none")
    assert spec.template_options == (("add_generation_prompt", True),)
    assert (spec.prompts, spec.default_prompt) == ((("web", "Find."),), "web")
    (head,) = spec.head
    assert (head.rows, head.activation) == ((4, 9), "excess")
    write_answering(tmp_path, {"true_token_id": 9, "false_token_id": None}, modality_config={"text": {}})
    spec = spec_of(tmp_path)
    assert (spec.head[0].rows, spec.head[0].activation, spec.template_options) == ((9,), "identity", None)
    assert spec_of(tmp_path, convert="embed").tasks[0] == "embed"
    assert prepared(tmp_path, runner="generate").pooling is None


@folded(
    ("answers", "says", "problem"),
    [
        ({"false_token_id": 4}, {}, "'true_token_id' is missing; it must be the id of a token"),
        ({"true_token_id": "yes"}, {}, "true_token_id"),
        ({"true_token_id": -1}, {}, "true_token_id"),
        ({"true_token_id": 264}, {}, "token id 264 is outside"),
        (ANSWERS | {"module_input_name": "logits"}, {}, "module_input_name"),
        (ANSWERS, {"transformer_task": "feature-extraction"}, "transformer_task"),
        (ANSWERS, {"processing_kwargs": {"text": {"padding": True}}}, "text"),
        (ANSWERS, {"processing_kwargs": {"chat_template": {"max_length": 8}}}, "max_length"),
        (ANSWERS, {"processing_kwargs": {"chat_template": 8}}, "chat_template"),
        (ANSWERS, {"modality_config": {"text": {}}, "processing_kwargs": {"text": {}}}, "processing_kwargs"),
    ],
)
def test_unsupported_answer_configs_are_refused(
    answers: dict[str, Any], says: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write_config(tmp_path)
    write_answering(tmp_path, answers, **says)
    with pytest.raises((ModelLoadError, UnsupportedModelError, ConfigError), match=problem):
        prepared(tmp_path)


def test_logit_score_of_a_classifier_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "Qwen3ForSequenceClassification")
    write_answering(tmp_path)
    with pytest.raises(ModelLoadError, match="LogitScore is for language models, not Qwen3ForSequence"):
        prepared(tmp_path)


@folded(
    ("args", "problem"),
    [
        ({"runner": "generate", "convert": "embed"}, "--convert embed is for pooling models"),
        ({"runner": "pooling", "convert": "none"}, "--convert is none"),
        ({"pooler_config": {"pooling": "MEAN"}}, "'pooling' is unknown; known are pooling_type"),
        ({"pooler_config": {"pooling_type": "SUM"}}, "pooling_type must be one of CLS, LAST"),
        ({"pooler_config": {"normalize": 1}}, "normalize must be true or false, got 1"),
        ({"pooler_config": {"returned_token_ids": [1]}}, "a list of classes, of which the model has 0"),
        ({"pooler_config": {"matryoshka_dimensions": [65]}}, "a list of sizes of 1 to 64"),
    ],
)
def test_options_that_do_not_fit_are_refused(args: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(write_config(tmp_path), **args)
    assert problem in str(raised.value)


def test_a_model_without_an_output_head_does_not_generate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Qwen3Model has no output head"):
        prepared(write_config(tmp_path, "Qwen3Model"), runner="generate")


def test_a_decoder_that_sees_both_ways_pools_and_takes_the_mean(tmp_path: Path) -> None:
    """As GTE-Qwen2 is published: a language model by name, whose attention is not causal."""
    config = prepared(write_config(tmp_path, is_causal=False))
    assert config.pooling is not None
    assert (config.model.runner, config.pooling.pooling) == ("pooling", "mean")
    assert not config.scheduler.enable_chunked_prefill
    assert not config.cache.enable_prefix_caching
    with pytest.raises(ConfigError, match="is_causal: false"):
        prepared(tmp_path, runner="generate")
    assert prepared(write_config(tmp_path, is_causal=True)).model.runner == "generate"


BERT = {"model_type": "bert", "layer_norm_eps": 1e-12}


def test_encoder_gets_the_head_of_the_convert_option(tmp_path: Path) -> None:
    config = prepared(write_config(tmp_path, "BertForMaskedLM", num_labels=3, **BERT), convert="classify")
    assert config.pooling is not None
    assert config.arch.head is not None
    assert (config.pooling.tasks, config.pooling.size) == (("classify",), config.arch.head.classes)
    assert config.pooling.pooling == config.arch.head.pooling == "cls"
    of_tokens = prepared(tmp_path, convert="reward")
    assert of_tokens.pooling is not None
    assert (of_tokens.pooling.tasks, of_tokens.pooling.activation) == (("token_classify",), "none")


def test_an_encoders_own_head_serves_rewards(tmp_path: Path) -> None:
    write_config(tmp_path, "BertForSequenceClassification", num_labels=1, **BERT)
    spec = spec_of(tmp_path, convert="reward")
    assert (spec.tasks, spec.pooling, spec.size) == (("classify",), "cls", 1)
    assert (spec.activation, spec_of(tmp_path).activation) == ("none", "sigmoid")


def test_an_encoder_without_such_a_form_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "Gemma3TextModel")
    with pytest.raises(ConfigError, match="quire does not serve Gemma3TextForSequenceClassification"):
        prepared(tmp_path, convert="classify")


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "none"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, "none"),
    ],
)
def test_classifier_activation_follows_the_config(
    options: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    spec = spec_of(write_config(tmp_path, "Qwen3ForSequenceClassification", **options))
    assert (spec.tasks, spec.pooling, spec.activation) == (("classify",), "last", activation)
    assert spec.is_cross_encoder == (options.get("num_labels") == 1)


def test_names_of_classes(tmp_path: Path) -> None:
    named = write_config(tmp_path, "Qwen3ForTokenClassification", id2label={"1": "PER", "0": "O"})
    assert spec_of(named).labels == ("O", "PER")
    assert spec_of(named).head == (HeadLayer("score", 64, 2),)
    with pytest.raises(ModelLoadError, match="id2label must name the classes 0 to 2"):
        prepared(write_config(tmp_path, "Qwen3ForTokenClassification", id2label={"1": "x"}, num_labels=3))


def test_rewards(tmp_path: Path) -> None:
    spec = spec_of(write_config(tmp_path, "Qwen3ForCausalLM", num_labels=1), convert="reward")
    assert (spec.tasks, spec.pooling, spec.activation) == (("token_classify",), "all", "none")
    assert spec.head == (HeadLayer("score", 64, 1, bias=False),)


@folded("tokens", [[], [264], [-1], ["a"], 3, [True]])
def test_tokens_that_the_output_head_has_not_are_refused(tokens: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"returned_token_ids must be a list of token ids in \[0, 263\]"):
        prepared(write_config(tmp_path), convert="reward", pooler_config={"returned_token_ids": tokens})


def test_head_with_scaled_logits_cannot_reward(tmp_path: Path) -> None:
    write_config(tmp_path, "Gemma2ForCausalLM")
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM scales them"):
        prepared(tmp_path, convert="reward", pooler_config={"returned_token_ids": [1]})


def test_every_form_of_every_language_model_is_its_row() -> None:
    for name, row in BUILT_IN.items():
        if row.pools:
            continue
        assert architecture_kind(name) == ArchitectureKind(name, "generate")
        stem = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        if stem != name and f"{stem}Model" not in BUILT_IN:
            assert architecture_kind(f"{stem}Model") == ArchitectureKind(name, "embed")
            assert architecture_kind(f"{stem}ForSequenceClassification") == ArchitectureKind(name, "classify")


def test_a_language_model_without_a_row_generates() -> None:
    for name in ("BertLMHeadModel", "CTRLLMHeadModel", "BioGptForCausalLM"):
        assert architecture_kind(name) == ArchitectureKind(name, "generate")


SPEC = PoolingSpec(("embed", "token_embed"), "last", 64, matryoshka=(16, 32))
CLASSES = PoolingSpec(("classify",), "last", 3)


@folded(
    ("spec", "params", "field"),
    [
        (SPEC, PoolingParams(task="classify"), "task"),
        (SPEC, PoolingParams(dimensions=17), "dimensions"),
        (CLASSES, PoolingParams(dimensions=2), "dimensions"),
        (PoolingSpec(("embed",), "last", 64, matryoshka=(0,)), PoolingParams(dimensions=65), "dimensions"),
        (SPEC, PoolingParams(returned_token_ids=[0]), "returned_token_ids"),
        (CLASSES, PoolingParams(returned_token_ids=[3]), "returned_token_ids"),
        (CLASSES, PoolingParams(step_tag_id=3), "step_tag_id"),
    ],
)
def test_a_request_that_the_model_cannot_answer_is_refused(
    spec: PoolingSpec, params: PoolingParams, field: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        spec.check(params)
    assert raised.value.param == field
    spec.check(PoolingParams())


def test_a_missing_head_is_named_at_start_up(tmp_path: Path) -> None:
    from tests.fixtures.pooled import pooling_core, write_model

    write_model("qwen3", tmp_path, "Qwen3Model")
    with pytest.raises(StartupError, match=r"tensor 'score\.weight' is in none of the files"):
        pooling_core(tmp_path, convert="classify")


def test_settling_needs_no_torch(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_modules(tmp_path, TRANSFORMER, POOLING)
    code = (
        "import sys; from quire.config import EngineConfig; from quire.engine.startup import prepare;"
        f"prepare(EngineConfig.from_args(device='cpu', model={json.dumps(str(tmp_path))}), 'server');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
