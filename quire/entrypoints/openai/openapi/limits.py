# SPDX-License-Identifier: Apache-2.0
"""Ranges of request fields beyond their types: those of `SamplingParams`, and of one server's options and tasks.

A rule maps each JSON type of a field to keywords that narrow it. Rules are named like fields; a schema may name another
rule in `x-rule`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.pooling import CLASS_TASKS, TOKEN_TASKS, PoolingSpec
from quire.engine.input_processor import MAX_SALT_CHARS
from quire.entrypoints.chat.template import OWN_VARIABLES
from quire.entrypoints.openai.protocol.media_shapes import EMBEDS
from quire.entrypoints.openai.protocol.relations import asks_nothing, both, either, has
from quire.entrypoints.openai.protocol.shapes import INCLUDED_LOGPROBS
from quire.sampling_extras import (
    MAX_BAD_WORDS,
    MAX_DRY_BREAKER_CHARS,
    MAX_DRY_BREAKERS,
    MAX_LOGPROB_TOKEN_IDS,
)
from quire.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS, RANGES

if TYPE_CHECKING:
    from quire.entrypoints.openai.state import ServerState


Schema = dict[str, Any]
Rule = Mapping[str, Schema]
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "top_logprobs": "logprobs",
    "best_of": "n",
    "repeat_penalty": "repetition_penalty",
    "penalty_last_n": "repeat_last_n",
    "stop_sequences": "stop",
    "tokens": "stop_token_ids",
}  # Fields that share the rule of another field.
STOP: Rule = {
    "string": {"minLength": 1, "maxLength": MAX_STOP_CHARS},
    "array": {"maxItems": MAX_STOP_STRINGS},
}
NEVER: Schema = {"not": {}}
MAX_DIGITS = 19  # Digits of a token id that is an object's key.


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server.

    Args:
        max_logprobs: below 0: unlimited.
        has_priorities: whether a request may have a priority other than 0.
        idle_fields: fields without meaning here, which may hold anything.
        rejects_unknown: whether fields without effect are rejected.
        fills_in: whether the model supports fill-in-the-middle.
        has_processors: whether a processor reads `vllm_xargs`.
        template_variables: variables that the chat template reads.
        media: kinds of media that the model takes, and "embeds" if these may stand for one.
    """

    model_names: tuple[str, ...]
    vocab_size: int
    max_logprobs: int
    has_priorities: bool
    max_tools: int
    idle_fields: frozenset[str]
    rejects_unknown: bool
    pooling: PoolingSpec | None = None
    fills_in: bool = False
    has_processors: bool = False
    template_variables: frozenset[str] = frozenset()
    media: frozenset[str] = frozenset()

    @classmethod
    def from_server(cls, server: ServerState) -> ServerLimits:
        """Return the current limits of a server."""
        config = server.engine.config
        scheduler = config.scheduler
        taken = {EMBEDS} if config.multimodal.enable_mm_embeds else set()
        return cls(
            server.served_names,
            config.arch.vocab_size,
            config.model.max_logprobs,
            scheduler.scheduling_policy == "priority" or bool(scheduler.scheduler_cls),
            server.config.max_tools,
            server.idle_fields,
            server.config.unknown_fields == "reject",
            config.pooling,
            server.form.fills_in,
            server.engine.input_processor.reads_extra_args,
            frozenset(server.form.chat_template.variables if server.form.has_chat else ()),
            frozenset(server.media.input_modalities) - {"text"} | taken,
        )

    def rules(self) -> dict[str, Rule]:
        """Return the rules by field name."""
        rules: dict[str, Rule] = {name: _number(low, high) for name, (low, high) in RANGES.items()}
        rules["top_k"] = _number(-1, RANGES["top_k"][1])  # as 0, all
        rules["completion_max_tokens"] = _number(0, sys.maxsize)
        rules["logprobs"] = rules["prompt_logprobs"] = (
            _number(-1, sys.maxsize) if self.max_logprobs < 0 else _number(0, self.max_logprobs)
        )
        rules["stop"] = STOP
        token_ids = rules["stop_token_ids"] = _number(0, self.vocab_size - 1)
        rules |= {other: rules[name] for other, name in OTHER_NAMES.items()}
        rules["prompt"] = token_ids
        rules["allowed_token_ids"] = {**token_ids, "array": {"minItems": 1}}
        rules["logprob_token_ids"] = {
            **token_ids,
            "array": {"minItems": 1, "maxItems": MAX_LOGPROB_TOKEN_IDS},
        }
        rules["bad_words"] = {"string": {"pattern": r"\S"}, "array": {"maxItems": MAX_BAD_WORDS}}
        rules["dry_sequence_breakers"] = {
            "string": {"minLength": 1, "maxLength": MAX_DRY_BREAKER_CHARS},
            "array": {"maxItems": MAX_DRY_BREAKERS},
        }
        rules["thinking_token_budget"] = _number(-1, sys.maxsize)
        rules["length_penalty"] = _number(-10, 10)
        rules["logit_bias"] = {
            "object": {
                "propertyNames": {
                    "pattern": f"^0*({_digits_below(self.vocab_size)})$",
                    "maxLength": MAX_DIGITS,
                }
            },
            "number": {"minimum": -100, "maximum": 100},
        }
        rules["tools"] = {"array": {"maxItems": self.max_tools}}
        rules["cache_salt"] = {"string": {"minLength": 1, "maxLength": MAX_SALT_CHARS}}
        rules["model"] = {"string": {"enum": [*self.model_names, ""]}}
        tagged = [f"{name}:latest" for name in self.model_names]
        rules["tagged_model"] = {"string": {"enum": [*self.model_names, *tagged]}}
        if self.pooling is not None:
            rules |= pooling_rules(self.pooling)
        rules |= self._unsupported_rules()
        return rules | self._strict_rules() if self.rejects_unknown else rules

    def _unsupported_rules(self) -> dict[str, Rule]:
        """Return rules for fields that this model or engine does not support."""
        rules: dict[str, Rule] = {}
        if not self.has_priorities:
            rules["priority"] = _number(0, 0)
        if not self.fills_in:
            rules["suffix"] = {"string": {"maxLength": 0}}
            rules["input_suffix"] = {"string": NEVER}
        if "documents" not in self.template_variables:
            rules["documents_of_chats"] = {"array": NEVER}
        if not self.has_processors:
            rules["vllm_xargs"] = {"object": {"maxProperties": 0}}
        return rules

    def _strict_rules(self) -> dict[str, Rule]:
        """Return rules for template options that are not read and unsupported `include` values (`chat_prompt`)."""
        options = sorted(self.template_variables - OWN_VARIABLES)
        rules: dict[str, Rule] = {
            "chat_template_kwargs": {
                "object": {"propertyNames": {"enum": options}} if options else {"maxProperties": 0}
            },
            "include": {"string": {"enum": [INCLUDED_LOGPROBS]}},
        }
        thinks = "enable_thinking" in options
        if not thinks:
            rules |= {
                "enable_thinking": {"boolean": NEVER},
                "thinking": {"object": NEVER},
                "think": {"boolean": NEVER},
            }
        if not thinks and "reasoning_effort" not in options:
            rules |= {"reasoning_effort": {"string": NEVER}, "effort": {"string": NEVER}}
            rules["think"] = {"boolean": NEVER, "string": NEVER}
        return rules

    def relations(self) -> dict[str, tuple[Schema, ...]]:
        """Return by request model the relations between fields that depend on the server."""
        return {} if self.pooling is None else pooling_relations(self.pooling)


def _digits_below(end: int) -> str:
    """Return a pattern for the numbers 0 to `end` - 1, without leading zeros."""
    last = str(end - 1)
    forms = [f"[1-9][0-9]{{{count - 1}}}" for count in range(1, len(last))]
    for place, digit in enumerate(last):  # equal to the bound so far, and below it here
        low = int(place == 0)
        if int(digit) > low:
            forms.append(f"{last[:place]}[{low}-{int(digit) - 1}][0-9]{{{len(last) - place - 1}}}")
    return "|".join(["0", *forms, last])


def _number(low: float, high: float) -> Rule:
    """Return the rule of a numeric range; a `low` next to 0 is exclusive."""
    keywords: Schema = {"exclusiveMinimum": 0} if 0 < low < sys.float_info.min else {"minimum": low}
    if not math.isinf(high):
        keywords["maximum"] = high
    return {"integer": keywords, "number": keywords}


def narrow(schema: Schema, rule: Rule) -> Schema:
    """Return a field's schema narrowed by its rule, in every alternative."""
    narrowed = {**schema, **rule.get(str(schema.get("type")), {})}
    if "anyOf" in schema:
        narrowed["anyOf"] = [narrow(one, rule) for one in schema["anyOf"]]
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            narrowed[inner] = narrow(schema[inner], rule)
    return narrowed


def pooling_rules(spec: PoolingSpec) -> dict[str, dict[str, Schema]]:
    """Return the rules by field name, as in `Limits`."""
    allowed: Schema = (
        {"minimum": 1, "maximum": spec.size}
        if 0 in spec.matryoshka
        else {"enum": sorted({*spec.matryoshka, spec.size})}
    )
    return {
        "dimensions": {"integer": allowed},
        "output_dimension": {"integer": allowed},
        "task": {"string": {"enum": list(spec.tasks)}},
        "prompt_name": {"string": {"enum": ["", *(name for name, _ in spec.prompts)]}},
    }


def pooling_relations(spec: PoolingSpec) -> dict[str, tuple[Schema, ...]]:
    """Return relations by request model: fields that only some tasks allow (`PoolingSpec.check`, `embeddings.pool`)."""
    return {"PoolingRequest": (either(*(_of_task(spec, task) for task in spec.tasks)),)}


def _of_task(spec: PoolingSpec, task: str) -> Schema:
    named = asks_nothing("task", task) if task == spec.tasks[0] else has("task", {"const": task})
    limits = [named]
    if task in TOKEN_TASKS:
        limits.append(asks_nothing("encoding_format", "float"))
    if task in CLASS_TASKS:
        limits += [asks_nothing("dimensions"), _classes_below(spec.size_of(task))]
    else:
        limits.append(asks_nothing("returned_token_ids"))
    if spec.pooling != "step":
        limits.append(asks_nothing("step_tag_id"))
    return both(*limits)


def _classes_below(end: int) -> Schema:
    return {"properties": {"returned_token_ids": {"items": {"maximum": end - 1}}}}
