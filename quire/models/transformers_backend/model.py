# SPDX-License-Identifier: Apache-2.0
"""Causal language model of transformers with our layers in place of its modules.

transformers' code defines the computation; attention, linear layers, norms and activations are ours. It runs on one row
with all the step's tokens, which only attention may separate; that is tested before the first request.

Shapes: T tokens of the step, N rows whose logits are wanted, H hidden size, V vocabulary rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError, UnsupportedModelError
from quire.layers.base import Layer, activation_dtype, device_type
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.transformers_backend import experts, sites
from quire.models.transformers_backend.hosted import AdapterContext, HostedLinear
from quire.models.transformers_backend.plan import ShardingPlan
from quire.models.transformers_backend.rows import check_rows_are_apart, position_offset
from quire.models.transformers_backend.sites import put_positions, put_rotary_tables, replace_modules
from quire.models.transformers_backend.tensors import compute_buffers

_NOTED_ROWS = 64
"""Enough rows that hardly any expert gets all of them."""


class TransformersForCausalLM(CausalLM):
    """Model that runs the class of transformers named in config.json.

    Raises:
        UnsupportedModelError: it computes something unsupported; the message says what.
    """

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        with _naming(config):
            model = _build(config)
            backbone = model.base_model
            heads = [
                name for name, module in model.named_modules() if module is model.get_output_embeddings()
            ]
            self._port = sites.give_port(model)
            compute_buffers(model)
            put_rotary_tables(model, config)
            plan = ShardingPlan.of(model)
            seen = sites.find_sites(model, backbone, self._port, config, plan)
            self._places = replace_modules(model, config, plan, seen.unused)
            put_positions(model, self._port)
        self._adapting = AdapterContext()
        for layer in self._hosted(model):
            layer.adapting = self._adapting
        self._first_position = 0
        self._padding_idx = model.config.pad_token_id
        setattr(model, model.base_model_prefix, _PrecomputedBackbone(seen.kind, _wrapped(backbone)))
        self.backbone = backbone
        self.head = model
        self.lm_head = self._places.head
        self.base_prefix = f"{model.base_model_prefix}."
        self.unused = (
            r"\.rotary_emb\.inv_freq$",
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *(f"^{name}$" for name in model.all_tied_weights_keys or ()),
            *(rf"^{name}\." for name in heads if config.pooling is not None),
        )

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        with self._port.during(positions, step), self._adapting.during(step.adapter_rows):
            return self._run(inputs, positions)

    def _run(self, inputs: Tensor, positions: Tensor | None) -> Tensor:
        kind = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        if positions is not None and self._first_position:
            positions = positions + self._first_position
        numbers = None if positions is None else positions[None]
        with self._port.numbering(positions):
            hidden: Tensor = self.backbone(
                **{kind: inputs[None]}, position_ids=numbers, use_cache=False
            ).last_hidden_state
        return hidden[0]

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        with self._adapting.during(adapter_rows):
            logits: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def check_plan(self, option: str) -> None:
        """See `HasPlan`."""
        if self._places.why_whole is not None:
            raise ConfigError(
                f"{option}: {self.config.arch.architecture} of transformers cannot be sharded over ranks: "
                f"{self._places.why_whole}"
            )

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        return iter(self._places.loaded)

    def adapter_layers(self) -> Iterator[tuple[list[str], list[str], Layer]]:
        """Yield adapter layers; a module of transformers whose checkpoint is split has one adapter."""
        for names, layer in self._places.loaded:
            own = [layer.name] if layer.name else names
            yield own, names if len(names) == 1 else own, layer

    @staticmethod
    def _hosted(model: nn.Module) -> list[HostedLinear]:
        return [module for module in model.modules() if isinstance(module, HostedLinear)]

    def _find_adaptable(self) -> None:
        """Enable adapters on layers that are called with all rows, and not with some of a token's or of several."""
        count = min(_NOTED_ROWS, self.config.arch.vocab_size - 3)
        ids = torch.arange(3, 3 + count)
        with self._adapting.noting() as seen:
            hidden = self._run(ids, torch.arange(count) % self._num_positions())
            if self.config.pooling is None:
                self.compute_logits(hidden)
        for layer in self._hosted(self):
            layer.takes_adapters = {*seen.get(layer, ())} == {count}

    def _num_positions(self) -> int:
        arch, model = self.config.arch, self.config.model
        return model.max_model_len or arch.max_position_embeddings - self._first_position

    def loaded(self) -> None:
        config, padding_idx = self.config, self._padding_idx
        device = torch.device(device_type(config))
        with _naming(config), self._port.doing(sites.own_value), torch.inference_mode(), device:
            try:
                self._first_position = position_offset(self._run, config, padding_idx)
                check_rows_are_apart(self._run, config, padding_idx, self._first_position)
                hidden = self._run(torch.tensor([3]), torch.tensor([0]))
                if config.pooling is None:
                    self.compute_logits(hidden)
                if config.serves_adapters:
                    self._find_adaptable()
            except QuireError:
                raise
            except Exception as error:
                raise UnsupportedModelError(f"it does not run with layers of ours: {error!r}") from error


@contextmanager
def _naming(config: EngineConfig) -> Iterator[None]:
    """Name the model in errors."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{config.arch.architecture} of transformers: {error}") from error


def _wrapped(backbone: nn.Module) -> frozenset[str]:
    """Return the names of nested backbones, such as a decoder."""
    return frozenset(name for name, child in backbone.named_children() if isinstance(child, PreTrainedModel))


class _PrecomputedBackbone(nn.Module):
    """Replacement of the backbone that returns given hidden states, so that the code around it computes logits of any
    rows.

    It also replaces nested backbones, for code that calls them directly.
    """

    def __init__(self, kind: type[ModelOutput], wrapped: frozenset[str]) -> None:
        super().__init__()
        self._kind = kind
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_wrapped", ()):
            return self
        return super().__getattr__(name)

    def forward(self, input_ids: None = None, inputs_embeds: Tensor | None = None, **_: Any) -> ModelOutput:
        return self._kind(last_hidden_state=inputs_embeds)


def _build(config: EngineConfig) -> PreTrainedModel:
    """Build the model with transformers, on the meta device."""
    arch = config.arch
    model_cls = getattr(transformers, arch.architecture, None)
    if not (isinstance(model_cls, type) and issubclass(model_cls, PreTrainedModel)):
        raise UnsupportedModelError("the installed version does not offer it")
    assert model_cls.config_class is not None, "models that can be made have one"
    theirs = model_cls.config_class.from_dict(json.loads(arch.foreign_config))
    if theirs.is_encoder_decoder:
        raise UnsupportedModelError("it has an encoder")
    try:
        model = model_cls._from_config(
            theirs,
            attn_implementation=sites.NAME,
            experts_implementation=experts.RUN_WITHOUT_DATA,
            dtype=activation_dtype(config),
        ).eval()
    except Exception as error:
        raise UnsupportedModelError(f"it cannot be built with attention of ours: {error!r}") from error
    num_rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if num_rows is None:
        raise UnsupportedModelError("it has no one embedding of tokens")
    if num_rows != arch.vocab_size:
        raise UnsupportedModelError(f"it embeds {num_rows} tokens, and config.json says {arch.vocab_size}")
    return model
