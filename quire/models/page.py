"""Writes docs/models.md from the table of architectures: `python -m quire.models.page [FILE]`.

Invariant: the page says only what the table and these sentences say; a test compares.
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
from quire.models.transformers_backend.known import REFUSED, RUN

PAGE = Path("docs/models.md")
SPEEDS = Path("benchmarks/results/families.json")
"""What `python -m benchmarks.families --record` measured; without it the page has no speeds."""

INTRODUCTION = """\
# Models

This page is generated: `python -m quire.models.page`.

quire serves a Hugging Face model if `architectures` in its config.json names one of the {count} below, and its weights
are safetensors; [many others](#any-other) run with transformers' code.
The class decides, not the maker: many models of many makers are Llamas. Names of models are examples.
Options that would change what is computed and that quire does not do are refused at start-up, all in one sentence.

For every architecture the tests make a small checkpoint with random weights, biases and norms, and hold that

- logits are within 1e-4, in float32, of the model in the last column, whole and in chunks of 1 to 7 tokens
  (`tests/models/test_parity.py`);
- greedy tokens are that model's, with chunked prefill, prefix hits, preemption and decoding from tapes
  (`tests/end_to_end/test_families.py`, `tests/worker/test_taped_forward.py`);
- tokens and logprobs are the same bits however requests are batched (`tests/end_to_end/test_determinism.py`);
- weights load as float32, bfloat16, int8 and int4, and cut in two for two ranks (`tests/models/test_shards.py`).

`make test` holds the first for all and the rest for some, `make test-more` for some that have between them every kind
of part, `make test-every` for all.

All are batched, computed in chunks, found in the prefix cache, decoded from tapes, quantised while they load and served
with [adapters](lora.md#limits), and cut for [ranks and stages](parallelism.md).
"""

MEASURED = """
Speed: tokens per second of one request and of a prompt of 512, on {threads} threads of {machine}, {date}, by `python -m
benchmarks.families`, with random weights in bfloat16, so many billions of them, in sizes of no published model. It
tells what a family's layers cost beside another's; of experts only some are read for each token.
"""

ALSO = """
Files as their makers published them may have other names for the same: """

ENCODERS = """
## Encoders

They see a text in both directions, compute it whole, in one step with others, and keep nothing of it: no KV cache. Each
is served alone, with the head of a classifier of texts or of tokens, and with one that guesses masked tokens, which is
left out, and is cut for ranks and stages as others are. Hidden states and scores are within 1e-5, in float32, of the
class in transformers, and the same bits however texts are batched (`tests/models/test_encoders.py`).

| architectures | models |
|---|---|
"""

MULTIMODAL = """
## Of models that see or hear

Of a checkpoint that takes more than text, the language model is served: config.json's `text_config` is read as the
config of a model above, weights of other parts are left out, and the log says so. Requests with images, sound or video
are refused. For texts, logits are within 1e-4 of the whole model's (`tests/models/test_multimodal.py`).

| architecture | models | left out |
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
  the next free id, with a warning. Templates see all special tokens by name. What tokenizer.json contradicts
  (`add_bos_token`, `add_prefix_space`) or what is not done (`clean_up_tokenization_spaces` outside of BPE and
  WordPiece) is warned of.
- generation_config.json gives eos tokens, temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens;
  other keys by which transformers changes what is generated (`do_sample: false`, `num_beams` ...) are warned of.
- Files of a checkpoint must be regular files (or links to them), JSON and templates of at most 64 MiB, tokenizer.json
  of 512.
- What stretches positions (`rope_scaling`): linear, dynamic, llama3, yarn, longrope. Where config.json has
  `rope_parameters` as well, a `rope_scaling` that is not empty decides, with the theta of whichever has one. In
  `--hf-overrides` either key replaces both, and `rope_theta` replaces that of the file wherever it stands;
  `text_config` is merged into the file's, every other key replaces the file's.
- Falcon 1B's linear biases are computed in float32. transformers rounds them to bfloat16, which shows after 256 tokens.
- QWen (2023) contexts end at `seq_length`: beyond it the model would rescale queries by the length of the prompt.
- TeleChat's end at `training_seqlen`, for the same reason.
- gpt-oss's experts may be floats, MXFP4, in lists (bitsandbytes) or one by one in [any form](quantized_checkpoints.md).
- Llama 4 has one expert for each token.
- Gemma 3n's MLPs are of one size in all layers.
- The files decide whether the output head is the token embedding: a stored head that differs from it is used, and the
  log says so if config.json calls it tied; an equal one is left out; where only one of the two is stored and
  config.json says tied, beside `text_config` or inside it, it serves as both. A head that is neither stored nor tied
  is an error.
- Keys of config.json that may change what is computed and that nothing reads are named in the log, those of
  `--hf-overrides` in a warning.
- Weights are read from the file or index that `transformers_weights` names, else model.safetensors, else the index,
  else all `*.safetensors`. Experts may be stacked as transformers computes them (`experts.gate_up_proj`) where the
  other names are the published ones. The config of an adapter beside the model is named in a warning and not applied.
- MiniCPM 4 is computed without its sparse attention, and refused if config.json asks for that.
- Layers that guess the token after the next (MTP) are left out, but for [`mtp`](speculative.md), which reads those of
  DeepSeek-V3, GLM 4.5, MiMo, Qwen3-Next and Qwen 3.5.
- Latent attention (DeepSeek and others) keeps its cache in float32, bfloat16 or float16, not in int8 or fp8.
- Encoders' positions are learned or rotated; NomicBERT's texts end at the 2048 tokens that it was trained on, and Jina
  embeddings v3 is served without its adapters. Norms may be called gamma and beta, as in BERT's own checkpoints. A
  `...ForMaskedLM` without modules.json gives embeddings of hidden states, and the log says that its head is left out.
- Gemma's activation is the tanh form of GELU also where an early checkpoint says "gelu".
- JetMoE's attention reads the projections of all its experts in each step.
- Not there, and refused: RWKV 4 to 6, xLSTM and Zaya.

## Any other

With transformers installed (`pip install 'quire-llm[hf]'`), a causal language model that has no row here runs with its
code, on quire's attention and KV cache, and with its matrices packed (and with `--quantization` quantised), experts
included: batching, chunked prefill and prefix caching are those of every model. `--model-impl transformers` asks for
that also where there is a row, `--model-impl quire` forbids it. Nothing of it is remote code: what the installed
version does not define is unknown.

Before the first request the model is run without data, which shows what attends and how, and on a few tokens. Refused
then, with the reason: attention that is not called through transformers' interface, that hands over a mask or biases,
or that looks ahead; encoders; a layer of which two tokens know without attention (convolutions, states); checkpoints
whose tensors are computed into the model's and not copied.

`tests/models/test_transformers_backend.py` tries every causal language model of transformers that has no row. These
run, with logits within 1e-4 of transformers' own, whole and in chunks: {run}.

These are refused:

| why | architectures |
|---|---|
{refused}
- It is somewhat slower than a row of the table, by torch between kernels: on a CPU steps of one token for each request
  are recorded where the model computes nothing but tensors from tensors, on a GPU there are no graphs.
- Rows have the same bits in every batch where all that mixes the elements of a row is quire's. A module of its own
  that multiplies or sums otherwise, such as a sigmoid router, may make the last bit depend on the batch.
- What is neither matrix nor norm is kept in the precision of activations.
- Several [ranks](parallelism.md) share a model by the plan that transformers has for its modules, `base_model_tp_plan`:
  heads, with their keys and values, and features of MLPs and of packed experts. Ranks divide the key-value heads.
  Without a plan, or with one that cuts no matrix of ours, they are refused, as are stages and `--tp-invariant`.
- config.json must name the sizes (`vocab_size`, `hidden_size`, layers, `max_position_embeddings`); what is
  left to defaults of transformers can be given with `--hf-overrides`.

To add an architecture: [CONTRIBUTING.md](../CONTRIBUTING.md); to add one from a package: [plugins.md](plugins.md).
"""


def models_page() -> str:
    """The page."""
    encoders = "".join(f"| {_architectures(family)} | {family.models} |\n" for family in ENCODER_FAMILIES)
    wrappers = "".join(
        f"| `{row.architecture}` | {row.models} | {_others(row)} |\n" for row in WRAPPERS.values()
    )
    start = INTRODUCTION.format(count=len(BUILT_IN)) + _table() + ALSO + _also_called()
    run = ", ".join(f"`{name}`" for name in RUN)
    notes = NOTES.format(run=run, refused=_refused())
    return start + MULTIMODAL + wrappers + ENCODERS + encoders + notes


def _table() -> str:
    """Every architecture, with its speed if that was measured."""
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
    """A row for each reason."""
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
