"""What happens to request fields that no model of ours has.

Invariant: no field is dropped silently. A field that OpenAI or vLLM defines and that cannot change the answer
is accepted and named in the response header; one that would change it is refused unless it asks for what
happens anyway; any other is refused, or with `--unknown-fields ignore` named in the same header.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from quire.errors import ValidationError

IGNORED_HEADER = "x-quire-ignored-fields"

WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction", "request_id", "session_id",
    }
)  # fmt: skip

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "early_stopping": (False,),
    "echo": (False,),
    "extra_body": ({},),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Fields that are known but not supported, with the values that ask for nothing."""


def settle_fields(
    body: dict[str, Any], known: Iterable[str], *, reject_unknown: bool
) -> tuple[dict[str, Any], list[str]]:
    """Split a request body into the fields to honour and the names of those that are ignored.

    A null at the top level is the same as an absent field, as in OpenAI's own clients.

    Raises:
        ValidationError: names the field that cannot be honoured.
    """
    known = set(known)
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name in WITHOUT_EFFECT:
            ignored.append(name)
        elif name in NEUTRAL_VALUES:
            _check_neutral(name, value)
        elif reject_unknown:
            raise _unknown(name, known)
        else:
            ignored.append(name)
    return kept, ignored


def header_value(names: list[str]) -> str:
    """Names as they may stand in a header: a client chooses them, so anything else than a word is masked."""
    words = [name if name.isascii() and name.replace("-", "_").isidentifier() else "?" for name in names]
    return ", ".join(word[:64] for word in words[:32])


def _check_neutral(name: str, value: Any) -> None:
    for neutral in NEUTRAL_VALUES[name]:
        if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
            return
    allowed = " or ".join(["null", *map(repr, NEUTRAL_VALUES[name])])
    raise ValidationError(f"{name} is not supported; leave it out or send {allowed}", param=name)


def _unknown(name: str, known: set[str]) -> ValidationError:
    shown = name if len(name) <= 64 else name[:61] + "..."
    near = difflib.get_close_matches(shown, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValidationError(f"unknown field {shown!r}{hint}", param=shown)
