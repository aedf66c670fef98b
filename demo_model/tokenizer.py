# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of quire-demo and its chat template.

Every digit is one token, and a capitalized word never carries its leading space, so a name is copied token by
token wherever it stands.  The alphabet is all 256 bytes: every text encodes and decodes back to itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.data import dialogues
from demo_model.values import made_up

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK, END_THINK = "<think>", "</think>"
MARKUP = (THINK, END_THINK, "<tool_call>", "</tool_call>", "<tools>", "</tools>")
VOCAB_SIZE = 2304
WORDS = r"\p{N}| ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}+| ?[^\s\p{L}\p{N}]+|\s"

CHAT_TEMPLATE = """\
{%- macro text(content) %}
{%- if content is string %}{{- content }}
{%- elif content %}{%- for part in content %}{{- part.text }}{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- set start = namespace(at=0) %}
{%- if messages and messages[0].role == 'system' %}{%- set start.at = 1 %}{%- endif %}
{%- if tools or start.at %}
{{- '<|im_start|>system\\n' }}
{%- if start.at %}{{- text(messages[0].content) }}{%- endif %}
{%- if tools %}
{%- if start.at %}{{- '\\n\\n' }}{%- endif %}
{{- '# Tools\\nCall them as <tool_call>.\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[start.at:] %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role: ' ~ message.role) }}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}{%- endif %}
{{- text(message.content) }}
{%- if message.tool_calls %}
{%- for entry in message.tool_calls %}
{%- set call = entry.function if entry.function else entry %}
{%- if not loop.first or text(message.content) %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
"""


def corpus(seed: int, count: int) -> list[str]:
    """Texts to learn merges from: what people say, what the model says, tool definitions, made-up names."""
    rng, texts = random.Random(seed), []
    for item in itertools.islice(dialogues(seed), count):
        texts += [message["content"] for message in item.messages] + [made_up(rng)]
        texts += [json.dumps(tool) for tool in item.tools or []]
        texts += [
            json.dumps(call["function"])
            for message in item.messages
            for call in message.get("tool_calls", [])
        ]
        texts += [message["role"] for message in item.messages]
    return texts


def train_tokenizer(seed: int = 1, count: int = 12000) -> Tokenizer:
    """A byte-level BPE with the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, IM_START, IM_END]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - len(MARKUP), special_tokens=special,
                                  show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator(corpus(seed, count), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": IM_END, "pad_token": END_OF_TEXT,
              "bos_token": None, "unk_token": None, "model_max_length": 2048,
              "clean_up_tokenization_spaces": False,
              "add_bos_token": False, "add_eos_token": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    tokenizer = train_tokenizer()
    save(tokenizer, parser.parse_args().out)
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
