"""What happens to request fields that have no effect, wherever in a request they stand.

Invariant: no field is dropped silently. One that would change the answer and cannot be honoured is refused, unless it
asks for what happens anyway; any other is accepted and named in the reply, or with `--unknown-fields reject` refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.entrypoints.openai.notes import Notes
from quire.entrypoints.openai.protocol.requests import CustomTool, OfferedTool, StreamOptions, ToolFunction
from quire.errors import ValidationError


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer: the values that ask for nothing, and why no other can be honoured."""

    neutral: tuple[Any, ...] = ()
    why: str = "is not supported"

    def check(self, name: str, value: Any) -> None:
        """Raise ValidationError unless the value asks for nothing."""
        for neutral in self.neutral:
            if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
                return
        allowed = " or ".join(["null", *map(repr, self.neutral)])
        raise ValidationError(f"{name} {self.why}; leave it out or send {allowed}", param=name)


def unless(*neutral: Any) -> Refused:
    return Refused(neutral)


@dataclass(frozen=True)
class Place:
    """An object in a request: the fields that are honoured there, and the objects in it that have rules of their own.

    `empty` names fields in which null is a value and not an absent field.
    """

    honoured: frozenset[str]
    refused: Mapping[str, Refused] = field(default_factory=dict)
    inner: Mapping[str, Place] = field(default_factory=dict)
    empty: frozenset[str] = frozenset()


REFUSED: Mapping[str, Refused] = {
    "add_special_tokens": unless(False),
    "audio": unless(),
    "bad_words": unless([]),
    "best_of": unless(1),
    "chat_template": Refused(why="is for the operator to choose (--chat-template)"),
    "early_stopping": unless(False),
    "ebnf": unless(),
    "echo": unless(False),
    "extra_body": unless({}),
    "function_call": unless("none"),
    "functions": unless([]),
    "grammar": unless(""),
    "guided_choice": unless(),
    "guided_grammar": unless(),
    "guided_json": unless(),
    "guided_regex": unless(),
    "include_reasoning": unless(True),
    "json_schema": unless(),
    "kv_transfer_params": unless(),
    "length_penalty": unless(1.0),
    "logits_processors": unless([]),
    "logprob_token_ids": unless(),
    "messages": Refused(why="is no field of this request"),
    "modalities": unless(["text"]),
    "normalize": Refused(why="is called use_activation"),
    "prompt": Refused(why="is no field of this request"),
    "prompt_embeds": unless(),
    "regex": unless(),
    "repetition_detection": unless(),
    "response_format": unless({"type": "text"}),
    "return_tokens_as_token_ids": unless(False),
    "spaces_between_special_tokens": unless(True),
    "structured_outputs": unless(),
    "suffix": Refused(("",), why="is for completions of models that were made to fill in the middle"),
    "thinking_token_budget": unless(),
    "tool_choice": unless("none", "auto"),
    "tools": unless([]),
    "truncation_side": unless("left"),
    "use_beam_search": unless(False),
    "vllm_xargs": unless({}),
    "web_search_options": unless(),
}
"""What a request of any kind may not ask for; a kind that honours one of these fields has it in its model."""


def called(name: str, *neutral: Any) -> Refused:
    return Refused(neutral, f"is not supported, but {name} is")


def no_sampler(*neutral: Any) -> Refused:
    there = "top_k, top_p, min_p, typical_p, top_n_sigma, xtc_probability, dry_multiplier, dynatemp_range and mirostat"
    return Refused(neutral, f"is not supported; samplers here are {there}")


SAMPLERS: Mapping[str, Refused] = {
    "adaptive_target": no_sampler(-1, 0),
    "bad_words_ids": called("bad_words", []),
    "forced_bos_token_id": no_sampler(),
    "forced_eos_token_id": no_sampler(),
    "freq_pen": called("frequency_penalty", 0),
    "penalize_nl": no_sampler(False),
    "pres_pen": called("presence_penalty", 0),
    "sequence_bias": called("logit_bias", {}),
    "suppress_tokens": called("logit_bias", []),
    "top_nsigma": called("top_n_sigma", 0, -1),
    "xtc_prob": called("xtc_probability", 0),
    "allowed_token_ids": unless(),
    "ban_eos_token": called("ignore_eos", False),
    "banned_strings": called("bad_words", []),
    "banned_tokens": called("logit_bias", [], ""),
    "cfg_scale": unless(1),
    "custom_token_bans": called("logit_bias", ""),
    "do_sample": called("temperature 0 for greedy decoding", True),
    "dry_range": called("dry_penalty_last_n"),
    "dynamic_temperature": called("dynatemp_range", False),
    "dynatemp_high": called("dynatemp_range"),
    "dynatemp_low": called("dynatemp_range"),
    "dynatemp_max": called("dynatemp_range"),
    "dynatemp_min": called("dynatemp_range"),
    "encoder_repetition_penalty": no_sampler(1),
    "epsilon_cutoff": no_sampler(0),
    "eta_cutoff": no_sampler(0),
    "guidance_scale": unless(1),
    "ignore_eos": unless(False),
    "logit_bias": unless({}, []),
    "max_length": called("max_tokens"),
    "max_new_tokens": called("max_tokens"),
    "max_temp": called("dynatemp_range"),
    "min_keep": unless(0, 1),
    "min_length": called("min_tokens", 0),
    "min_new_tokens": called("min_tokens", 0),
    "min_temp": called("dynatemp_range"),
    "min_tokens": unless(0),
    "mirostat_mode": called("mirostat", 0),
    "n": unless(1),
    "n_predict": called("max_tokens", -1),
    "n_probs": called("logprobs", 0),
    "negative_prompt": unless(""),
    "no_repeat_ngram_size": called("dry_multiplier", 0),
    "nsigma": called("top_n_sigma", 0, -1),
    "num_beam_groups": unless(1),
    "num_beams": called("use_beam_search", 1),
    "num_predict": called("max_tokens", -1, -2),
    "penalize_newline": unless(True),
    "penalty_alpha": no_sampler(0),
    "penalty_range": called("repeat_last_n", -1),
    "presence_penalty_range": called("repeat_last_n", -1),
    "rep_pen": called("repetition_penalty", 1),
    "rep_pen_range": called("repeat_last_n", -1),
    "rep_pen_size": called("repeat_last_n", -1),
    "rep_pen_slope": no_sampler(0, 1),
    "repetition_decay": no_sampler(0),
    "repetition_penalty_range": called("repeat_last_n", -1),
    "sampler_order": called("temperature_last", []),
    "sampler_priority": called("temperature_last", [], ""),
    "sampler_seed": called("seed", -1),
    "sampler_seq": called("temperature_last", ""),
    "samplers": called("temperature_last", [], ""),
    "sampling_seed": called("seed", -1),
    "skew": no_sampler(0),
    "smoothing_factor": no_sampler(0),
    "stop": called("stop_sequences", [], ""),
    "stop_regex": called("stop", [], ""),
    "stop_token_ids": unless([]),
    "stopping_strings": called("stop", []),
    "temperature": unless(),
    "tfs": no_sampler(1),
    "tfs_z": no_sampler(1),
    "top_a": no_sampler(0),
    "top_h": no_sampler(0),
    "top_k": unless(0, -1),
    "top_p": unless(1),
    "typ_p": called("typical_p", 1),
    "typical": called("typical_p", 1),
    "watermark": unless(False),
}
"""Samplers that a request for generated text may not ask for where its kind does not honour them, and names that other
servers have for those that it does."""

CALLED = Place(frozenset({"name", "arguments"}))
TOOL_CALL = Place(
    frozenset({"id", "type", "function", "custom"}),
    inner={"function": CALLED, "custom": Place(frozenset({"name", "input"}))},
)
MEDIA = frozenset({"image_url", "input_image", "input_audio", "audio_url", "video_url", "file"})
"""Not honoured, but refused together with the part of the message that they are."""
MESSAGE = Place(
    frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})
    | {"function_call", "refusal"},
    refused={
        "audio": unless(),
        "images": unless([]),
        "prefix": Refused((False,), why="is not supported, but continue_final_message is"),
    },
    inner={
        "content": Place(
            frozenset({"type", "text", "refusal", "thinking", "reasoning", "summary"}) | MEDIA,
            inner=dict.fromkeys(
                ("text", "thinking", "reasoning", "summary"), Place(frozenset({"type", "text"}))
            ),
        ),
        "tool_calls": TOOL_CALL,
        "function_call": CALLED,
    },
    empty=frozenset({"content"}),
)
FUNCTION = Place(frozenset(ToolFunction.model_fields))
INNER: Mapping[str, Place] = {
    "functions": FUNCTION,
    "messages": MESSAGE,
    "stream_options": Place(frozenset(StreamOptions.model_fields)),
    "tools": Place(
        frozenset(OfferedTool.model_fields),
        inner={"function": FUNCTION, "custom": Place(frozenset(CustomTool.model_fields))},
    ),
}
"""Objects in requests; what is not named here (schemas, documents, bias) is the client's own."""


def refusals(*, samples: bool) -> Mapping[str, Refused]:
    """Return what a request may not ask for, by whether it is for generated text."""
    return _REFUSED_WHERE_SAMPLED if samples else REFUSED


_REFUSED_WHERE_SAMPLED = {**REFUSED, **SAMPLERS}


def settle_fields(
    body: Mapping[str, Any],
    honoured: Iterable[str],
    notes: Notes,
    inner: Mapping[str, Place] = INNER,
    *,
    samples: bool = True,
) -> dict[str, Any]:
    """The fields of a request body that are to be honoured, at any depth; the names of others go to `notes`.

    A null is the same as an absent field, as in OpenAI's own clients.

    Args:
        inner: the objects in the request that have rules of their own.
        samples: whether the request is for generated text.

    Raises:
        ValidationError: names the field that cannot be honoured.
    """
    return _settle(body, Place(frozenset(honoured), refusals(samples=samples), inner), notes, "")


def _settle(body: Mapping[str, Any], place: Place, notes: Notes, path: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None and name not in place.empty:
            continue
        if name not in place.honoured:
            _settle_other(path + name, value, place.refused.get(name), notes, place.honoured)
        elif name in place.inner:
            kept[name] = _settle_inner(value, place.inner[name], notes, path + name)
        else:
            kept[name] = value
    return kept


def _settle_inner(value: Any, place: Place, notes: Notes, path: str) -> Any:
    """An object, or each object of a list; what is neither is told wrong by those who read it."""
    if isinstance(value, dict):
        return _settle(value, place, notes, f"{path}.")
    if not isinstance(value, list):
        return value
    return [_settle(item, place, notes, f"{path}[].") if isinstance(item, dict) else item for item in value]


def _settle_other(path: str, value: Any, rule: Refused | None, notes: Notes, honoured: Iterable[str]) -> None:
    if rule is None:
        notes.ignore(path, honoured)
    else:
        rule.check(path, value)
