# SPDX-License-Identifier: Apache-2.0
"""Calibration: the float model, run over texts to collect statistics of its layers' inputs.

Texts become sequences of token ids: a file is plain text, split into sequences. If its name ends in .jsonl, each line
is a sequence: {"messages": [...]}, rendered by the model's chat template (or joined by newlines without one), or
{"text": ...}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.config import ASSETS, EngineConfig
from quire.engine.tokenizer import Tokenizer
from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ConfigError
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import KVCacheConfig, RecurrentStateSpec, fit_states
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.layers.linear import Linear
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.progress import tracked
from quire.quantize.inputs import InputStatistics, watched
from quire.worker.input_batch import BlockTable
from quire.worker.inputs import group_metadata

_BLOCK_SIZE = 16


class CalibrationSet:
    """Loaded model and the sequences of token ids that it runs over, one at a time."""

    def __init__(self, config: EngineConfig, sequences: Sequence[Sequence[int]]) -> None:
        self._model = load_model(config)
        self._sequences = sequences
        self._layers = {tuple(names): layer for names, layer in self._model.checkpoint_layers()}
        self._tables = _bound_tables(self._model, max(map(len, sequences)))

    def inputs_of(
        self, modules: Sequence[tuple[str, ...]], what: str
    ) -> Mapping[tuple[str, ...], InputStatistics]:
        """Return input statistics of the layers that hold these modules; layers that no text reached have no entry."""
        layers = {self._linear(names): names for names in modules}
        with watched(layers) as found, torch.no_grad():
            for ids in tracked(self._sequences, what, "sequences"):
                self._run(torch.tensor(ids))
        return {layers[layer]: statistics for layer, statistics in found.items()}

    def replace(self, modules: tuple[str, ...], tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights of the layer that holds these modules by their `tensors`."""
        layer = self._linear(modules)
        bias = layer.bias
        layer.create_weights(layer.method)
        for name, slot in layer.slots(modules):
            if name in tensors:
                slot.fill(tensors[name].to(slot.target.dtype)[slot.source.box])
        layer.finish_loading()
        layer.bias = bias

    def _linear(self, modules: tuple[str, ...]) -> Linear:
        layer = self._layers[modules]
        assert isinstance(layer, Linear), modules
        return layer

    def _run(self, ids: Tensor) -> None:
        count = len(ids)
        groups = tuple(
            group_metadata(
                table,
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([count], dtype=torch.int32),
                block_tables=torch.tensor(table.gather(np.array([0]), count)),
                slots=torch.tensor(table.slots(np.zeros(count, dtype=np.int64), np.arange(count))),
                max_query_len=count,
                max_seq_len=count,
            )
            for table in self._tables
        )
        self._model(ids, torch.arange(count), StepContext(groups))


def _bound_tables(model: CausalLM, longest: int) -> list[BlockTable]:
    """Bind a KV cache for one sequence to the model; return the block table of each group of layers."""
    specs = fit_states(kv_cache_specs(model))
    has_states = any(isinstance(spec, RecurrentStateSpec) for spec in specs.values())
    groups = group_layers(specs, _BLOCK_SIZE, hybrid=has_states)
    counts = [group.spec.num_blocks(longest) for group in groups]
    kv_config = KVCacheConfig(sum(counts) + 1, groups, specs)
    bind_kv_cache(model, kv_config, allocate_kv_cache(kv_config, torch.device("cpu")))
    tables, first = [], 1
    for group, count in zip(groups, counts, strict=True):
        table = BlockTable(1, longest, group.spec, kv_config.num_blocks, kv_config.parts_per_block(group))
        table.append(0, list(range(first, first + count)), 0)
        tables.append(table)
        first += count
    return tables


CHATS = ASSETS / "calibration.jsonl"
"""Chats of the kind that the bundled models were trained on."""
GENERAL = ASSETS / "calibration.txt"
"""Prose, dialogue, code, tables and a few languages: about 2,500 tokens, for any other model."""


def read_sequences(path: Path, tokenizer: Tokenizer, count: int, length: int) -> list[Sequence[int]]:
    """Return the first `count` sequences of at most `length` tokens each.

    Raises:
        ConfigError: the file cannot be read, holds something else, or nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        template = None if tokenizer.chat_template is None else ChatTemplate.from_tokenizer(tokenizer)
        found = [
            tokenizer.encode(each, add_special_tokens=False)[:length] for each in _lines(path, text, template)
        ]
    else:
        ids = tokenizer.encode(text, allow_special=False)
        found = [ids[start : start + length] for start in range(0, len(ids), length)]
    sequences: list[Sequence[int]] = [each for each in found[:count] if each]
    if not sequences:
        raise ConfigError(f"--calibration {path} holds no text")
    return sequences


def _lines(path: Path, text: str, template: ChatTemplate | None) -> Iterator[str]:
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--calibration {path}: entry {number} is no JSON: {error}") from error
        entry = _text_of(value, template)
        if entry is None:
            raise ConfigError(f'--calibration {path}: entry {number} has neither "messages" nor "text"')
        yield entry


def _text_of(value: Any, template: ChatTemplate | None) -> str | None:
    if not isinstance(value, dict):
        return None
    text, messages = value.get("text"), value.get("messages")
    if isinstance(text, str):
        return text
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("content"), str) for each in messages
    ):
        return None
    if template is None:
        return "\n".join(each["content"] for each in messages)
    return template.render(messages, add_generation_prompt=False)
