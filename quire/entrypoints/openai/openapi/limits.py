"""What a request's fields may be beyond their types: ranges that `SamplingParams` checks, and those of one server.

A rule is a field's name, and for each JSON type that it may have the keywords that narrow it. A schema may name another
rule than that of its field in `x-rule`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.pooling import PoolingSpec
from quire.engine.input_processor import MAX_SALT_CHARS
from quire.sampling_extras import MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS
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
    "stop_sequences": "stop",
    "tokens": "stop_token_ids",
}
"""Other fields under the rule of the one on the right."""
STOP: Rule = {
    "string": {"minLength": 1, "maxLength": MAX_STOP_CHARS},
    "array": {"maxItems": MAX_STOP_STRINGS},
}
LOGIT_BIAS: Rule = {
    "object": {"propertyNames": {"pattern": "^[0-9]{1,19}$"}},
    "number": {"minimum": -100, "maximum": 100},
}


@dataclass(frozen=True)
class Limits:
    """What one server takes.

    Args:
        max_logprobs: below 0: there is no limit.
        has_priorities: whether a request may have another priority than 0.
        idle_fields: names of fields that mean nothing here, and may hold anything.
        rejects_unknown: whether fields without effect are refused.
    """

    model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    has_priorities: bool
    max_tools: int
    idle_fields: frozenset[str]
    rejects_unknown: bool
    pooling: PoolingSpec | None = None

    @classmethod
    def of(cls, server: ServerState) -> Limits:
        """Those that the engine has settled by now."""
        config = server.engine.config
        scheduler = config.scheduler
        return cls(
            server.served_names,
            config.arch.vocab_size,
            config.model.max_model_len,
            config.model.max_logprobs,
            scheduler.scheduling_policy == "priority" or bool(scheduler.scheduler_cls),
            server.config.max_tools,
            server.idle_fields,
            server.config.unknown_fields == "reject",
            config.pooling,
        )

    def rules(self) -> dict[str, Rule]:
        """By name of the field."""
        rules: dict[str, Rule] = {name: _number(low, high) for name, (low, high) in RANGES.items()}
        rules["top_k"] = _number(-1, RANGES["top_k"][1])  # as 0, all
        rules["max_tokens"] = _number(1, self.max_model_len)
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
        rules["thinking_token_budget"] = _number(-1, sys.maxsize)
        rules["length_penalty"] = _number(-10, 10)
        rules["logit_bias"] = LOGIT_BIAS
        rules["tools"] = {"array": {"maxItems": self.max_tools}}
        rules["cache_salt"] = {"string": {"minLength": 1, "maxLength": MAX_SALT_CHARS}}
        rules["model"] = {"string": {"enum": [*self.model_names, ""]}}
        tagged = [f"{name}:latest" for name in self.model_names]
        rules["tagged_model"] = {"string": {"enum": [*self.model_names, *tagged]}}
        if self.pooling is not None:
            rules |= _pooling_rules(self.pooling)
        if not self.has_priorities:
            rules["priority"] = _number(0, 0)
        return rules


def _pooling_rules(spec: PoolingSpec) -> dict[str, Rule]:
    sizes = _number(1, spec.size) if 0 in spec.matryoshka else _one_of({*spec.matryoshka, spec.size})
    return {
        "dimensions": sizes,
        "output_dimension": sizes,
        "task": {"string": {"enum": list(spec.tasks)}},
        "prompt_name": {"string": {"enum": ["", *(name for name, _ in spec.prompts)]}},
    }


def _one_of(values: Iterable[int]) -> Rule:
    return {"integer": {"enum": sorted(values)}}


def _number(low: float, high: float) -> Rule:
    """Of whole numbers and others; a low that is the next to 0 is no part of the range itself."""
    keywords: Schema = {"exclusiveMinimum": 0} if 0 < low < sys.float_info.min else {"minimum": low}
    if not math.isinf(high):
        keywords["maximum"] = high
    return {"integer": keywords, "number": keywords}


def narrow(schema: Schema, rule: Rule) -> Schema:
    """The schema of a field under its rule, whichever of its forms is the value's."""
    narrowed = {**schema, **rule.get(str(schema.get("type")), {})}
    if "anyOf" in schema:
        narrowed["anyOf"] = [narrow(one, rule) for one in schema["anyOf"]]
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            narrowed[inner] = narrow(schema[inner], rule)
    return narrowed
