# SPDX-License-Identifier: Apache-2.0
"""Generator of docs/models.md from the table of architectures: `python -m tools.models_page [FILE]`.

Invariant: the page is a function of the table and the text here; a test compares. The tests also build and run each
architecture of transformers named here, and check that there are no others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.models.built_in import (
    ALSO_CALLED,
    BUILT_IN,
    ENCODER_FAMILIES,
    TRANSFORMERS,
    BuiltIn,
    EncoderFamily,
)
from quire.models.multimodal import WRAPPERS, Wrapper

PAGE = Path("docs/models.md")
SPEEDS = Path("benchmarks/results/families.json")
"""Results of `python -m benchmarks.families --record`; without the file the page has no speeds."""

_OWN = "it has its own attention code, outside transformers' attention interface"
_CHOOSES = "it selects the tokens to attend to from data"
_BIASES = "its attention adds biases to scores other than a mask"
_KINDS = "it has attention, or layers, of a kind that the KV cache does not support"
_STATES = "it mixes tokens without attention, by convolutions or states"
_PARTS = "it is multimodal, or consists of several models"
_OTHER_WAYS = "its decoder has cross-attention, or is not declared causal"
_DATA = "its control flow depends on tensor data"
_COMPUTED = "its checkpoints store tensors that are converted on loading, or under several names"

RUN: tuple[str, ...] = (
    "AriaTextForCausalLM",
    "AXK1ForCausalLM",
    "BartForCausalLM",
    "BeamForCausalLM",
    "BertGenerationDecoder",
    "BertLMHeadModel",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "BlenderbotForCausalLM",
    "BlenderbotSmallForCausalLM",
    "CamembertForCausalLM",
    "Cohere2MoeForCausalLM",
    "CohereCompassForCausalLM",
    "CTRLLMHeadModel",
    "Data2VecTextForCausalLM",
    "ElectraForCausalLM",
    "ErnieForCausalLM",
    "FlintForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteSWAForCausalLM",
    "HYV3ForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "LongcatFlashForCausalLM",
    "MarianForCausalLM",
    "MBartForCausalLM",
    "MellumForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "ModernBertDecoderForCausalLM",
    "PegasusForCausalLM",
    "PLBartForCausalLM",
    "RobertaForCausalLM",
    "RobertaPreLayerNormForCausalLM",
    "RoCBertForCausalLM",
    "WhisperForCausalLM",
    "XLMRobertaForCausalLM",
    "XLMRobertaXLForCausalLM",
)
"""Architectures of transformers without a row in `BUILT_IN` that run with its code, in alphabetical order."""

REFUSED: dict[str, str] = {
    "AXK2ForCausalLM": _CHOOSES,
    "BigBirdForCausalLM": _OWN,
    "BigBirdPegasusForCausalLM": _OTHER_WAYS,
    "BltForCausalLM": _PARTS,
    "CpmAntForCausalLM": _BIASES,
    "DeepseekV32ForCausalLM": _CHOOSES,
    "DeepseekV4ForCausalLM": _KINDS,
    "DogeForCausalLM": _BIASES,
    "Dots3NoteForCausalLM": _CHOOSES,
    "Emu3ForCausalLM": _PARTS,
    "FuyuForCausalLM": _PARTS,
    "Gemma4AssistantForCausalLM": _PARTS,
    "Gemma4UnifiedAssistantForCausalLM": _PARTS,
    "Gemma4UnifiedForConditionalGeneration": _PARTS,
    "GitForCausalLM": _PARTS,
    "GlmMoeDsaForCausalLM": _CHOOSES,
    "GPTNeoXJapaneseForCausalLM": _OWN,
    "HrmTextForCausalLM": _COMPUTED,
    "HYV4ForCausalLM": _CHOOSES,
    "Inkling2ForCausalLM": _BIASES,
    "InklingForCausalLM": _BIASES,
    "Lfm3ForCausalLM": _STATES,
    "MegatronBertForCausalLM": _OWN,
    "MllamaForCausalLM": _PARTS,
    "MoshiForCausalLM": _PARTS,
    "MossTranscribeDiarizeForConditionalGeneration": _PARTS,
    "MusicgenForCausalLM": _PARTS,
    "MusicgenMelodyForCausalLM": _PARTS,
    "MvpForCausalLM": _OWN,
    "OpenAIGPTLMHeadModel": _OWN,
    "ProphetNetForCausalLM": _OTHER_WAYS,
    "Qwen4ExpForCausalLM": _OWN,
    "ReformerModelWithLMHead": _OWN,
    "RemBertForCausalLM": _OWN,
    "RoFormerForCausalLM": _OWN,
    "RwkvForCausalLM": _STATES,
    "TrOCRForCausalLM": _OWN,
    "XLMWithLMHeadModel": _OWN,
    "XLNetLMHeadModel": _OTHER_WAYS,
    "xLSTMForCausalLM": _STATES,
    "XmodForCausalLM": _DATA,
    "ZambaForCausalLM": _COMPUTED,
    "ZayaForCausalLM": _KINDS,
}
"""Architecture of transformers without a row in `BUILT_IN` -> why it is refused, for users; in alphabetical order."""

INTRODUCTION = """\
# Models

This page is generated: `python -m tools.models_page`.

quire serves a Hugging Face model if `architectures` in its config.json names one of the {count} below, and its weights
are safetensors; [many others](#any-other) run with transformers' code.
The architecture decides, not the publisher: many models of many publishers are Llamas. Model names are examples.
Unsupported options that would change the computation are refused at start-up, all in one message.

For every architecture the tests create a small checkpoint with random weights, biases and norms, and check that

- logits are within 1e-4, in float32, of the reference in the last column, whole and in chunks of 1 to 7 tokens
  (`tests/models/test_parity.py`);
- greedy tokens equal the reference's, with chunked prefill, prefix hits, preemption and recorded decode steps
  (`tests/end_to_end/test_families.py`, `tests/worker/test_recorded_forward.py`);
- tokens and logprobs have the same bits in any batch (`tests/end_to_end/test_determinism.py`);
- weights load as float32, bfloat16, int8 and int4, and sharded over two ranks (`tests/models/test_shards.py`).

`make test` checks the first for all and the rest for some, `make test-more` for a selection that covers every kind of
layer, `make test-every` for all.

All support batching, chunked prefill, prefix caching, recorded decode steps, quantization at load time,
[adapters](lora.md#limits), and [tensor and pipeline parallelism](parallelism.md).
"""

MEASURED = """
Speed: tokens per second of one request and of a prompt of 512, on {threads} threads of {machine}, {date}, by `python -m
benchmarks.families`, with random weights in bfloat16, that many billions of them, in sizes of no published model. It
compares the costs of the families' layers; only some experts are read for each token.
"""

ALSO = """
Published files may use other names: """

ENCODERS = """
## Encoders

Encoders are bidirectional, compute a text in one step, batched with others, and have no KV cache. Each is served
without a head or with a classifier of texts or tokens; a masked-language-model head is skipped. They support tensor and
pipeline parallelism. Hidden states and scores are within 1e-5, in float32, of the class in transformers, and have the
same bits in any batch (`tests/models/test_encoders.py`).

| architectures | models |
|---|---|
"""

MULTIMODAL = """
## Multimodal models

The language model of a multimodal checkpoint is read from config.json's `text_config` as a model above. The encoders
of the families in [images](multimodal.md) and [speech](speech.md) are served beside it; those of others are skipped,
which the log says, and their requests are text. So it is for all with `--language-model-only`. For text, logits are
within 1e-4 of the whole model's (`tests/models/test_multimodal.py`).

| architecture | models | other parts |
|---|---|---|
"""

NOTES = """
## Limits

- Tokenizers: a tokenizer.json, or one that transformers converts without code of the checkpoint; for
  `tokenizer.model` it needs the packages sentencepiece and protobuf, for `tekken.json` mistral-common, for
  `tiktoken.model` tiktoken. ChatGLM, QWen (2023), Baichuan and PLaMo 2 as published have neither; name a converted one
  with `--tokenizer`.
- Added and special tokens beside tokenizer.json are read in the order of transformers: `added_tokens_decoder` of
  tokenizer_config.json, else added_tokens.json, with special_tokens_map.json before the names in tokenizer_config.json.
  Their ids must follow the vocabulary; one that is another token's is refused. A special token in no vocabulary gets
  the next free id, with a warning. Templates get all special tokens by name. Settings that contradict tokenizer.json
  (`add_bos_token`, `add_prefix_space`) or are not supported (`clean_up_tokenization_spaces` outside of BPE and
  WordPiece) cause a warning.
- generation_config.json gives eos tokens, temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens;
  other keys with which transformers changes its output (`do_sample: false`, `num_beams` ...) cause a warning.
- Files of a checkpoint must be regular files (or links to them), JSON and templates of at most 64 MiB, tokenizer.json
  of 512.
- Rope scaling (`rope_scaling`): linear, dynamic, llama3, yarn, longrope. If config.json has `rope_parameters` as well,
  a non-empty `rope_scaling` decides, with the theta of whichever has one. In
  `--hf-overrides` either key replaces both, and `rope_theta` replaces that of the file wherever it stands;
  `text_config` is merged into the file's, every other key replaces the file's.
- Falcon 1B's linear biases are computed in float32. transformers rounds them to bfloat16, which shows after 256 tokens.
- QWen (2023) contexts end at `seq_length`: beyond it the model would rescale queries by the length of the prompt.
- TeleChat's contexts end at `training_seqlen`, for the same reason.
- gpt-oss's experts may be floats, MXFP4, in lists (bitsandbytes) or one by one in [any form](quantized_checkpoints.md).
- Llama 4 supports one routed expert per token.
- Gemma 3n's MLPs must have the same size in all layers.
- Gemma 4's experts are called one by one, as no kernel has their activation; `--enable-lora` and
  `--enable-expert-parallel` are refused for a model with them. `use_bidirectional_attention` is null or `"vision"`.
- The files decide whether the output head is tied to the token embedding: a stored head that differs from it is used,
  and logged if config.json says tied; an equal one is skipped; if only one of the two is stored and config.json says
  tied, beside `text_config` or inside it, it serves as both. A head that is neither stored nor tied is an error.
- Unread keys of config.json that may change the computation are logged, those of `--hf-overrides` as a warning.
- Weights are read from the file or index that `transformers_weights` names, else model.safetensors, else the index,
  else all `*.safetensors`. Experts may be stacked as transformers computes them (`experts.gate_up_proj`) while
  the other names are the published ones. An adapter's config beside the model causes a warning and is not applied.
- MiniCPM 4 runs without its sparse attention, and is refused if config.json requires it.
- Multi-token prediction (MTP) layers are skipped, except for [`mtp`](speculative.md), which uses those of
  DeepSeek-V3, GLM 4.5, MiMo, Qwen3-Next and Qwen 3.5.
- The cache of latent attention (DeepSeek and others) is float32, bfloat16 or float16, not int8 or fp8.
- Encoders' positions are learned or rotated; NomicBERT's texts end at its 2048 training positions, and Jina
  embeddings v3 is served without its adapters. Norms may be called gamma and beta, as in BERT's own checkpoints. A
  `...ForMaskedLM` without modules.json gives embeddings of hidden states, and the log says that its head is skipped.
- Gemma's activation is the tanh form of GELU, even if an early checkpoint says "gelu".
- JetMoE's attention reads the projections of all its experts in each step.
- Not supported: RWKV 4 to 6, xLSTM and Zaya.

## Any other

With transformers installed (`pip install 'quire-llm[hf]'`), a causal language model that has no row here runs with its
code, on quire's attention and KV cache, and with its linear layers packed (and with `--quantization` quantized),
experts included: batching, chunked prefill and prefix caching work as for every model. `--model-impl transformers`
selects this even if there is a row, `--model-impl quire` forbids it. Remote code is never run: only models that the
installed version defines are supported.

Before the first request the model is run without data, which shows its attention modules, and on a few tokens. Refused,
with the reason, are: attention that is not called through transformers' interface, that passes a mask or biases, or
that is not causal; encoders; layers that mix tokens without attention (convolutions, states); checkpoints whose tensors
are converted and not copied into the model's.

`tests/models/test_transformers_backend.py` tries every causal language model of transformers that has no row. These
run, with logits within 1e-4 of transformers' own, whole and in chunks: {run}.

These are refused:

| why | architectures |
|---|---|
{refused}
- It is somewhat slower than a row of the table, because torch runs between kernels: on a CPU, decode steps are recorded
  if the model only computes tensors from tensors; on a GPU there are no graphs.
- Rows have the same bits in every batch if only quire's layers mix the elements of a row. A module of the model that
  multiplies or sums by itself, such as a sigmoid router, may make the last bit depend on the batch.
- Tensors other than linear weights and norms are kept in the activations' dtype.
- Several [ranks](parallelism.md) shard a model by transformers' plan for its modules, `base_model_tp_plan`: heads, with
  their keys and values, and features of MLPs and of packed experts. Ranks must divide the key-value heads.
  Without a plan, or with one that shards other modules, they are refused, as are stages and `--tp-invariant`.
- config.json must have the sizes (`vocab_size`, `hidden_size`, layers, `max_position_embeddings`); defaults of
  transformers can be given with `--hf-overrides`.

To add an architecture: [CONTRIBUTING.md](../CONTRIBUTING.md); to add one from a package: [plugins.md](plugins.md).
"""


def models_page() -> str:
    """Return the page."""
    encoders = "".join(f"| {_architectures(family)} | {family.models} |\n" for family in ENCODER_FAMILIES)
    wrappers = "".join(
        f"| `{row.architecture}` | {row.models} | {_others(row)} |\n" for row in WRAPPERS.values()
    )
    start = INTRODUCTION.format(count=len(BUILT_IN)) + _table() + ALSO + _also_called()
    run = ", ".join(f"`{name}`" for name in RUN)
    notes = NOTES.format(run=run, refused=_refused())
    return start + MULTIMODAL + wrappers + ENCODERS + encoders + notes


def _table() -> str:
    """Return the table of architectures, with measured speeds if there are any."""
    measured = json.loads(SPEEDS.read_text()) if SPEEDS.exists() else None
    columns = ["architecture", "models", "logits are those of"]
    columns += [] if measured is None else ["10⁹ weights", "decode", "prompt"]
    lines = ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in BUILT_IN.values():
        cells = [f"`{row.architecture}`", row.models, _oracle(row)]
        cells += [] if measured is None else _speed(row, measured)
        lines.append("| " + " | ".join(cells) + " |")
    return ("" if measured is None else MEASURED.format(**measured)) + "\n".join(lines) + "\n"


def _speed(row: BuiltIn, measured: Mapping[str, Any]) -> list[str]:
    found = measured["speeds"].get(row.architecture)
    return ["-"] * 3 if found is None else [f"{found[0]:.2f}", f"{found[1]:.0f}", f"{found[2]:.0f}"]


def _refused() -> str:
    """Return a table row per reason of refusal."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    return "".join(f"| {reason} | {', '.join(names)} |\n" for reason, names in by_reason.items())


def _also_called() -> str:
    return ", ".join(f"`{name}` for `{row}`" for name, row in ALSO_CALLED.items()) + ".\n"


def _architectures(family: EncoderFamily) -> str:
    return ", ".join(f"`{row.architecture}`" for row in family.rows())


def _others(row: Wrapper) -> str:
    return ", ".join(f"`{name}`" for name in row.others)


def _oracle(row: BuiltIn) -> str:
    return "its class in transformers" if row.oracle == TRANSFORMERS else row.oracle


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(models_page())
