# SPDX-License-Identifier: Apache-2.0
"""BERT in GGUF against transformers, from texts to embeddings."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from transformers import BertConfig, BertModel

from quire import LLM
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.checkpoint import read_model_config
from quire.models.gguf.tokenizer import SPACE
from tests.fixtures.gguf_models import finish
from tests.models.gguf.test_model import bare

NAMED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "capital", "of", "france", "is", "paris")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_bert(path: Path, kind: Kind, pooling: gguf.PoolingType | None) -> BertModel:
    """Write a random model; return it with the numbers that the file's bytes stand for."""
    torch.manual_seed(0)
    tokens = [*NAMED, *(SPACE + word for word in WORDS), "s"]
    model = BertModel(
        BertConfig(vocab_size=len(tokens), max_position_embeddings=40, initializer_range=0.2, **SIZES)
    ).eval()
    writer = GGUFWriter(path, "bert")
    writer.add_context_length(40)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in NAMED else TokenType.NORMAL for token in tokens])
    writer.add_token_type_count(2)
    for key, index in {"unknown": 1, "bos": 2, "seperator": 3}.items():  # as converters write it now
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", index)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2)
    for name, tensor in model.state_dict().items():
        if name.startswith("pooler"):
            continue
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        is_matrix = tensor.dim() == 2 and "position" not in name and "token_type" not in name
        own = kind if is_matrix else Kind.F32
        stored = gguf.quants.quantize(tensor.numpy(), own)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(stored, own)))
        writer.add_tensor(called, stored, raw_dtype=own)
    finish(writer)
    return model


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("pooling", [gguf.PoolingType.MEAN, gguf.PoolingType.CLS], ids=lambda each: each.name)
def test_gguf_bert_embeds_as_transformers(kind: Kind, pooling: gguf.PoolingType, tmp_path: Path) -> None:
    oracle = write_bert(tmp_path / "x.gguf", kind, pooling)
    exact = {} if kind == Kind.F32 else {"quantization_config": {"mode": "precise"}}
    llm = LLM(str(tmp_path / "x.gguf"), dtype="float32", **exact)
    texts = {"the capitals of france": [2, 5, 6, 11, 7, 8, 3], "is Paris ?": [2, 9, 10, 1, 3]}
    outputs = llm.embed(list(texts), use_tqdm=False)
    for output, ids in zip(outputs, texts.values(), strict=True):
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            states = oracle(torch.tensor([ids])).last_hidden_state[0]
        expected = states.mean(0) if pooling == gguf.PoolingType.MEAN else states[0]
        found = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(found, expected / expected.norm(), rtol=0.0, atol=1e-5)


def test_gguf_bert_that_ranks_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path / "x.gguf", Kind.F32, gguf.PoolingType.RANK)
    with pytest.raises(UnsupportedModelError, match="pooling_type = 4 is not supported"):
        read_model_config(tmp_path / "x.gguf", {})


def test_gguf_bert_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tensor 'token_types\.weight' is missing"):
        read_model_config(bare(tmp_path / "x.gguf", "bert"), {})
