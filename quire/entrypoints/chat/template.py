# SPDX-License-Identifier: Apache-2.0
"""`ChatTemplate`: conversation -> token ids of its prompt.

Invariant: only the operator chooses the template. A conversation is data: it cannot set the template's variables, and
its text never becomes a special token (`PlainText` in `quire.entrypoints.chat.messages`).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from jinja2 import Environment, Template, TemplateSyntaxError, meta, nodes

from quire.entrypoints.chat.call_arguments import forms_of, have_calls, with_argument_texts, with_call_ids
from quire.entrypoints.chat.environment import TemplateRefusalError, make_environment
from quire.entrypoints.chat.messages import (
    ROLE_ALIASES,
    ROLES,
    Adjusted,
    Arrangement,
    MediaTexts,
    PlainText,
    ShownMedia,
    SpecialTokenTexts,
    TextEncoder,
    arrangements,
    checked_messages,
    unused_marks,
)
from quire.entrypoints.chat.template_probes import PROBE, TemplateProbes, with_parts
from quire.entrypoints.chat.tool_places import TOOLS_VARIABLE, place_of_tools
from quire.errors import ConfigError, ModelLoadError, ValidationError
from quire.inputs import ChatMessage, Conversation
from quire.models.checkpoint_files import read_text

logger = logging.getLogger(__name__)

MAX_RENDERED_CHARS = 32 * 2**20
OWN_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
    }
)
CHECKPOINTS = "the checkpoint's chat template"
FOR_TOOLS = "tool_use"  # Name of a template for conversations with tools, which some models have.
INSTEAD = "correct it, or name another one with --chat-template"
SHOWN_PARTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "image": ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}}),
    "video": ({"type": "video"}, {"type": "video_url", "video_url": {"url": ""}}),
    "audio": (
        {"type": "audio"},
        {"type": "audio_url", "audio_url": {"url": ""}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ),
}
"""Forms of a part of each kind, of which a template may know one."""
SHOWN_NAMES = {"image": "images", "video": "videos", "audio": "sounds"}
NO_MARKERS: Mapping[str, str] = {}
USER: ChatMessage = {"role": "user", "content": "x"}
ASSISTANT: ChatMessage = {"role": "assistant", "content": "y"}


class TemplateTokenizer(TextEncoder, Protocol):
    """Tokenizer properties that a chat template needs; `quire.engine.tokenizer.Tokenizer` provides them."""

    chat_templates: dict[str, str]
    named_tokens: dict[str, str]

    @property
    def bos_token(self) -> str | None: ...

    @property
    def eos_token(self) -> str | None: ...

    @property
    def special_tokens(self) -> Iterable[str]: ...


class TemplateFailureError(ValidationError):
    """Raised when the template rejects every arrangement of a conversation."""


class RenderedChat:
    """Rendered conversation; `text` is for display and length checks.

    Args:
        adjusted: changes to the client's messages, for example for a template that rejects them.
        markers: text that stands for items of media, by kind.
    """

    def __init__(
        self,
        plain: PlainText,
        marked: str,
        adjusted: Adjusted | None = None,
        markers: Mapping[str, str] = NO_MARKERS,
    ) -> None:
        self._plain = plain
        self._marked = marked
        self._markers = markers
        self.adjusted = adjusted or {}

    @property
    def text(self) -> str:
        return self._plain.unmark(self._marked)

    def encode(self, tokenizer: TextEncoder) -> list[int]:
        """Return the token ids; only the template's own special tokens become special tokens.

        Raises:
            ValidationError: a text is not valid Unicode.
        """
        try:
            return self._plain.encode(tokenizer, self._marked)
        except UnicodeEncodeError:
            raise ValidationError("messages hold text that is not valid Unicode", param="messages") from None

    def with_media(self, texts: Sequence[str]) -> RenderedChat:
        """Return the prompt with these texts in place of its markers, which are as many, in order."""
        kept, last = [], 0
        for (place, kind), text in zip(self._places() if texts else [], texts, strict=True):
            kept += [self._marked[last:place], text]
            last = place + len(self._markers[kind])
        return RenderedChat(self._plain, "".join([*kept, self._marked[last:]]), self.adjusted, self._markers)

    def media_kinds(self) -> list[str]:
        """Return the kinds of the items in the order of the prompt."""
        return [kind for _, kind in self._places()]

    def _places(self) -> list[tuple[int, str]]:
        """Return where the markers are, and of which kind."""
        places = (
            (place, kind)
            for kind, marker in self._markers.items()
            for place in self._plain.places_of(marker, self._marked)
        )
        return sorted(places)


class ChatTemplate(TemplateProbes):
    """One compiled template.

    Args:
        source: Jinja text.
        bos_token, eos_token: variables of these names.
        named_tokens: further special tokens as variables (`pad_token`).
        special_tokens: literals that user text must not turn into tokens.
        for_tools: a separate template for conversations with tools, if the model has one.
        content_format: form of a message's content, "string" or "openai" (a list of parts); "auto" probes both.
        media: texts of a model that takes media; None if it takes text only.
        origin: the template's name in messages, by the file or option that it is from.

    Raises:
        ConfigError: the template is invalid.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        named_tokens: Mapping[str, str] | None = None,
        special_tokens: Iterable[str] = (),
        for_tools: ChatTemplate | None = None,
        content_format: str = "auto",
        media: MediaTexts | None = None,
        origin: str = "the chat template",
    ) -> None:
        environment = make_environment()
        self._origin = origin
        self._template = _compiled(environment, source, origin)
        self.source = source
        tree = environment.parse(source)
        self._aliases = {} if _contains_word(tree, "developer") else ROLE_ALIASES
        undeclared = meta.find_undeclared_variables(tree)  # modifies the tree by folding constants
        self.variables = frozenset(undeclared) - environment.globals.keys()
        self._for_tools = for_tools
        if for_tools is not None:
            self.variables |= for_tools.variables | {"tools"}
        self._tokens = {**(named_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._media = media
        special = frozenset(special_tokens)
        self._unsplit = [] if media is None else [text for text in media.literals if text not in special]
        self._literals = SpecialTokenTexts(special.union(self._unsplit))
        self._reads_name: dict[str, bool] = {}
        self._takes_first: dict[str, bool] = {}
        self._takes_later: dict[str, bool] = {}
        self._id_forms = forms_of(source)
        self._wants_parts = content_format == "openai" or (
            content_format == "auto"
            and not self._shows(PROBE)
            and self._shows([{"type": "text", "text": PROBE}])
        )
        self._media_parts = {
            kind: self._find_media_part(marker, SHOWN_PARTS[kind]) for kind, marker in self._markers.items()
        }
        place = place_of_tools(tree, self.variables, self._shows_tools)
        self._tool_place = place or TOOLS_VARIABLE
        if place is not None:
            self.variables |= {"tools"}

    def reads_name(self, role: str) -> bool:
        """Return whether a message's `name` affects the prompt for this role; probed once per role."""
        role = self._aliases.get(role, role)
        if role in ROLES and role not in self._reads_name:
            message = {"role": role, "content": "x"}
            self._reads_name[role] = self._distinguishes(message, {**message, "name": PROBE})
        return self._reads_name.get(role, True)

    def takes_first(self, role: str) -> bool:
        """Return whether a message of this role is shown at the beginning of a conversation; probed once."""
        if role not in self._takes_first:
            self._takes_first[role] = self._may_show(role, [], [USER])
        return self._takes_first[role]

    def takes_later(self, role: str) -> bool:
        """Return whether a message of this role is shown after a user's and an assistant's; probed once."""
        if role not in self._takes_later:
            behind_user = self._may_show(role, [USER], [ASSISTANT, USER])
            self._takes_later[role] = behind_user and self._may_show(role, [USER, ASSISTANT], [USER])
        return self._takes_later[role]

    @staticmethod
    def from_tokenizer(
        tokenizer: TemplateTokenizer,
        override: str | Path | None = None,
        content_format: str = "auto",
        media: MediaTexts | None = None,
    ) -> ChatTemplate:
        """Return the model's own template, or `override`: the name of one of its templates, a file, or template text.

        Raises:
            ValidationError: there is neither.
            ConfigError: the file does not exist, or the template is invalid.
        """
        named = tokenizer.chat_templates
        source = named.get("default" if override is None else str(override))
        origin = CHECKPOINTS if override is None else f"{CHECKPOINTS} {str(override)!r:.60}"
        if source is None and override is not None:
            source, origin = read_template(override, named), "the chat template of --chat-template"
        if source is None:
            raise ValidationError(
                "the model has no chat template; start the server with --chat-template", param="messages"
            )
        facts: dict[str, Any] = {
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
            "named_tokens": tokenizer.named_tokens,
            "special_tokens": tokenizer.special_tokens,
            "content_format": content_format,
            "media": media,
        }
        with_tools = named.get(FOR_TOOLS) if override is None else None
        name = f"{CHECKPOINTS} {FOR_TOOLS!r}"
        for_tools = None if with_tools is None else ChatTemplate(with_tools, **facts, origin=name)
        return ChatTemplate(source, **facts, for_tools=for_tools, origin=origin)

    def check_defaults(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigError unless the template reads all these options."""
        unknown = sorted(options.keys() - (self.variables - OWN_VARIABLES))
        if unknown:
            known = ", ".join(sorted(self.variables - OWN_VARIABLES)) or "none"
            raise ConfigError(
                f"--default-chat-template-kwargs has {unknown[0]!r}, but the template's options are: {known}"
            )

    @property
    def all_sources(self) -> str:
        """Text of this template and of the one for tools."""
        return self.source + (self._for_tools.source if self._for_tools is not None else "")

    def render(
        self,
        messages: Conversation,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """Return the prompt as text for display; `encode` is for the model.

        Raises:
            ValidationError: a message or option is invalid, or the template rejected the conversation.
        """
        options = {"tools": tools, "documents": documents, **chat_template_kwargs}
        return self._render(messages, options, add_generation_prompt, continue_final_message).text

    def try_render(self, messages: Conversation, /, **options: Any) -> str | None:
        """Return the prompt, ignoring options that the template does not read; None if it cannot be rendered."""
        if self._for_tools is not None and options.get("tools"):
            return self._for_tools.try_render(messages, **options)
        messages, options = self._tool_place.put(messages, options)
        if self._wants_parts:
            messages = [with_parts(message) for message in messages]
        known = {name: options[name] for name in options.keys() & (self.variables | OWN_VARIABLES)}
        context = {**self._tokens, "tools": None, "documents": None, **known, "messages": messages}
        try:
            return _bounded_join(self._template.generate(context))
        except Exception:  # untrusted template code; its failure is the answer
            return None

    def compose(
        self,
        messages: Conversation,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> RenderedChat:
        """Return the prompt, ready for tokenization.

        Raises:
            ValidationError: as `render`.
        """
        options = {"tools": tools, "documents": documents, **chat_template_kwargs}
        return self._render(messages, options, add_generation_prompt, continue_final_message)

    def compose_pair(
        self, query: str, document: str, instruction: str, options: Mapping[str, Any]
    ) -> RenderedChat:
        """Return the prompt of a text pair, for a reranker's template with one message per role.

        A non-empty instruction is the system message.

        Raises:
            ValidationError: the template rejected them.
        """
        fields = {"system": instruction, "query": query, "document": document}
        messages = [{"role": role, "content": content} for role, content in fields.items() if content]
        plain = PlainText(self._literals, [messages])
        protected = [{**plain.protect(message), "role": message["role"]} for message in messages]
        return RenderedChat(
            plain, self._run(plain, {"add_generation_prompt": False, **options, "messages": protected})
        )

    def encode(self, tokenizer: TextEncoder, messages: Conversation, /, **options: Any) -> list[int]:
        """Return the token ids of `compose` with the same arguments."""
        return self.compose(messages, **options).encode(tokenizer)

    def _render(
        self,
        messages: Conversation,
        options: dict[str, Any],
        add_generation_prompt: bool,
        continue_final: bool,
    ) -> RenderedChat:
        if continue_final and add_generation_prompt:
            raise ValidationError(
                "continue_final_message needs add_generation_prompt false", param="continue_final_message"
            )
        if self._for_tools is not None and options.get("tools"):
            return self._for_tools._render(messages, options, add_generation_prompt, continue_final)
        options = {name: value for name, value in options.items() if value is not None}
        self._check_options(options)
        adjusted: Adjusted = {}
        media = self._shown_media([messages, options])
        checked = checked_messages(messages, self._aliases, adjusted, media.marks)
        checked, options = self._tool_place.put(checked, options)
        plain = PlainText(self._literals, [checked, options], self._unsplit)
        variables = {**plain.protect(options), "add_generation_prompt": add_generation_prompt}
        refusal: TemplateFailureError | None = None
        for arrangement in self._arrangements(checked, media, keeps_last=continue_final):
            try:
                rendered = self._run_arrangement(plain, variables, arrangement, continue_final, media)
            except TemplateFailureError as error:
                refusal = refusal or error
                continue
            return RenderedChat(plain, rendered, {**adjusted, **arrangement.adjusted}, self._markers)
        assert refusal is not None, "there is always an arrangement"
        raise refusal

    def _arrangements(
        self, messages: list[ChatMessage], media: ShownMedia, *, keeps_last: bool
    ) -> Iterator[Arrangement]:
        """Yield the variants of a conversation that this template may accept, the client's own first."""
        forms = [messages]
        if have_calls(messages):
            forms = [with_call_ids(messages, form) for form in self._id_forms]
            forms.append(with_argument_texts(forms[-1]))
        for form in forms:
            yield from arrangements(form, self, keeps_last=keeps_last)
        if any(message["role"] == "tool" and media.is_in(message["content"]) for message in messages):
            for form in forms:
                for arrangement in arrangements(form, self, keeps_last=keeps_last):
                    yield arrangement.with_text_results()

    def _run_arrangement(
        self,
        plain: PlainText,
        variables: dict[str, Any],
        arrangement: Arrangement,
        continue_final: bool,
        media: ShownMedia,
    ) -> str:
        messages = arrangement.messages
        last = len(messages) - 1 if continue_final else None
        conversation = [
            _shown(
                message,
                plain,
                media,
                plain.end if index == last else "",
                as_text=arrangement.has_text_results and message["role"] == "tool",
            )
            for index, message in enumerate(messages)
        ]
        rendered = self._run(plain, {**variables, "messages": conversation})
        rendered = _cut_at(plain.end, rendered) if continue_final else rendered
        self._check_media(plain, rendered, media.counts(messages))
        return rendered

    @property
    def _markers(self) -> Mapping[str, str]:
        return NO_MARKERS if self._media is None else self._media.markers

    def _shown_media(self, values: Any) -> ShownMedia:
        """Return the form of media in a conversation; without marks if the model takes none."""
        markers = self._markers
        marks = unused_marks(values, len(markers)) if markers else []
        return ShownMedia(dict(zip(markers, marks, strict=True)), markers, self._media_parts)

    def _check_media(self, plain: PlainText, rendered: str, counts: Mapping[str, int]) -> None:
        """Raise TemplateFailureError unless the prompt has a marker for each item, and no other."""
        for kind, wanted in counts.items():
            if (found := len(plain.places_of(self._markers[kind], rendered))) == wanted:
                continue
            name = SHOWN_NAMES[kind]
            raise TemplateFailureError(
                f"the chat template shows {found} of the {wanted} {name} of the messages; {name} may be where it takes "
                "none, such as in system or tool messages",
                param="messages",
            )

    def _check_options(self, options: dict[str, Any]) -> None:
        for name in options:
            if name in ("tools", "documents"):
                if name not in self.variables:
                    raise ValidationError(f"the model's chat template has no place for {name}", param=name)
            elif name in OWN_VARIABLES or name not in self.variables:
                known = ", ".join(sorted(self.variables - OWN_VARIABLES))
                raise ValidationError(
                    f"chat_template_kwargs has {name!r:.60}, but the template's options are: {known or 'none'}",
                    param="chat_template_kwargs",
                )

    def _run(self, plain: PlainText, variables: dict[str, Any]) -> str:
        if self._wants_parts:
            variables["messages"] = [with_parts(message) for message in variables["messages"]]
        context = {**self._tokens, "tools": None, "documents": None, **variables}
        try:
            return _bounded_join(self._template.generate(context))
        except ValidationError:
            raise
        except TemplateRefusalError as error:
            reason = f"the chat template refused the messages: {plain.unmark(error.message or '')}"
            raise TemplateFailureError(reason, param="messages") from None
        except Exception as error:  # untrusted template code may raise anything
            # The error's text and arguments are omitted: they may quote the messages.
            logger.warning(
                "%s failed with %s at its line %s", self._origin, type(error).__name__, _line_of(error)
            )
            raise TemplateFailureError(
                "the chat template failed on these messages", param="messages"
            ) from None


def _contains_word(tree: nodes.Template, word: str) -> bool:
    """Return whether a template contains this string constant, for instance a role."""
    return any(constant.value == word for constant in tree.find_all(nodes.Const))


def read_template(template: str | Path, names: Iterable[str] = ()) -> str:
    """Return the text of a template given as a file name or as text.

    Raises:
        ConfigError: it looks like the name of a file that does not exist, or the file is not valid Jinja.
    """
    text = str(template)
    if "{" in text or "\n" in text:
        return text
    try:
        source = read_text(Path(text))
    except ModelLoadError as error:
        raise ConfigError(
            f"--chat-template {text} is neither a readable file nor template text{_known(names)}: {error}"
        ) from None
    _compiled(make_environment(), source, f"--chat-template {text}")  # names the file, unlike a later error
    return source


def _compiled(environment: Environment, source: str, origin: str) -> Template:
    """Compile a template.

    Args:
        origin: its name in messages.

    Raises:
        ConfigError: it is invalid.
    """
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"{origin} is not valid Jinja: line {error.lineno}: {error.message}; {INSTEAD}"
        ) from None
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{origin} cannot be compiled: {type(error).__name__}; {INSTEAD}") from error


def _line_of(error: BaseException) -> int | str:
    """Return the template's line that failed."""
    lines = [number for frame, number in traceback.walk_tb(error.__traceback__) if _is_template(frame)]
    return lines[-1] if lines else "?"


def _is_template(frame: FrameType) -> bool:
    """Return whether a frame belongs to a template; Jinja uses these names without a file."""
    return frame.f_code.co_filename in ("<template>", "<unknown>")


def _known(names: Iterable[str]) -> str:
    return "".join(f" nor {name}" for name in names)


def _shown(
    message: ChatMessage, plain: PlainText, media: ShownMedia, end: str, *, as_text: bool
) -> ChatMessage:
    """Return a message as the template reads it, its texts protected."""
    content = message["content"]
    if media.is_in(content):
        rest = {name: value for name, value in message.items() if name != "content"}
        shown = media.shown(plain, content, end, as_text=as_text)
        return {**plain.protect(rest), "role": message["role"], "content": shown}
    protected = {**plain.protect(message), "role": message["role"]}
    return {**protected, "content": protected["content"] + end} if end else protected


def _bounded_join(pieces: Iterable[str]) -> str:
    kept, num_chars = [], 0
    for piece in pieces:
        kept.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise ValidationError(
                f"the chat template produces more than {MAX_RENDERED_CHARS} characters from these messages",
                param="messages",
            )
    return "".join(kept)


def _cut_at(end: str, rendered: str) -> str:
    """Cut the prompt inside its last message, where the model continues."""
    kept, found, _ = rendered.rpartition(end)
    if not found:
        raise ValidationError(
            "the chat template does not show the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return kept
