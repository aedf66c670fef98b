# SPDX-License-Identifier: Apache-2.0
"""`MediaGate`: images, videos and sounds of conversations and prompts, for the server and for `LLM`.

Invariant: nothing of media is imported, and no process or directory is made, unless the model takes some. A model
that takes none, or a machine without Pillow, refuses them with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.config.arch import encoder_positions
from quire.entrypoints.chat.messages import MediaTexts
from quire.entrypoints.chat.template import RenderedChat
from quire.errors import ModelLoadError, UnsupportedModelError, ValidationError
from quire.inputs import ChatMessage, TokensPrompt
from quire.media import MediaItem
from quire.multimodal.door.parts import MediaPart, find_media, first_media

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer
    from quire.multimodal.door.door import AdmittedMedia, MediaDoor
    from quire.multimodal.door.layout import PreparedItem

logger = logging.getLogger(__name__)

TEXT_ONLY = "this model takes text only"
NO_PILLOW = "images and sounds need Pillow on the server: pip install 'quire-llm[vision]'"
PLURALS = {"image": "images", "video": "videos", "audio": "audios"}
"""Kind of media -> its other name in `multi_modal_data`; in the order of a prompt's markers (`MediaTexts.markers`)."""
OPTIONS = "mm_processor_kwargs"
IMAGE_TEMPLATE = (
    "{%- if messages|length != 1 -%}{{ raise_exception('the model reads one image and no conversation: send one "
    "message of the user') }}{%- endif -%}"
    "{%- for part in messages[0].content -%}{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}"
    "{%- endfor -%}"
)
"""Template of a model whose encoder reads an image: the text, which begins the decoder."""
ENCODER_PROMPT = "encoder_prompt"
PROMPT_FIELDS = ("multi_modal_data", OPTIONS, "multi_modal_uuids")


@dataclass(frozen=True)
class EncodedChat:
    """Token ids of a prompt, and the media at their places; `admitted` keeps the media's files alive.

    `parse` returns the text of an answer as a JSON object, if the prompt names a task about its image.
    """

    token_ids: list[int]
    media: list[MediaItem] = field(default_factory=list)
    admitted: AdmittedMedia | None = None
    parse: Callable[[str], dict[str, Any]] | None = None

    @property
    def num_media_tokens(self) -> Mapping[str, int]:
        """Positions that take an embedding, by "image", "video" and "audio"."""
        found = Counter[str]()
        for item in self.media:
            found[_kind_of(item)] += item.num_embeddings
        return found

    def as_prompt(self) -> TokensPrompt:
        """Return the prompt in the callers' form."""
        prompt = TokensPrompt(prompt_token_ids=self.token_ids)
        if self.media:
            prompt["media"] = self.media
        if self.admitted is not None:
            prompt["leases"] = [self.admitted]
        return prompt


@dataclass(frozen=True)
class ChatMedia:
    """Messages with their media taken out and processed."""

    messages: Sequence[ChatMessage]
    admitted: AdmittedMedia | None = None
    idle: Sequence[str] = ()


class MediaGate:
    """Door of a model's media, if it has one; else the reason why not.

    Args:
        config: resolved.
        offline: callers are this process: they may pass PIL images, arrays and paths.
        max_sound_bytes: most bytes of a sound's file; None: as of other media.
    """

    def __init__(
        self, config: EngineConfig, *, offline: bool = False, max_sound_bytes: int | None = None
    ) -> None:
        self._offline = offline
        self._limits = {} if max_sound_bytes is None else {"max_sound_bytes": max_sound_bytes}
        self._reason = TEXT_ONLY
        self._door = self._open(config)

    def _open(self, config: EngineConfig) -> MediaDoor | None:
        if config.model_arch is None or config.arch.part_of is None:
            return None
        if config.multimodal.language_model_only:
            self._reason = "only the language model is served (--language-model-only)"
            return None
        try:
            from quire.multimodal.door.door import make_door
        except ModuleNotFoundError as error:
            if error.name != "PIL":
                raise
            self._reason = NO_PILLOW
            return None
        try:
            return make_door(config, offline=self._offline, **self._limits)
        except (ModelLoadError, UnsupportedModelError) as error:
            logger.warning(
                "the model is served for text only, since its images or sounds cannot be processed: %s", error
            )
            self._reason = "this checkpoint's processor cannot be used; the server's log says why"
            return None

    @property
    def texts(self) -> MediaTexts | None:
        """Texts of the model's media; None if it takes none."""
        if self._door is None:
            return None
        tokens, processor = self._door.tokens, self._door.processor
        has_encoder = bool(processor.num_encoded) or processor.leads
        template = IMAGE_TEMPLATE.replace("MARKER", tokens.marker) if has_encoder else ""
        return MediaTexts(tokens.marker, tokens.literals, tokens.video_marker, tokens.sound_marker, template)

    @property
    def input_modalities(self) -> list[str]:
        """Kinds of input that the model takes."""
        return ["text"] if self._door is None else ["text", *self._door.kinds]

    async def admit(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any] | None, tenant: str = ""
    ) -> ChatMedia:
        """Take the media out of messages and process them.

        Args:
            options: `mm_processor_kwargs` of the request.
            tenant: owner of the names of media.

        Raises:
            ValidationError: the model takes no media, or one of them cannot be used; names it.
        """
        taken = self.without_media(messages, options)
        if taken is not None:
            return taken
        found = find_media(messages, offline=self._offline)
        door = self._required("messages")
        return ChatMedia(found.messages, await door.admit(found.parts, options, tenant), found.idle)

    def without_media(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any] | None
    ) -> ChatMedia | None:
        """Return messages that have no media; None if they have some.

        Raises:
            ValidationError: there are media, and the model takes none.
        """
        idle = [OPTIONS] if options else []
        if self._door is None:
            self._refuse(messages)
            return ChatMedia(messages, idle=idle)
        found = find_media(messages, offline=self._offline)
        return None if found.parts else ChatMedia(found.messages, idle=idle)

    def _refuse(self, messages: Sequence[ChatMessage]) -> None:
        """Raise ValidationError if any message has media."""
        found = first_media(messages)
        if found is not None:
            where, kind = found
            raise ValidationError(f"{where} is no text part: {self._reason}, got {kind!r}", param=where)

    def encode(self, chat: RenderedChat, tokenizer: Tokenizer, admitted: AdmittedMedia | None) -> EncodedChat:
        """Return the token ids of a rendered conversation, with the placeholders of its media.

        Raises:
            ValidationError: a text is not valid Unicode, or the placeholders do not match the media.
        """
        if self._door is not None and self._door.processor.leads:
            return self._encode_question(chat, tokenizer, admitted)
        if admitted is None or self._door is None:
            return EncodedChat(chat.encode(tokenizer))
        if self._door.processor.num_encoded:
            text = chat.with_media([""] * len(chat.media_kinds())).text
            return self._before_decoder(tokenizer.encode(text, add_special_tokens=False), admitted)
        items = _in_order(chat.media_kinds(), admitted.items)
        texts = _texts_of(items)
        return self._expanded(chat.with_media(texts).encode(tokenizer), tokenizer, items, admitted)

    def _encode_question(
        self, chat: RenderedChat, tokenizer: Tokenizer, admitted: AdmittedMedia | None
    ) -> EncodedChat:
        """Return a text that may name a task, for an encoder that reads an image before it.

        Raises:
            ValidationError: as `encode`, or the task does not go with the text beside it.
        """
        items = [] if admitted is None else _in_order(chat.media_kinds(), admitted.items)
        texts = _texts_of(items)
        task = self._required("prompt").processor.read_task(chat.with_media([""] * len(items)).text)
        text = chat.with_media(texts).text if task is None else "".join(texts) + task.text
        token_ids = tokenizer.encode(text) if text else []
        found = self._expanded(token_ids, tokenizer, items, admitted)
        if task is None or not items:
            return found
        return replace(found, parse=partial(task.parse, size=items[0].layout.size))

    def _before_decoder(self, token_ids: list[int], admitted: AdmittedMedia) -> EncodedChat:
        """Return the decoder's prompt with the image that its encoder reads.

        Raises:
            ValidationError: there is no image, or more than one.
        """
        if len(admitted.items) != 1:
            raise ValidationError(
                f"the model reads one image per prompt, got {len(admitted.items)}", param="messages"
            )
        (item,), rows = admitted.items, self._required("prompt").processor.num_encoded
        place = MediaItem(item.digest, item.kind, 0, encoder_positions(rows), [(0, rows)], item.path)
        return EncodedChat(token_ids, [place], admitted)

    def _expanded(
        self,
        token_ids: list[int],
        tokenizer: Tokenizer,
        items: list[PreparedItem],
        admitted: AdmittedMedia | None,
    ) -> EncodedChat:
        from quire.multimodal.door.layout import Expansion

        door = self._required("prompt")
        expansion = Expansion(door.tokens, tokenizer.id_of, items, tokenizer.eos_token_id)
        return EncodedChat(*expansion.expand(token_ids), admitted)

    async def prompt(self, prompt: Mapping[str, Any], tokenizer: Tokenizer) -> EncodedChat:
        """Return the token ids of a prompt of `LLM.generate` with `multi_modal_data`, and its media.

        Raises:
            ValidationError: the data have no valid form, or their number is not that of the markers.
        """
        parts = data_parts(prompt)
        door = self._required("multi_modal_data")
        admitted = await door.admit(parts, prompt.get(OPTIONS))
        markers = self.texts.markers if self.texts is not None else {}
        ids = prompt.get("prompt_token_ids")
        if door.processor.num_encoded:
            given = str(prompt.get("prompt") or "")
            ids = tokenizer.encode(given, add_special_tokens=False) if ids is None else list(ids)
            return self._before_decoder(ids, admitted)
        if ids is None:
            known = {marker: kind for kind, marker in markers.items()}
            given, leading = str(prompt.get("prompt", "")), next(iter(known), "")
            if door.processor.leads:
                given = self._question(given, leading, len(admitted.items))
            pieces = re.split(f"({'|'.join(map(re.escape, known))})", given)
            items = _checked_order([known[each] for each in pieces[1::2]], markers, admitted)
            pieces[1::2] = _texts_of(items)
            return self._expanded(tokenizer.encode("".join(pieces)), tokenizer, items, admitted)
        kinds = {tokenizer.id_of(marker): kind for kind, marker in markers.items()}
        items = _checked_order([kinds[each] for each in ids if each in kinds], markers, admitted)
        encoded: list[int] = []
        fill = iter(_texts_of(items))
        for token_id in ids:
            text = next(fill) if token_id in kinds else None
            encoded += [token_id] if text is None else tokenizer.encode(text, add_special_tokens=False)
        return self._expanded(encoded, tokenizer, items, admitted)

    def _question(self, given: str, marker: str, num_items: int) -> str:
        """Return a prompt with markers, and with a task in words."""
        task = self._required("prompt").processor.read_task(given.replace(marker, ""))
        count = given.count(marker)
        given = given if task is None else marker * count + task.text
        return given if count else marker * num_items + given

    def _required(self, where: str) -> MediaDoor:
        if self._door is None:
            raise ValidationError(f"{where} has media, which cannot be taken: {self._reason}", param=where)
        return self._door

    def warm_up(self) -> None:
        """Prepare for the first image, in the background."""
        if self._door is not None:
            self._door.warm_up()

    def close(self) -> None:
        """End processes and remove files; idempotent."""
        if self._door is not None:
            self._door.close()


def _texts_of(items: Sequence[PreparedItem]) -> list[str]:
    """Return the texts in place of markers, in which some items say their number."""
    from quire.multimodal.door.layout import NUMBER

    numbers = Counter[str]()
    texts = []
    for item in items:
        texts.append(item.layout.text.replace(NUMBER, str(numbers[item.kind])))
        numbers[item.kind] += 1
    return texts


def has_data(prompt: Any) -> bool:
    """Return whether a prompt has media of `LLM.generate`."""
    return isinstance(prompt, Mapping) and any(prompt.get(name) is not None for name in PROMPT_FIELDS)


def data_parts(prompt: Mapping[str, Any]) -> list[MediaPart]:
    """Return the images, videos and sounds of a prompt's `multi_modal_data`, in this order, with their names.

    Raises:
        ValidationError: it has another form, or another kind of media.
    """
    data, uuids = prompt.get("multi_modal_data") or {}, prompt.get("multi_modal_uuids") or {}
    for name, value in (("multi_modal_data", data), ("multi_modal_uuids", uuids)):
        if not isinstance(value, Mapping):
            raise ValidationError(f"{name} must be a dict such as {{'image': ...}}", param=name)
        if others := value.keys() - {*PLURALS, *PLURALS.values()}:
            raise ValidationError(
                f"{name} has {min(others)!r}, and the kinds are 'image', 'video' and 'audio'", param=name
            )
    return [part for kind in PLURALS for part in _parts_of(kind, data, uuids)]


def _parts_of(kind: str, data: Mapping[str, Any], uuids: Mapping[str, Any]) -> list[MediaPart]:
    plural = PLURALS[kind]
    items = _as_list(data.get(kind, data.get(plural)), kind)
    names = _as_list(uuids.get(kind, uuids.get(plural))) or [None] * len(items)
    if len(names) != len(items) or not all(isinstance(name, str | None) for name in names):
        raise ValidationError(
            f"multi_modal_uuids must have a text or None for each of the {len(items)} {plural}",
            param="multi_modal_uuids",
        )
    pairs = list(zip(items, names, strict=True))
    if any(item is None and not name for item, name in pairs):
        raise ValidationError(
            f"an item {kind!r} of multi_modal_data that is None needs a uuid", param="multi_modal_data"
        )
    return [
        MediaPart(f"multi_modal_data.{kind}.{index}", item, uuid=name or "", kind=kind)
        for index, (item, name) in enumerate(pairs)
    ]


def _as_list(value: Any, kind: str = "") -> list[Any]:
    """Return one or several items.

    A video may be a list of images, or a pair of frames and metadata; a sound may be a pair of samples and their rate.
    """
    if (kind == "video" and _is_one_video(value)) or (kind == "audio" and _is_one_sound(value)):
        return [value]
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _is_one_video(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return value is not None and not isinstance(value, list | tuple)
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)
    return is_pair or all(hasattr(each, "getbands") for each in value)  # PIL images


def _is_one_sound(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return value is not None
    is_pair = len(value) == 2 and isinstance(value[1], int | float) and not isinstance(value[0], int | float)
    return is_pair or (bool(value) and all(isinstance(each, int | float) for each in value))


def _checked_order(
    kinds: list[str], markers: Mapping[str, str], admitted: AdmittedMedia
) -> list[PreparedItem]:
    """Return the items in the order of a prompt's markers.

    Raises:
        ValidationError: there are more or fewer of a kind.
    """
    wanted = Counter(_kind_of(item) for item in admitted.items)
    for kind, marker in markers.items():
        if (found := kinds.count(kind)) != wanted[kind]:
            raise ValidationError(
                f"the prompt has {found} markers {marker!r} and {wanted[kind]} {PLURALS[kind]}; write one for each",
                param="prompt",
            )
    return _in_order(kinds, admitted.items)


def _in_order(kinds: Sequence[str], items: Sequence[PreparedItem]) -> list[PreparedItem]:
    """Return items in the order of their markers, of which there are as many of each kind."""
    queues = {kind: iter([item for item in items if _kind_of(item) == kind]) for kind in set(kinds)}
    return [next(queues[kind]) for kind in kinds]


def _kind_of(item: PreparedItem | MediaItem) -> str:
    """Return the kind by which an item is placed and counted; embeddings are those of images."""
    return item.kind if item.kind in PLURALS else "image"


class OfflineMedia:
    """`MediaGate` for callers without an event loop: its coroutines run on a loop of their own, in one thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.gate = MediaGate(config, offline=True)
        self._runner: asyncio.Runner | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-media-loop")

    def admit(self, messages: Sequence[ChatMessage], options: Mapping[str, Any] | None) -> ChatMedia:
        """As `MediaGate.admit`."""
        taken = self.gate.without_media(messages, options)
        if taken is not None:
            return taken
        return self._thread.submit(self._run, self.gate.admit, messages, options).result()  # type: ignore[no-any-return]

    def prompt(self, prompt: Mapping[str, Any], tokenizer: Tokenizer) -> EncodedChat:
        """As `MediaGate.prompt`."""
        return self._thread.submit(self._run, self.gate.prompt, prompt, tokenizer).result()  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the loop, the processes and the files; idempotent."""
        if self._runner is not None:
            self._thread.submit(self._close_loop).result()
        self.gate.close()

    def _run(self, function: Any, *args: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(function(*args))

    def _close_loop(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
