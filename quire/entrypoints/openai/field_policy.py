"""What happens to request fields that have no effect, wherever in a request they stand.

Invariant: no field is dropped silently. One that would change the answer and cannot be honoured is refused, unless it
asks for what happens anyway; any other is accepted and named in the reply, or with `--unknown-fields reject` refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.entrypoints.openai.notes import Notes
from quire.entrypoints.openai.protocol.requests import StreamOptions, Tool, ToolFunction
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
    "typical_p": unless(1.0),
    "use_beam_search": unless(False),
    "verbosity": unless("medium"),
    "vllm_xargs": unless({}),
    "web_search_options": unless(),
}
"""What a request of any kind may not ask for; a kind that honours one of these fields has it in its model."""

CALLED = Place(frozenset({"name", "arguments"}))
TOOL_CALL = Place(frozenset({"id", "type", "function"}), inner={"function": CALLED})
MEDIA = frozenset({"image_url", "input_image", "input_audio", "audio_url", "video_url", "file"})
"""Not honoured, but refused together with the part of the message that they are."""
MESSAGE = Place(
    frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})
    | {"function_call"},
    refused={
        "audio": unless(),
        "images": unless([]),
        "prefix": Refused((False,), why="is not supported, but continue_final_message is"),
    },
    inner={
        "content": Place(frozenset({"type", "text", "refusal"}) | MEDIA),
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
    "tools": Place(frozenset(Tool.model_fields), inner={"function": FUNCTION}),
}
"""Objects in requests; what is not named here (schemas, documents, bias) is the client's own."""


def settle_fields(
    body: Mapping[str, Any], honoured: Iterable[str], notes: Notes, inner: Mapping[str, Place] = INNER
) -> dict[str, Any]:
    """The fields of a request body that are to be honoured, at any depth; the names of others go to `notes`.

    A null is the same as an absent field, as in OpenAI's own clients.

    Args:
        inner: the objects in the request that have rules of their own.

    Raises:
        ValidationError: names the field that cannot be honoured.
    """
    return _settle(body, Place(frozenset(honoured), REFUSED, inner), notes, "")


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
