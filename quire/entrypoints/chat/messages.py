# SPDX-License-Identifier: Apache-2.0
"""Messages for templates: validation, legacy functions, protection of special tokens, and alternative arrangements.

Invariant: `checked_messages` returns known fields only, with string content and parsed arguments. Truncated or foreign
histories are accepted as long as no text is lost. Legacy calls (`function_call`, role `function`) are converted to tool
calls with generated ids.
`PlainText` keeps user text from becoming special tokens: `<|im_end|>` from a user must be encoded as text. Before
rendering, a character that occurs nowhere in the conversation is inserted before every special-token literal in user
text, and before a literal's prefix at the end of a string, which the template could complete. Stretches with this mark
are encoded separately with special tokens disabled. Tokenizers split at special tokens, so no other id changes.
Invariant: a prompt without such text is encoded in one call, exactly as rendered.
Images, videos and sounds stand in a content's text as characters that occur nowhere in the conversation
(`media_marks`), until the content is shown to the template (`ShownMedia`). So they move with the text around them.
`arrangements` yields variants for templates that reject the conversation. They move or join messages; all texts are
kept, and the system's stay in order.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.entrypoints.chat.call_arguments import CUSTOM_INPUT, parsed_arguments, with_valid_text
from quire.errors import ValidationError
from quire.inputs import ChatMessage, Conversation

STRETCH_CHARS = 2**16
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ALIASES = {"developer": "system"}  # Replacements for roles that a template does not know.
MEDIA_KINDS = ("image", "video", "audio")
"""Types of the parts in place of items, in the order of a prompt's markers."""
NO_MARKS: Mapping[str, str] = {}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHT_PARTS = {
    "thinking": ("thinking",),
    "reasoning": ("reasoning", "text", "summary"),
    "reasoning_text": ("text",),
    "redacted_thinking": (),
}  # Types of content parts that hold reasoning -> fields with its text; redacted ones are encrypted.
ARGUMENTS_FIELD = "messages[].tool_calls[].function.arguments"
REPLACED_SURROGATES = "U+FFFD in place of lone surrogates"
RESULT_FIELD = "messages[].tool_call_id"
Adjusted = dict[str, str]  # Fields of a conversation -> values used instead of the client's.
PASSED_FIELDS = frozenset({"name", "tool_call_id", "reasoning", "reasoning_content"})
# Fields that servers add to assistant messages and clients send back; no template reads them.
SILENT_FIELDS = frozenset({"annotations", "id", "object"})
SYSTEM_ROLES = ("system", "developer")
ROLE_FIELD = "messages[].role"
TO_FRONT = "system, moved into the first message"
TO_USER = "user, for a template without system messages"
TURNS_FIELD = "messages[]"
JOINED_TURNS = "consecutive ones of one role are joined"
CONTENT_FIELD = "messages[].content"
JOINED_TO_RESULT = "text of the user is joined to a tool result"
RESULT_TO_USER = "result as text of the user"
MEDIA_AS_TEXT = "media of a tool result as markers in its text"
TURNS = ("user", "assistant")
JOINED_FIELDS = ("reasoning", "reasoning_content")


def convert_legacy_functions(messages: Iterable[Any]) -> list[Any]:
    """Convert legacy function messages to tool calls and results; other messages are unchanged, valid or not.

    Raises:
        ValidationError: a call or a result has no name.
    """
    ids: dict[str, str] = {}
    return [_modern(message, index, ids) for index, message in enumerate(messages)]


def _modern(message: Any, index: int, ids: dict[str, str]) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("role") == "function":
        return _result(message, f"messages.{index}", ids)
    if message.get("function_call") is None:
        return message
    return _call(message, index, ids)


def _call(message: dict[str, Any], index: int, ids: dict[str, str]) -> dict[str, Any]:
    where = f"messages.{index}.function_call"
    rest = dict(message)
    function = rest.pop("function_call")
    if message.get("role") != "assistant" or message.get("tool_calls") not in (None, []):
        raise ValidationError(f"{where} belongs to an assistant's message without tool_calls", param=where)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValidationError(f"{where} must be an object with name and arguments", param=where)
    ids[function["name"]] = call_id = (
        f"call{index:05}"  # nine letters and digits, as Mistral's templates require
    )
    called = {"name": function["name"], "arguments": function.get("arguments")}
    return {**rest, "tool_calls": [{"id": call_id, "type": "function", "function": called}]}


def _result(message: dict[str, Any], where: str, ids: dict[str, str]) -> dict[str, Any]:
    name = message.get("name")
    if not isinstance(name, str):
        raise ValidationError(
            f"{where}.name must be the name of a function, got {name!r:.80}", param=f"{where}.name"
        )
    known = {"tool_call_id": ids[name]} if name in ids else {}
    return {**message, "role": "tool", **known}


SCRIPTS = (range(0xA500, 0xA60C), range(0xA000, 0xA48D), range(0x20000, 0x2A6D0))  # Vai, Yi, rare Han
MARKS = tuple(map(chr, itertools.chain.from_iterable(SCRIPTS)))
"""Candidates for the mark: letters that occur in almost no text.

They must be printable, because a template may print a list or dict as Python does, which escapes other characters.
"""


class TextEncoder(Protocol):
    """Tokenizer that can encode with special tokens disabled."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]: ...


@dataclass(frozen=True)
class MediaTexts:
    """Texts of a model that takes media: markers of items in a prompt, and tokens that text must not turn into."""

    marker: str
    literals: tuple[str, ...]
    video_marker: str = ""
    sound_marker: str = ""
    template: str = ""
    """Chat template of a model whose tokenizer has none; empty: it needs the operator's."""

    @property
    def markers(self) -> dict[str, str]:
        """Marker of each kind that the model takes, in the order of `MEDIA_KINDS`."""
        every = zip(MEDIA_KINDS, (self.marker, self.video_marker, self.sound_marker), strict=True)
        return {kind: marker for kind, marker in every if marker}


class SpecialTokenTexts:
    """Special tokens of a tokenizer as texts, longest first, and their proper prefixes."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self.texts = sorted(filter(None, special_tokens), key=len, reverse=True)
        self.beginnings = {text[:size] for text in self.texts for size in range(1, len(text))}
        self.longest = max(map(len, self.texts), default=0)

    def within(self, text: str) -> str:
        """Return an expression for the special tokens in a text; empty if there are none."""
        return "|".join(re.escape(literal) for literal in self.texts if literal in text)


class PlainText:
    """Marks and unmarks special-token literals of one conversation; `end` is another unused character for the caller.

    Args:
        values: all user text that will be rendered; determines the unused characters.
        unsplit: tokens that a tokenizer finds even in plain text, because it does not hold them for special ones.
    """

    def __init__(self, literals: SpecialTokenTexts, values: Any, unsplit: Sequence[str] = ()) -> None:
        self._mark, self.end = unused_marks(values, 2)
        self._literals = literals
        self._unsplit = re.compile("|".join(map(re.escape, unsplit))) if unsplit else None

    def protect(self, value: Any) -> Any:
        """Return `value` with every string in it marked, dict keys included."""
        if isinstance(value, str):
            return self._protect_end(self._protect_inside(value))
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def encode(self, tokenizer: TextEncoder, rendered: str) -> list[int]:
        """Return the token ids of a rendered prompt in which user text was marked."""
        ids: list[int] = []
        for piece, is_plain in self._pieces(rendered):
            for text in self._without_tokens(piece) if is_plain else (piece,):
                ids += tokenizer.encode(text, add_special_tokens=False, allow_special=not is_plain)
        return ids

    def _without_tokens(self, plain: str) -> Iterator[str]:
        """Yield the parts of plain text, split inside every literal that would become a token all the same."""
        start = 0
        for found in self._unsplit.finditer(plain) if self._unsplit is not None else ():
            yield plain[start : found.start() + 1]
            start = found.start() + 1
        yield plain[start:]

    def places_of(self, literal: str, rendered: str) -> list[int]:
        """Return where a literal stands in a rendered prompt, other than in user text."""
        found = re.finditer(f"(?<!{self._mark}){re.escape(literal)}", rendered)
        return [place.start() for place in found]

    def unmark(self, text: str) -> str:
        return text.replace(self._mark, "")

    def _protect_inside(self, text: str) -> str:
        present = self._literals.within(text)
        # A lookahead finds overlapping literals, too.
        return re.sub(f"(?={present})", self._mark, text) if present else text

    def _protect_end(self, text: str) -> str:
        sizes = range(min(self._literals.longest - 1, len(text)), 0, -1)
        size = next((size for size in sizes if text[-size:] in self._literals.beginnings), 0)
        return f"{text[:-size]}{self._mark}{text[-size:]}" if size else text

    def _pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Yield pieces of the prompt with whether they are plain text: maximal unmarked ones, and marked ones,
        unmarked.
        """
        if self._mark not in rendered:
            yield rendered, False
            return
        open_text = ""
        for piece in self._split_at_special_tokens(rendered):
            if self._mark not in piece:
                open_text += piece
                continue
            if open_text:
                yield open_text, False
            yield self.unmark(piece), True
            open_text = ""
        if open_text:
            yield open_text, False

    def _split_at_special_tokens(self, rendered: str) -> list[str]:
        present = self._literals.within(rendered)
        return re.split(f"((?<!{self._mark})(?:{present}))", rendered) if present else [rendered]


def unused_marks(values: Any, count: int) -> list[str]:
    """Return characters that occur in none of the strings of `values`.

    Raises:
        ValidationError: there are too few.
    """
    used = set[str]()
    for stretch in _without_ascii(_strings(values)):
        used.update(stretch)
    free = list(itertools.islice((mark for mark in MARKS if mark not in used), count))
    if len(free) < count:
        raise ValidationError("messages use every character that could mark plain text", param="messages")
    return free


class ShownMedia:
    """Form in which a template takes a content with media.

    Args:
        marks: character that stands for items of a kind in a content's text; none if the model takes none.
        markers: text of an item of each kind, for a template that takes texts.
        parts: content part of an item of each kind, for a template that takes parts; None for the former.
    """

    def __init__(
        self,
        marks: Mapping[str, str],
        markers: Mapping[str, str],
        parts: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        self.marks = marks
        self._forms = {mark: (markers[kind], parts[kind]) for kind, mark in marks.items()}
        self._any = re.compile(f"([{''.join(map(re.escape, self._forms))}])") if marks else None

    def is_in(self, content: str) -> bool:
        """Return whether a content has items."""
        return any(mark in content for mark in self._forms)

    def counts(self, messages: Sequence[ChatMessage]) -> dict[str, int]:
        """Return the number of items of each kind in these messages."""
        return {
            kind: sum(message["content"].count(mark) for message in messages)
            for kind, mark in self.marks.items()
        }

    def shown(
        self, plain: PlainText, content: str, end: str = "", *, as_text: bool = False
    ) -> str | list[dict[str, Any]]:
        """Return a content, protected; `end` is added to its text.

        A template of texts, and any with `as_text`, gets all markers of a content before its text, as vLLM does.
        """
        if self._any is None or not self.is_in(content):
            return f"{plain.protect(content)}{end}"
        pieces = self._any.split(content)
        shown = [self._forms[mark] for mark in pieces[1::2]]
        texts = [plain.protect(text) for text in pieces[::2]]
        if as_text or any(part is None for _, part in shown):
            text = "\n".join(filter(None, texts))
            return "\n".join([*(marker for marker, _ in shown), text]) + end
        parts = [{"type": "text", "text": texts[0]}] if texts[0] else []
        for (_, part), text in zip(shown, texts[1:], strict=True):
            parts.append(dict(part or {}))
            parts += [{"type": "text", "text": text}] if text else []
        return [*parts, {"type": "text", "text": end}] if end else parts


def _without_ascii(texts: Iterable[str]) -> Iterator[str]:
    """Yield stretches of non-ASCII texts, short enough not to block other threads."""
    for text in texts:
        if not text.isascii():
            for start in range(0, len(text), STRETCH_CHARS):
                yield text[start : start + STRETCH_CHARS]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


# Fields that other parts may have without meaning.
THOUGHT_FIELDS = frozenset(name for names in THOUGHT_PARTS.values() for name in names) - {"text"}


def checked_messages(
    messages: Conversation,
    aliases: Mapping[str, str] = ROLE_ALIASES,
    adjusted: Adjusted | None = None,
    media_marks: Mapping[str, str] = NO_MARKS,
) -> list[ChatMessage]:
    """Return copies of `messages` in the form that templates read.

    Args:
        aliases: role -> the role that the template knows instead.
        adjusted: receives what was changed.
        media_marks: character in place of a part of each kind of media that the model takes.

    Raises:
        ValidationError: names the message and the field, for example `messages.2.content`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValidationError("messages must be a list with at least one message", param="messages")
    adjusted = {} if adjusted is None else adjusted
    modern = convert_legacy_functions(messages)
    checked = [
        _checked(message, f"messages.{index}", aliases, adjusted, media_marks)
        for index, message in enumerate(modern)
    ]
    _note_lone_results(checked, adjusted)
    return checked


def _note_lone_results(messages: list[ChatMessage], adjusted: Adjusted) -> None:
    """Note a result without a preceding call, as in a truncated history; messages without ids are trusted."""
    ids: set[str | None] = set()
    for message in messages:
        ids.update(call.get("id") for call in message.get("tool_calls", ()))
        is_known = (
            message.get("tool_call_id") in ids or None in ids if "tool_call_id" in message else bool(ids)
        )
        if message["role"] == "tool" and not is_known:
            adjusted[RESULT_FIELD] = "kept without a call"


def _checked(
    message: Any, where: str, aliases: Mapping[str, str], adjusted: Adjusted, media_marks: Mapping[str, str]
) -> ChatMessage:
    if not isinstance(message, dict):
        raise ValidationError(f"{where} must be an object with role and content", param=where)
    fields = {name: value for name, value in message.items() if value is not None}
    role = _checked_role(fields.pop("role", None), f"{where}.role")
    role = aliases.get(role, role)
    tool_calls = _checked_tool_calls(fields.pop("tool_calls", []), role, f"{where}.tool_calls", adjusted)
    refusal = fields.pop("refusal", "")
    may_lack_content = "content" in message or role in ("assistant", "tool")
    content = fields.pop("content", "" if may_lack_content else None)
    text, thought = _read_content(content, role, f"{where}.content", media_marks)
    if not isinstance(refusal, str):
        raise ValidationError(f"{where}.refusal must be text", param=f"{where}.refusal")
    checked: ChatMessage = {"role": role, "content": "\n".join(filter(None, (text, refusal)))}
    for name, value in fields.items():
        if name in PASSED_FIELDS:
            if not isinstance(value, str):
                raise ValidationError(f"{where}.{name} must be text", param=f"{where}.{name}")
            checked[name] = value
        elif name not in SILENT_FIELDS:
            raise ValidationError(f"{where} has an unknown field {name!r}", param=f"{where}.{name}")
    thought = checked.get("reasoning") or checked.get("reasoning_content") or thought
    if thought:  # templates read it under one name or the other
        checked["reasoning"] = checked["reasoning_content"] = thought
    if tool_calls:
        checked["tool_calls"] = tool_calls
    return checked


def _checked_role(role: Any, where: str) -> str:
    if role not in ROLES:
        raise ValidationError(f"{where} must be one of {', '.join(ROLES)}, got {role!r:.40}", param=where)
    return str(role)


def _read_content(content: Any, role: str, where: str, media_marks: Mapping[str, str]) -> tuple[str, str]:
    """Return the text of a message, and the reasoning among its parts."""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise ValidationError(f"{where} must be text or a list of text parts", param=where)
    texts, thoughts = [], []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if role == "assistant" and isinstance(kind, str) and kind in THOUGHT_PARTS:
            thoughts.append(_thought(part, kind, f"{where}.{index}"))
        elif isinstance(kind, str) and kind in media_marks and len(part) == 1:
            texts.append(media_marks[kind])
        else:
            texts.append(_part_text(part, f"{where}.{index}"))
    return _joined_parts(texts, media_marks), "".join(thoughts)


def _joined_parts(texts: list[str], media_marks: Mapping[str, str]) -> str:
    """Return texts in lines of their own; media are between them without a line break."""
    joined = "\n".join(texts)
    for mark in media_marks.values():
        joined = joined.replace(f"\n{mark}", mark).replace(f"{mark}\n", mark)
    return joined


def _thought(part: dict[str, Any], kind: str, where: str) -> str:
    """Return the reasoning of a part, whose fields are text or lists of text parts."""
    given = [name for name in THOUGHT_PARTS[kind] if part.get(name) is not None]
    return "".join(_joined_texts(part[name], f"{where}.{name}") for name in given)


def _joined_texts(value: Any, where: str) -> str:
    texts = []
    for piece in value if isinstance(value, list) else [value]:
        text = piece.get("text") if isinstance(piece, dict) and piece is not value else piece
        if not isinstance(text, str):
            raise ValidationError(f"{where} must be text or a list of text parts", param=where)
        texts.append(text)
    return "".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        reason = "this model takes text only" if kind in MEDIA_KINDS else "no such part is known"
        raise ValidationError(f"{where} is no text part: {reason}, got {kind!r:.40}", param=where)
    unknown = part.keys() - {"type", field} - THOUGHT_FIELDS
    if unknown or not isinstance(part.get(field), str):
        raise ValidationError(f"{where} must hold exactly 'type' and a string {field!r}", param=where)
    return str(part[field])


def _checked_tool_calls(calls: Any, role: str, where: str, adjusted: Adjusted) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise ValidationError(f"{where} must be a list in a message of the assistant", param=where)
    return [_checked_tool_call(call, f"{where}.{index}", adjusted) for index, call in enumerate(calls)]


def _checked_tool_call(call: Any, where: str, adjusted: Adjusted) -> dict[str, Any]:
    kind = call.get("type") if isinstance(call, dict) else None
    if kind not in (None, "function", "custom"):
        raise ValidationError(f"{where}.type must be function or custom", param=f"{where}.type")
    function = call.get(kind or "function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValidationError(f"{where} needs a {kind or 'function'} with a name", param=where)
    if not isinstance(call.get("id"), str | None):
        raise ValidationError(f"{where}.id must be text", param=f"{where}.id")
    given = {CUSTOM_INPUT: function["input"]} if isinstance(function.get("input"), str) else None
    arguments = given if kind == "custom" else parsed_arguments(function.get("arguments"))
    if arguments is None:
        adjusted[ARGUMENTS_FIELD] = "{}"
    elif isinstance(function.get("arguments"), str):
        valid = with_valid_text(arguments)
        if valid is not arguments:
            arguments, adjusted[ARGUMENTS_FIELD] = valid, REPLACED_SURROGATES
    checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    if isinstance(call.get("id"), str):
        checked["id"] = call["id"]
    return checked


@dataclass(frozen=True)
class Arrangement:
    """Variant of a conversation, with its changes."""

    messages: list[ChatMessage]
    adjusted: Adjusted = field(default_factory=dict)
    has_text_results: bool = False
    """Media of tool results are markers in their text: some templates print such a content as it is."""

    def with_text_results(self) -> Arrangement:
        return Arrangement(self.messages, {**self.adjusted, CONTENT_FIELD: MEDIA_AS_TEXT}, True)


class SystemPlaces(Protocol):
    """Positions in which a template shows system messages."""

    def takes_first(self, role: str) -> bool: ...

    def takes_later(self, role: str) -> bool: ...


def arrangements(
    messages: list[ChatMessage], places: SystemPlaces, *, keeps_last: bool
) -> Iterator[Arrangement]:
    """Yield variants of a conversation, the client's own first if the template shows its system messages.

    Args:
        keeps_last: keep the last message in place, because the answer continues it.
    """
    for placed in _placements(messages, places, keeps_last=keeps_last):
        yield placed
        turns = _with_turns_joined(placed.messages, keeps_last=keeps_last)
        adjusted = dict(placed.adjusted)
        if len(turns) < len(placed.messages):
            adjusted[TURNS_FIELD] = JOINED_TURNS
            yield Arrangement(turns, dict(adjusted))
        results = _with_texts_in_results(turns)
        if results != turns:
            yield Arrangement(results, {**adjusted, CONTENT_FIELD: JOINED_TO_RESULT})
        as_user_texts = [_result_as_user(message) for message in placed.messages]
        if as_user_texts != placed.messages:
            yield Arrangement(
                _with_turns_joined(as_user_texts, keeps_last=keeps_last),
                {**adjusted, RESULT_FIELD: RESULT_TO_USER},
            )


def _placements(
    messages: list[ChatMessage], places: SystemPlaces, *, keeps_last: bool
) -> Iterator[Arrangement]:
    """Yield the conversation with its system messages in positions that the template may support."""
    system = [index for index, message in enumerate(messages) if message["role"] in SYSTEM_ROLES]
    if keeps_last and system and system[-1] == len(messages) - 1:
        system.pop()
    if not system:
        yield Arrangement(messages)
        return
    role = messages[system[0]]["role"]
    takes_first = places.takes_first(role)
    if takes_first and all(index == 0 or places.takes_later(messages[index]["role"]) for index in system):
        yield Arrangement(messages)
    moved = frozenset(system)
    rest = [message for index, message in enumerate(messages) if index not in moved]
    text = _joined_text(*(messages[index]["content"] for index in system))
    if takes_first and system[-1] > 0:
        first: ChatMessage = {**messages[system[0]], "content": text}
        yield Arrangement([first, *rest], {ROLE_FIELD: TO_FRONT})
    yield Arrangement(_before_user(text, rest), {ROLE_FIELD: TO_USER})


def _with_turns_joined(messages: Sequence[ChatMessage], *, keeps_last: bool) -> list[ChatMessage]:
    """Return the messages with consecutive ones of user or assistant joined."""
    kept: list[ChatMessage] = []
    for index, message in enumerate(messages):
        is_turn = bool(kept) and kept[-1]["role"] == message["role"] and message["role"] in TURNS
        # Templates print calls after the text, so a prompt that ends in the text would lose them.
        ends_prompt = keeps_last and index == len(messages) - 1
        if is_turn and not (ends_prompt and "tool_calls" in kept[-1]):
            kept[-1] = _joined(kept[-1], message)
        else:
            kept.append(message)
    return kept


def _joined(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    """Join two messages of one role; a name is kept if both have it."""
    joined: ChatMessage = {"role": one["role"], "content": _joined_text(one["content"], other["content"])}
    for name in JOINED_FIELDS:
        if name in one or name in other:
            joined[name] = _joined_text(one.get(name, ""), other.get(name, ""))
    if "name" in one and one["name"] == other.get("name"):
        joined["name"] = one["name"]
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def _with_texts_in_results(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Move user text that follows a call into a result of that call."""
    kept: list[ChatMessage] = []
    before: list[str] = []
    for index, message in enumerate(messages):
        follows = messages[index + 1]["role"] if index + 1 < len(messages) else ""
        if message["role"] == "tool" and before:
            kept.append({**message, "content": _joined_text(*before, message["content"])})
            before.clear()
        elif message["role"] != "user" or not kept:
            kept.append(message)
        elif kept[-1]["role"] == "tool":
            kept[-1] = {**kept[-1], "content": _joined_text(kept[-1]["content"], message["content"])}
        elif "tool_calls" not in kept[-1]:
            kept.append(message)
        elif follows == "tool":
            before.append(message["content"])
        else:
            kept.append(_result_of(kept[-1]["tool_calls"][-1], message["content"]))
    return kept


def _result_of(call: dict[str, Any], text: str) -> ChatMessage:
    """Return a text as the result of a call without one."""
    return {"role": "tool", "content": text, "tool_call_id": call["id"], "name": call["function"]["name"]}


def _result_as_user(message: ChatMessage) -> ChatMessage:
    return {"role": "user", "content": message["content"]} if message["role"] == "tool" else message


def _joined_text(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _before_user(text: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Prepend text to the first user message, or as a user message of its own."""
    if not text:
        return messages
    if not messages or messages[0]["role"] != "user":
        return [{"role": "user", "content": text}, *messages]
    first: ChatMessage = {**messages[0], "content": _joined_text(text, messages[0]["content"])}
    return [first, *messages[1:]]
