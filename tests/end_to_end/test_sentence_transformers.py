# SPDX-License-Identifier: Apache-2.0
"""Models that sentence-transformers wrote, beside itself: the same vectors, classes and scores of the same texts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire import LLM, TextOptions
from quire.errors import ValidationError
from tests.fixtures.sentence_models import (
    DECODERS,
    ENCODERS,
    LONGEST,
    write_answering,
    write_cross_encoder,
    write_embedder,
    write_multi_vector,
    write_sparse_encoder,
)
from tests.fixtures.tiny_encoders import TINY_ENCODERS

TOLERANCE = 1e-5
TEXTS = ["a", "Where do cows live?", "Straße, naïve, 東京.", "word " * 14, "A text that is too long. " * 9]
QUERY, DOCUMENTS = TEXTS[1], [TEXTS[0], TEXTS[2], "Cows live on farms, and in (some) towns!", TEXTS[4]]
CUT = TextOptions(truncate_prompt_tokens=-1)
pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(
        importlib.util.find_spec("sentence_transformers") is None,
        reason="sentence-transformers is not installed; make test-more does",
    ),
    pytest.mark.filterwarnings("ignore"),  # those of its libraries
]


@contextmanager
def serving(directory: Path) -> Iterator[LLM]:
    llm = LLM(str(directory / "model"), device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 21)
    yield llm
    llm.shutdown()


def vectors(llm: LLM, texts: Sequence[str] = TEXTS, **options: Any) -> np.ndarray:
    named = TextOptions(truncate_prompt_tokens=-1, **options)
    outputs = llm.embed(list(texts), options=named, use_tqdm=False)
    return np.array([one.outputs.embedding for one in outputs])


def assert_close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0.0, atol=TOLERANCE)


def pooled(*modes: str, **options: Any) -> Any:
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    return lambda model: (Pooling(model.get_embedding_dimension(), modes, **options), Normalize())


def test_every_family_is_tested() -> None:
    families = {name.partition("-")[0] for name in TINY_ENCODERS}
    assert families == {name.partition("-")[0] for name in ENCODERS}


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_an_embedder_of_each_family(name: str, tmp_path: Path) -> None:
    theirs = write_embedder(name, tmp_path, pooled("lasttoken" if name in DECODERS else "mean"))
    with serving(tmp_path) as llm:
        assert llm.llm_engine.config.model.max_model_len == LONGEST
        assert_close(vectors(llm), theirs.encode(TEXTS))


@pytest.mark.parametrize(
    "modes", ["cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", "mean+cls"]
)
def test_each_way_of_pooling_with_layers_behind(modes: str, tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    def behind(model: Any) -> list[Any]:
        pooling = Pooling(model.get_embedding_dimension(), modes.split("+"))
        width = pooling.pooling_output_dimension
        return [pooling, Dense(width, 40), Dense(40, 24, activation_function=nn.GELU()), Normalize()]

    theirs = write_embedder("bert", tmp_path, behind)
    with serving(tmp_path) as llm:
        assert_close(vectors(llm), theirs.encode(TEXTS))


def test_prompts_and_similarity(tmp_path: Path) -> None:
    prompts = {"query": "find: ", "document": "title: none | "}
    theirs = write_embedder(
        "bert",
        tmp_path,
        pooled("mean", include_prompt=False),
        prompts=prompts,
        default_prompt_name="document",
        similarity_fn_name="dot",
    )
    with serving(tmp_path) as llm:
        assert_close(vectors(llm), theirs.encode(TEXTS))
        assert_close(vectors(llm, prompt_name="query"), theirs.encode(TEXTS, prompt_name="query"))
        queries, documents = theirs.encode_query([QUERY]), theirs.encode_document(DOCUMENTS)
        expected = theirs.similarity(queries, documents)[0]
        assert_close(scores(llm), expected)


def scores(llm: LLM, **options: Any) -> list[float]:
    found = llm.score(QUERY, DOCUMENTS, options=CUT, use_tqdm=False, **options)
    return [one.outputs.score for one in found]


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "distilbert"])
def test_a_cross_encoder(name: str, tmp_path: Path) -> None:
    theirs = write_cross_encoder(name, tmp_path, num_labels=1)
    pairs = [(QUERY, one) for one in DOCUMENTS]
    with serving(tmp_path) as llm:
        assert_close(scores(llm), theirs.predict(pairs))
        plain = theirs.predict(pairs, activation_fn=nn.Identity())
        assert_close(scores(llm, use_activation=False), plain)


@pytest.mark.parametrize(
    ("name", "class_name", "options"),
    [
        ("qwen2", "Qwen2ForCausalLM", {"true_token_id": 200, "false_token_id": 7}),
        ("qwen3", "Qwen3ForCausalLM", {"true_token_id": 200}),
        ("qwen3", "Qwen3ForCausalLM", {"true_token_id": 200, "has_template": False}),
        (
            "mistral",
            "MistralForCausalLM",
            {
                "true_token_id": 9,
                "processing_kwargs": {"chat_template": {"add_generation_prompt": True, "instruction": "?"}},
            },
        ),
        (
            "llama",
            "LlamaForCausalLM",
            {
                "true_token_id": 5,
                "false_token_id": 200,
                "prompts": {"web": "Find an answer.", "code": "Find code."},
                "default_prompt_name": "web",
            },
        ),
    ],
)
def test_language_model_scores_by_answer_logits(
    name: str, class_name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = write_answering(name, class_name, tmp_path, **options)
    documents = DOCUMENTS[:-1]
    pairs = [(QUERY, one) for one in documents]
    with serving(tmp_path) as llm:
        for extra in ({}, {"prompt_name": "code"}) if "prompts" in options else ({},):
            found = llm.score(QUERY, documents, options=TextOptions(**extra), use_tqdm=False)
            assert_close([one.outputs.score for one in found], theirs.predict(pairs, **extra))
        plain = llm.score(QUERY, documents, use_activation=False, use_tqdm=False)
        expected = theirs.predict(pairs, activation_fn=nn.Identity())
        assert_close([one.outputs.score for one in plain], expected)


def test_cross_encoder_prompt_precedes_the_first_text(tmp_path: Path) -> None:
    theirs = write_cross_encoder(
        "bert", tmp_path, num_labels=1, prompts={"web": "Find: "}, default_prompt_name="web"
    )
    with serving(tmp_path) as llm:
        assert_close(scores(llm), theirs.predict([(QUERY, one) for one in DOCUMENTS]))


def test_truncation_cuts_the_document_and_not_the_template(tmp_path: Path) -> None:
    write_answering("llama", "LlamaForCausalLM", tmp_path, true_token_id=5)
    document = "abcdefgh" * 10
    with serving(tmp_path) as llm:
        (whole,) = llm.score("q", document[:30], use_tqdm=False)
        most = TextOptions(truncate_prompt_tokens=len(whole.prompt_token_ids))
        assert llm.score("q", document, options=most, use_tqdm=False)[0].outputs == whole.outputs
        each = TextOptions(max_tokens_per_text=(None, 30))
        assert llm.score("q", document, options=each, use_tqdm=False)[0].outputs == whole.outputs
        for most in range(len(whole.prompt_token_ids) - 20, len(whole.prompt_token_ids)):
            (cut,) = llm.score("q", "東京 naïve " * 9, options=TextOptions(most), use_tqdm=False)
            assert len(cut.prompt_token_ids) <= most, "also where half a character is left"
        with pytest.raises(ValidationError, match="no room for the second text"):
            llm.score("q", document, options=TextOptions(truncate_prompt_tokens=9), use_tqdm=False)


@pytest.mark.parametrize("function", [None, nn.Softmax()])
def test_a_cross_encoder_of_several_classes(function: Any, tmp_path: Path) -> None:
    theirs = write_cross_encoder("bert", tmp_path, num_labels=3, activation_fn=function)
    pairs = [{"prompt": QUERY, "second_prompt": one} for one in DOCUMENTS]
    with serving(tmp_path) as llm:
        found = llm.classify(pairs, options=CUT, use_tqdm=False)
        expected = theirs.predict([(QUERY, one) for one in DOCUMENTS])
        assert_close([one.outputs.probs for one in found], expected)


def matched(**mask: Any) -> Any:
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    def behind(model: Any) -> list[Any]:
        torch.manual_seed(0)
        width, name = model.get_embedding_dimension(), "token_embeddings"
        layer = Dense(width, 16, bias=False, activation_function=nn.Identity(), module_input_name=name)
        return [layer, Normalize(module_input_name=name), MultiVectorMask(**mask)]

    return behind


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_late_interaction(name: str, similarity: str, tmp_path: Path) -> None:
    theirs = write_multi_vector(
        name,
        tmp_path,
        matched(skiplist_words=["!", "(", ")", "."]),
        prompts={"query": "[Q] ", "document": "[D] "},
        similarity_fn_name=similarity,
        lengths={"query_length": 12, "document_length": 30},
    )
    with serving(tmp_path) as llm:
        queries, documents = theirs.encode_query([QUERY]), theirs.encode_document(DOCUMENTS)
        np.testing.assert_allclose(scores(llm), theirs.similarity(queries, documents)[0], rtol=1e-5)
        options = TextOptions(prompt_name="query", truncate_prompt_tokens=12)
        (tokens,) = llm.encode([QUERY], pooling_task="token_embed", options=options, use_tqdm=False)
        assert_close(tokens.outputs.data, queries[0])


def test_pylate_model_matches_sentence_transformers(tmp_path: Path) -> None:
    """As sentence-transformers reads it: no module says that vectors have the length 1, or what is matched."""
    write_multi_vector("bert", tmp_path, matched())
    model = tmp_path / "model"
    modules = json.loads((model / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (model / "modules.json").write_text(json.dumps(modules))
    about = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 16}
    about |= {"document_length": 40, "do_query_expansion": False, "similarity_fn_name": "MaxSim"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(about))

    from sentence_transformers import MultiVectorEncoder

    theirs = MultiVectorEncoder(str(model), device="cpu")
    with serving(tmp_path) as llm:
        queries, documents = theirs.encode_query([QUERY]), theirs.encode_document(DOCUMENTS)
        np.testing.assert_allclose(scores(llm), theirs.similarity(queries, documents)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert-mlm", {}),
        ("camembert-mlm", {}),
        ("distilbert-mlm", {"activation_function": "log1p_relu"}),
        ("modernbert-mlm", {}),
        ("roberta-mlm", {"pooling_strategy": "sum"}),
        ("xlm-roberta-mlm", {"pooling_strategy": "sum", "activation_function": "log1p_relu"}),
    ],
)
def test_a_sparse_encoder(name: str, options: dict[str, str], tmp_path: Path) -> None:
    theirs = write_sparse_encoder(name, tmp_path, **options)
    expected = theirs.encode(TEXTS, convert_to_sparse_tensor=False)
    with serving(tmp_path) as llm:
        found = vectors(llm)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=TOLERANCE)  # sums are large
        assert 0 < (found > 0).mean() < 1, "weights of some words"
        similar = theirs.similarity(expected[1:2], theirs.encode(DOCUMENTS).to_dense())[0]
        np.testing.assert_allclose(scores(llm), similar, rtol=1e-5)
        (output,) = llm.encode(TEXTS[1], use_tqdm=False)
        weights = output.lexical_weights()
        assert weights == {index: weight for index, weight in enumerate(found[1].tolist()) if weight > 0}
