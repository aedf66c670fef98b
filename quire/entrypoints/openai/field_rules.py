# SPDX-License-Identifier: Apache-2.0
"""Rules of fields in requests: what is supported, and what is refused with a reason.

No field is dropped silently. A field that would change the answer and is not supported is rejected unless its value is
neutral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.entrypoints.openai.protocol.requests import CustomTool, OfferedTool, StreamOptions, ToolFunction
from quire.errors import ValidationError

# Not supported, but rejected together with the message part that contains them.
MEDIA = frozenset(
    {"image_url", "input_image", "input_audio", "audio_url", "video_url", "input_video", "file"}
)


@dataclass(frozen=True)
class RejectedField:
    """Rule of an unsupported field: its neutral values, and the reason why others are rejected."""

    neutral: tuple[Any, ...] = ()
    why: str = "is not supported"

    def check(self, name: str, value: Any) -> None:
        """Raise ValidationError unless the value is neutral."""
        for neutral in self.neutral:
            if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
                return
        allowed = " or ".join(["null", *map(repr, self.neutral)])
        raise ValidationError(f"{name} {self.why}; leave it out or send {allowed}", param=name)


def reject_unless(*neutral: Any) -> RejectedField:
    return RejectedField(neutral)


@dataclass(frozen=True)
class FieldRules:
    """Rules of an object in a request: supported fields, rejected ones, and rules of inner objects.

    `empty` names fields in which null is a value and not an absent field.
    """

    honored: frozenset[str]
    refused: Mapping[str, RejectedField] = field(default_factory=dict)
    inner: Mapping[str, FieldRules] = field(default_factory=dict)
    empty: frozenset[str] = frozenset()


REFUSED: Mapping[str, RejectedField] = {
    "add_special_tokens": reject_unless(False),
    "audio": reject_unless(),
    "bad_words": reject_unless([]),
    "best_of": reject_unless(1),
    "chat_template": RejectedField(why="is for the operator to choose (--chat-template)"),
    "early_stopping": reject_unless(False),
    "ebnf": reject_unless(),
    "content": RejectedField(why="is no field of this request"),
    "echo": reject_unless(False),
    "extra_body": reject_unless({}),
    "function_call": reject_unless("none"),
    "functions": reject_unless([]),
    "grammar": reject_unless(""),
    "guided_choice": reject_unless(),
    "guided_grammar": reject_unless(),
    "guided_json": reject_unless(),
    "guided_regex": reject_unless(),
    "include_reasoning": reject_unless(True),
    "json_schema": reject_unless(),
    "kv_transfer_params": RejectedField(
        ({},), "needs an engine with --kv-transfer-config, and a request for text"
    ),
    "length_penalty": reject_unless(1.0),
    "logits_processors": reject_unless([]),
    "logprob_token_ids": reject_unless(),
    "messages": RejectedField(why="is no field of this request"),
    "modalities": reject_unless(["text"]),
    "normalize": RejectedField(why="is called use_activation"),
    "prompt": RejectedField(why="is no field of this request"),
    "prompt_embeds": reject_unless(),
    "regex": reject_unless(),
    "repetition_detection": reject_unless(),
    "response_format": reject_unless({"type": "text"}),
    "return_tokens_as_token_ids": reject_unless(False),
    "spaces_between_special_tokens": reject_unless(True),
    "structured_outputs": reject_unless(),
    "suffix": RejectedField(("",), why="is for completions of fill-in-the-middle models"),
    "thinking_token_budget": reject_unless(),
    "tool_choice": reject_unless("none", "auto"),
    "tools": reject_unless([]),
    "truncation_side": reject_unless("left"),
    "use_beam_search": reject_unless(False),
    "vllm_xargs": reject_unless({}),
    "web_search_options": reject_unless(),
}  # Unsupported fields of all requests; a request kind that supports one has it in its model.


def renamed_to(name: str, *neutral: Any) -> RejectedField:
    return RejectedField(neutral, f"is not supported, but {name} is")


def unsupported_sampler(*neutral: Any) -> RejectedField:
    there = "top_k, top_p, min_p, typical_p, top_n_sigma, xtc_probability, dry_multiplier, dynatemp_range and mirostat"
    return RejectedField(neutral, f"is not supported; samplers here are {there}")


REFUSED_SAMPLERS: Mapping[str, RejectedField] = {
    "adaptive_target": unsupported_sampler(-1, 0),
    "bad_words_ids": renamed_to("bad_words", []),
    "forced_bos_token_id": unsupported_sampler(),
    "forced_eos_token_id": unsupported_sampler(),
    "freq_pen": renamed_to("frequency_penalty", 0),
    "penalize_nl": unsupported_sampler(False),
    "pres_pen": renamed_to("presence_penalty", 0),
    "sequence_bias": renamed_to("logit_bias", {}),
    "suppress_tokens": renamed_to("logit_bias", []),
    "top_nsigma": renamed_to("top_n_sigma", 0, -1),
    "xtc_prob": renamed_to("xtc_probability", 0),
    "allowed_token_ids": reject_unless(),
    "ban_eos_token": renamed_to("ignore_eos", False),
    "banned_strings": renamed_to("bad_words", []),
    "banned_tokens": renamed_to("logit_bias", [], ""),
    "cfg_scale": reject_unless(1),
    "custom_token_bans": renamed_to("logit_bias", ""),
    "do_sample": renamed_to("temperature 0 for greedy decoding", True),
    "dry_range": renamed_to("dry_penalty_last_n"),
    "dynamic_temperature": renamed_to("dynatemp_range", False),
    "dynatemp_high": renamed_to("dynatemp_range"),
    "dynatemp_low": renamed_to("dynatemp_range"),
    "dynatemp_max": renamed_to("dynatemp_range"),
    "dynatemp_min": renamed_to("dynatemp_range"),
    "encoder_repetition_penalty": unsupported_sampler(1),
    "epsilon_cutoff": unsupported_sampler(0),
    "eta_cutoff": unsupported_sampler(0),
    "guidance_scale": reject_unless(1),
    "ignore_eos": reject_unless(False),
    "logit_bias": reject_unless({}, []),
    "max_length": renamed_to("max_tokens"),
    "max_new_tokens": renamed_to("max_tokens"),
    "max_temp": renamed_to("dynatemp_range"),
    "min_keep": reject_unless(0, 1),
    "min_length": renamed_to("min_tokens", 0),
    "min_new_tokens": renamed_to("min_tokens", 0),
    "min_temp": renamed_to("dynatemp_range"),
    "min_tokens": reject_unless(0),
    "mirostat_mode": renamed_to("mirostat", 0),
    "n": reject_unless(1),
    "n_predict": renamed_to("max_tokens", -1),
    "n_probs": renamed_to("logprobs", 0),
    "negative_prompt": reject_unless(""),
    "no_repeat_ngram_size": renamed_to("dry_multiplier", 0),
    "nsigma": renamed_to("top_n_sigma", 0, -1),
    "num_beam_groups": reject_unless(1),
    "num_beams": renamed_to("use_beam_search", 1),
    "num_predict": renamed_to("max_tokens", -1, -2),
    "penalize_newline": reject_unless(True),
    "penalty_alpha": unsupported_sampler(0),
    "penalty_range": renamed_to("repeat_last_n", -1),
    "presence_penalty_range": renamed_to("repeat_last_n", -1),
    "rep_pen": renamed_to("repetition_penalty", 1),
    "rep_pen_range": renamed_to("repeat_last_n", -1),
    "rep_pen_size": renamed_to("repeat_last_n", -1),
    "rep_pen_slope": unsupported_sampler(0, 1),
    "repetition_decay": unsupported_sampler(0),
    "repetition_penalty_range": renamed_to("repeat_last_n", -1),
    "sampler_order": renamed_to("temperature_last", []),
    "sampler_priority": renamed_to("temperature_last", [], ""),
    "sampler_seed": renamed_to("seed", -1),
    "sampler_seq": renamed_to("temperature_last", ""),
    "samplers": renamed_to("temperature_last", [], ""),
    "sampling_seed": renamed_to("seed", -1),
    "skew": unsupported_sampler(0),
    "smoothing_factor": unsupported_sampler(0),
    "stop": renamed_to("stop_sequences", [], ""),
    "stop_regex": renamed_to("stop", [], ""),
    "stop_token_ids": reject_unless([]),
    "stopping_strings": renamed_to("stop", []),
    "temperature": reject_unless(),
    "tfs": unsupported_sampler(1),
    "tfs_z": unsupported_sampler(1),
    "top_a": unsupported_sampler(0),
    "top_h": unsupported_sampler(0),
    "top_k": reject_unless(0, -1),
    "top_p": reject_unless(1),
    "typ_p": renamed_to("typical_p", 1),
    "typical": renamed_to("typical_p", 1),
    "watermark": reject_unless(False),
}
"""Unsupported samplers of requests for generated text, and other servers' names for supported ones."""

CALLED = FieldRules(frozenset({"name", "arguments"}))

OF_MEDIA = frozenset({"detail", "file_id", "image_embeds", "image_pil", "uuid"})

TOOL_CALL = FieldRules(
    frozenset({"id", "type", "function", "custom"}),
    inner={"function": CALLED, "custom": FieldRules(frozenset({"name", "input"}))},
)

MESSAGE = FieldRules(
    frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})
    | {"function_call", "refusal"},
    refused={
        "audio": reject_unless(),
        "images": reject_unless([]),
        "prefix": RejectedField((False,), why="is not supported, but continue_final_message is"),
    },
    inner={
        "content": FieldRules(
            frozenset({"type", "text", "refusal", "thinking", "reasoning", "summary"}) | MEDIA | OF_MEDIA,
            inner={
                **dict.fromkeys(
                    ("text", "thinking", "reasoning", "summary"), FieldRules(frozenset({"type", "text"}))
                ),
                "image_url": FieldRules(frozenset({"url", "detail"})),
                "video_url": FieldRules(frozenset({"url"})),
                "input_video": FieldRules(frozenset({"url", "data"})),
                "input_audio": FieldRules(frozenset({"url", "data", "format"})),
                "audio_url": FieldRules(frozenset({"url"})),
            },
        ),
        "tool_calls": TOOL_CALL,
        "function_call": CALLED,
    },
    empty=frozenset({"content"}),
)

FUNCTION = FieldRules(frozenset(ToolFunction.model_fields))

INNER: Mapping[str, FieldRules] = {
    "functions": FUNCTION,
    "messages": MESSAGE,
    "stream_options": FieldRules(frozenset(StreamOptions.model_fields)),
    "tools": FieldRules(
        frozenset(OfferedTool.model_fields),
        inner={"function": FUNCTION, "custom": FieldRules(frozenset(CustomTool.model_fields))},
    ),
}  # Rules of objects in requests; objects not listed here (schemas, documents, bias) are passed as they are.


def refusals(*, samples: bool) -> Mapping[str, RejectedField]:
    """Return the rejected fields of a request, by whether it is for generated text."""
    return _REFUSED_WHERE_SAMPLED if samples else REFUSED


_REFUSED_WHERE_SAMPLED = {**REFUSED, **REFUSED_SAMPLERS}
