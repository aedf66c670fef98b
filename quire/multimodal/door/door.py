# SPDX-License-Identifier: Apache-2.0
"""`MediaDoor`: media of requests to files with processed arrays, and to placeholders in prompts.

Invariant: the event loop never decodes, hashes or reads files; threads and killable processes do. Bytes of one item, of
one request and of all requests at once are bounded, as are the pixels of a request. An item's digest covers its bytes,
its options, the checkpoint's files and the decoders' versions: all that its arrays depend on. A client's name of an
item (`uuid`) is only ever a reference to a digest, and belongs to its tenant.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import math
import os
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL
from PIL import Image

from quire import private_directories
from quire.config import EngineConfig
from quire.config.multimodal import MAX_ITEMS
from quire.errors import ConfigError, UnavailableError, ValidationError
from quire.multimodal.arrays import array_of
from quire.multimodal.door.decoding import (
    AUDIO,
    EMBEDS,
    FRAMES,
    IMAGE,
    ITEM_KINDS,
    MAX_PIXELS,
    RAW,
    VIDEO,
    check_size,
    in_eight_bits,
    name_of,
)
from quire.multimodal.door.fetch import fetch
from quire.multimodal.door.files import Lease, MediaFiles
from quire.multimodal.door.frames import FrameFacts, read_frames
from quire.multimodal.door.jobs import DecodeJob, DecodeReply, DecodeSetup
from quire.multimodal.door.layout import MediaTokens, PreparedItem
from quire.multimodal.door.parts import MediaPart
from quire.multimodal.door.pool import DecodePool, Ticket
from quire.multimodal.door.sources import (
    HTTP,
    MAX_ITEM_BYTES,
    read_base64,
    read_data_url,
    read_file,
    read_file_url,
    read_own_file,
    scheme_of,
)
from quire.multimodal.processors.base import BESIDE_IMAGES, Processor, make_processor
from quire.multimodal.processors.files import check_options
from quire.multimodal.processors.pixels import as_rgb

T = TypeVar("T")
NUM_PROCESSES = 2
LIMIT_S = 30.0
LONG_LIMIT_S = 120.0  # Of a video or a sound.
MEMORY_BYTES = 2 * 2**30
MAX_REQUEST_BYTES = 256 * 2**20
MAX_BYTES_AT_ONCE = 512 * 2**20
MAX_REQUEST_PIXELS = 4 * MAX_PIXELS
MAX_VIDEO_PIXELS = 2**31  # Of all frames that are read, in their own size: some 1,000 of 1080 lines.
NO_AV = "videos need PyAV on the server: pip install 'quire-llm[av]'"
MAX_REQUEST_SECONDS = 2 * 3600.0
MAX_NAMES = 2**16
DECODERS = ("av", "soundfile", "soxr")
_ARTICLES = {IMAGE: "an image", VIDEO: "a video", AUDIO: "a sound"}
FILES = (
    *("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"),
    "video_preprocessor_config.json",
)


@dataclass(frozen=True)
class AdmittedMedia:
    """Processed media of one request; its files live as long as this object."""

    items: list[PreparedItem]
    leases: list[Lease] = field(repr=False)


@dataclass
class _Totals:
    """Bytes and pixels of one request so far."""

    num_bytes: int = 0
    num_pixels: int = 0
    num_video_pixels: int = 0
    num_seconds: float = 0.0

    def add_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > MAX_REQUEST_BYTES:
            raise ValidationError(
                f"the media of the request have more than {MAX_REQUEST_BYTES} bytes, the limit of one request",
                param="messages",
            )

    def add_pixels(self, num_pixels: int, kind: str) -> None:
        if kind in (VIDEO, FRAMES):
            self.num_video_pixels += num_pixels
        else:
            self.num_pixels += num_pixels
        if self.num_video_pixels > MAX_VIDEO_PIXELS:
            raise ValidationError(
                f"the frames that would be read of the request's videos have more than {MAX_VIDEO_PIXELS} pixels, the "
                "limit of one request",
                param="messages",
            )
        if self.num_pixels > MAX_REQUEST_PIXELS:
            raise ValidationError(
                f"the images of the request have more than {MAX_REQUEST_PIXELS} pixels, the limit of one request",
                param="messages",
            )

    def add_seconds(self, num_seconds: float) -> None:
        self.num_seconds += num_seconds
        if self.num_seconds > MAX_REQUEST_SECONDS:
            raise ValidationError(
                f"the sounds of the request are longer than {MAX_REQUEST_SECONDS:g} s, the limit of one request",
                param="messages",
            )

    def left_for(self, kind: str) -> int:
        """Return the most pixels that one more item may have."""
        if kind in (VIDEO, FRAMES):
            return MAX_VIDEO_PIXELS - self.num_video_pixels
        return min(MAX_PIXELS, MAX_REQUEST_PIXELS - self.num_pixels)


@dataclass(frozen=True)
class _Content:
    """Bytes of an item, encoded or RGB; `size` and `facts` are those of `DecodeJob`."""

    kind: str
    data: bytes
    size: tuple[int, ...] = ()
    facts: FrameFacts = field(default_factory=FrameFacts)

    @property
    def item_kind(self) -> str:
        """Kind of the item that it becomes."""
        return ITEM_KINDS.get(self.kind, self.kind)


class ByteBudget:
    """Bytes in memory over all requests; a request waits, in order, until there is room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold this many bytes; they must not exceed the limit."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._used + num_bytes <= self._limit)
            self._used += num_bytes
        try:
            yield
        finally:
            self._used -= num_bytes
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self._freed:
            self._freed.notify_all()


class MediaDoor:
    """Admission of media. Coroutines run on one event loop; `close` may be called from anywhere.

    Args:
        processor: of the checkpoint.
        directory: with the processor's files; a private one is removed at the end.
        offline: callers are this process: they may pass PIL images, arrays and paths.
        max_sound_bytes: most bytes of a sound's file.
    """

    def __init__(
        self,
        config: EngineConfig,
        processor: Processor,
        directory: Path,
        *,
        offline: bool = False,
        max_sound_bytes: int = MAX_ITEM_BYTES,
    ) -> None:
        self._config = config
        self._options = config.multimodal
        self.processor = processor
        self._offline = offline
        self._max_sound_bytes = max_sound_bytes
        self._architecture = architecture_of(config)
        self.files = MediaFiles(config.multimodal.processor_cache_bytes)
        self._setup = DecodeSetup(
            self._architecture, str(directory), self._options.mm_processor_kwargs, MEMORY_BYTES
        )
        self._pool = DecodePool(self._setup)
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="quire-media")
        self._readers = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="quire-media-read")
        self._budget = ByteBudget(MAX_BYTES_AT_ONCE)
        self._locks: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()
        self._names: OrderedDict[bytes, bytes] = OrderedDict()  # Named digest -> digest of the content.
        self._root = _root_digest(config, self._architecture, directory)
        private = None if directory == Path(config.model_dir) else directory
        self._end = weakref.finalize(self, _close, self._pool, private, self._threads, self._readers)

    @property
    def tokens(self) -> MediaTokens:
        """Tokens of the model's images, videos and sounds."""
        processor, videos, sounds = self.processor, self.processor.videos, self.processor.sounds
        of_videos = ("", "") if videos is None else (videos.marker, videos.placeholder)
        of_sounds = ("", "") if sounds is None else (sounds.marker, sounds.placeholder)
        others = () if sounds is None else sounds.literals
        literals = dict.fromkeys([*processor.literals, *filter(None, of_videos), *others])
        form = processor.prefix_form
        as_end = sounds is not None and sounds.stands_as_end
        return MediaTokens(
            processor.marker, processor.placeholder, tuple(literals), *of_videos, *of_sounds, form, as_end
        )

    @property
    def kinds(self) -> list[str]:
        """Kinds of media that the model takes."""
        processor = self.processor
        takes = {
            IMAGE: processor.takes_images,
            VIDEO: processor.videos is not None,
            AUDIO: processor.sounds is not None,
        }
        return [kind for kind, is_taken in takes.items() if is_taken]

    async def admit(
        self, parts: Sequence[MediaPart], options: Mapping[str, Any] | None = None, tenant: str = ""
    ) -> AdmittedMedia:
        """Read and process the media of a request, all at once.

        Args:
            options: `mm_processor_kwargs` of the request.
            tenant: owner of the names of items.

        Raises:
            ValidationError: an item cannot be read, decoded or processed, or a limit is exceeded; names the item.
            UnavailableError: no process can be started, or the door is closed.
        """
        if not self._end.alive:
            raise UnavailableError("media cannot be processed: the engine is shutting down")
        checked = {
            kind: self.processor.checked_options(options or {}, kind) for kind in (IMAGE, VIDEO, AUDIO)
        }
        parts = [self._named(part) for part in parts]
        self._check_kinds(parts)
        sounds = self.processor.sounds
        if sounds is not None and sounds.heeds_images and any(part.kind == IMAGE for part in parts):
            checked[AUDIO] = {**checked[AUDIO], BESIDE_IMAGES: True}
        totals = _Totals()
        tasks = [
            asyncio.ensure_future(self._admit_one(part, checked[part.kind], tenant, totals)) for part in parts
        ]
        try:
            found = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return AdmittedMedia([item for item, _ in found], [lease for _, lease in found])

    def warm_up(self) -> None:
        """Start a process in the background, so that the first image does not wait for one."""
        if self._end.alive:
            self._threads.submit(self._pool.warm_up)

    def close(self) -> None:
        """End the processes and remove the files; idempotent."""
        self._end()
        self.files.close()

    def _named(self, part: MediaPart) -> MediaPart:
        """Return a part whose errors name its file, if it is one of the caller in this process."""
        source = os.fspath(part.source) if self._offline and isinstance(part.source, Path) else part.source
        is_text = isinstance(source, str) and not part.is_base64 and not part.is_embeds
        is_path = self._offline and is_text and not scheme_of(source)
        return replace(part, source=source, where=f"{source:.200}" if is_path else part.where)

    def _check_kinds(self, parts: Sequence[MediaPart]) -> None:
        for part in parts:
            if part.kind not in self.kinds:
                taken = " and ".join(f"{name_of(kind)}s" for kind in self.kinds)
                raise ValidationError(
                    f"{part.where} is {_ARTICLES[part.kind]}, and this model takes {taken}", param=part.where
                )
        for kind, count in Counter(part.kind for part in parts).items():
            limit = self._options.most_items(kind)
            if count > limit:
                raise ValidationError(
                    f"the request has {count} {name_of(kind)}s, the limit is {limit} (--limit-mm-per-prompt)",
                    param="messages",
                )

    async def _admit_one(
        self, part: MediaPart, options: dict[str, Any], tenant: str, totals: _Totals
    ) -> tuple[PreparedItem, Lease]:
        named = (tenant, part.kind, part.uuid)
        name = _framed(b"name", self._root, *(each.encode() for each in named), _canonical(options))
        if part.source is None:
            return self._known(part, name)
        async with self._reserved(part):
            content = await self._read(part, totals)
            digest = await self._in_thread(self._digest, content, options)
            item, lease = await self._processed(digest, content, options, part, totals)
        if part.uuid:
            self._remember(name, digest)
        return item, lease

    def _known(self, part: MediaPart, name: bytes) -> tuple[PreparedItem, Lease]:
        digest = self._names.get(name)
        item = None if digest is None else self.files.find(digest)
        if item is None:
            raise ValidationError(
                f"{part.where} has no data, and the server has no {name_of(part.kind)} of the uuid {part.uuid!r:.80} "
                "any more, with these options; send its data again",
                param=part.where,
            )
        return item, self.files.lease(item.digest)

    def _remember(self, name: bytes, digest: bytes) -> None:
        self._names[name] = digest
        self._names.move_to_end(name)
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    @asynccontextmanager
    async def _reserved(self, part: MediaPart) -> AsyncIterator[None]:
        """Hold the bytes that an item may have; those of a URL are unknown before they arrive."""
        is_remote = isinstance(part.source, str) and scheme_of(part.source) != "data" and not part.is_base64
        size = len(part.source) if isinstance(part.source, str) else 0
        async with self._budget.hold(MAX_ITEM_BYTES if is_remote else min(size, MAX_ITEM_BYTES)):
            yield

    async def _read(self, part: MediaPart, totals: _Totals) -> _Content:
        if part.is_embeds and not self._options.enable_mm_embeds:
            raise ValidationError(
                f"{part.where} holds embeddings, which this server does not accept (--enable-mm-embeds)",
                param=part.where,
            )
        if isinstance(part.source, str) and scheme_of(part.source) in HTTP and not part.is_base64:
            data = await fetch(part.source, self._options.allowed_media_domains, part.where)
            content = _Content(part.kind, data)
        else:
            content = await self._in_thread(self._read_here, part)
        if content.kind == AUDIO and len(content.data) > self._max_sound_bytes:
            raise ValidationError(
                f"{part.where} has {len(content.data)} bytes, the limit of a sound is {self._max_sound_bytes} "
                "(--max-audio-bytes)",
                param=part.where,
            )
        totals.add_bytes(len(content.data))
        if content.kind == RAW:
            totals.add_pixels(math.prod(content.size), RAW)
        if content.kind == VIDEO and importlib.util.find_spec("av") is None:
            raise ValidationError(f"{part.where}: {NO_AV}", param=part.where)
        return content

    def _read_here(self, part: MediaPart) -> _Content:
        source, where = part.source, part.where
        if self._offline and isinstance(source, bytes):
            return _Content(part.kind, source)
        if not isinstance(source, str):
            if part.kind == AUDIO:
                from quire.multimodal.door.sound import wav_of  # stands on quire.speech, which images do not

                return _Content(AUDIO, wav_of(source, where))
            return _raw_frames(source, where) if part.kind == VIDEO else _raw(source, where)
        if part.is_embeds:
            data = (
                read_data_url(source, where, EMBEDS)
                if scheme_of(source) == "data"
                else read_base64(source, where)
            )
            return _Content(EMBEDS, data)
        if part.is_base64:
            return _Content(part.kind, read_base64(source, where))
        match scheme_of(source):
            case "data":
                return _Content(part.kind, read_data_url(source, where, part.kind))
            case "file":
                return _Content(
                    part.kind, read_file_url(source, self._options.allowed_local_media_path, where)
                )
        if self._offline:
            allowed = self._options.allowed_local_media_path
            data = read_file(source, allowed, where) if allowed else read_own_file(source, where)
            return _Content(part.kind, data)
        raise ValidationError(
            f"{where} must be a URL that begins with data:, http:, https: or file:; before base64 belongs "
            "data:;base64,",
            param=where,
        )

    def _digest(self, content: _Content, options: dict[str, Any]) -> bytes:
        facts = content.facts
        shape = json.dumps([content.size, facts.fps, facts.num_frames, facts.chosen]).encode()
        return _framed(self._root, content.kind.encode(), shape, _canonical(options), content.data)

    async def _processed(
        self, digest: bytes, content: _Content, options: dict[str, Any], part: MediaPart, totals: _Totals
    ) -> tuple[PreparedItem, Lease]:
        lock = self._locks.get(digest)
        if lock is None:
            lock = self._locks[digest] = asyncio.Lock()
        async with lock:  # the same image twice at once is processed once
            item = self.files.find(digest)
            if item is None:
                reply = await self._decode(digest, content, options, totals)
                if reply.layout is None:
                    raise ValidationError(f"{part.where}: {reply.error}", param=reply.param or part.where)
                item = self.files.add(digest, content.item_kind, reply.layout, reply.num_bytes)
            lease = self.files.lease(digest)
        if content.kind == AUDIO:
            totals.add_seconds(item.layout.seconds)
        elif content.kind in (IMAGE, VIDEO, FRAMES):
            totals.add_pixels(item.layout.num_pixels, content.kind)
        return item, lease

    async def _decode(
        self, digest: bytes, content: _Content, options: dict[str, Any], totals: _Totals
    ) -> DecodeReply:
        ticket = Ticket()
        try:
            source = self.files.input_path()
        except OSError as error:
            raise UnavailableError(f"media cannot be stored: {error.strerror}") from None
        job = DecodeJob(
            content.kind,
            str(source),
            str(self.files.path_of(digest)),
            options,
            totals.left_for(content.kind),
            content.size,
            self._config.arch.media_size,
            content.facts.fps,
            content.facts.num_frames,
            content.facts.chosen,
            MAX_REQUEST_SECONDS - totals.num_seconds,
        )
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, self._run_job, job, content.data, ticket
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            ticket.cancel()
            await asyncio.wait([work])  # the process is dead: the file has one writer at a time
            raise

    def _run_job(self, job: DecodeJob, data: bytes, ticket: Ticket) -> DecodeReply:
        if ticket.is_cancelled():
            raise UnavailableError("the request was cancelled before its media were decoded")
        source = Path(job.input)
        try:
            source.write_bytes(data)
            return self._pool.run(job, ticket, LIMIT_S if name_of(job.kind) == IMAGE else LONG_LIMIT_S)
        except OSError as error:
            raise UnavailableError(f"media cannot be stored: {error.strerror}") from None
        finally:
            source.unlink(missing_ok=True)
            if ticket.is_cancelled():
                Path(job.output).unlink(missing_ok=True)

    async def _in_thread(self, function: Any, /, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *args)


def _close(pool: DecodePool, directory: Path | None, *threads: ThreadPoolExecutor) -> None:
    pool.close()
    if directory is not None:
        private_directories.remove(directory)
    for one in threads:
        one.shutdown(wait=False, cancel_futures=True)


def _raw(source: Any, where: str) -> _Content:
    """Return the RGB pixels of a PIL image, or of a uint8 array [H, W], [H, W, 3] or [H, W, 4]."""
    if not isinstance(source, Image.Image):
        source = _from_array(source, where)
    try:
        check_size(source.width, source.height, MAX_PIXELS)
        image = as_rgb(in_eight_bits(source))
    except ValidationError as error:
        raise ValidationError(f"{where}: {error.message}", param=where) from None
    return _Content(RAW, image.tobytes(), image.size)


def _raw_frames(source: Any, where: str) -> _Content:
    """Return the RGB pixels of frames that the caller has."""
    frames, facts = read_frames(source, where)
    try:
        check_size(frames.shape[2], frames.shape[1], MAX_PIXELS, VIDEO)
    except ValidationError as error:
        raise ValidationError(f"{where}: {error.message}", param=where) from None
    if frames.size > 3 * MAX_VIDEO_PIXELS:
        raise ValidationError(
            f"{where} has more than {MAX_VIDEO_PIXELS} pixels in all its frames", param=where
        )
    return _Content(FRAMES, frames.tobytes(), frames.shape[:3], facts)


def _from_array(source: Any, where: str) -> Image.Image:
    array = array_of(source)
    is_image = array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)))
    if not is_image or not array.size:
        raise ValidationError(
            f"{where} must be a PIL image, a path, a URL, the bytes of a file or a uint8 array [H, W, 3], got "
            f"{type(source).__name__}" + (f" of {array.dtype} {list(array.shape)}" if array.ndim else ""),
            param=where,
        )
    return Image.fromarray(array)


def _framed(*parts: bytes) -> bytes:
    """Return the SHA-256 of parts with their lengths, so that no two lists of parts are alike."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _canonical(options: Mapping[str, Any]) -> bytes:
    return json.dumps(options, sort_keys=True, default=repr).encode()


def _root_digest(config: EngineConfig, architecture: str, directory: Path) -> bytes:
    """Return the digest of what all items of a model depend on."""
    paths = [directory / name for name in FILES]
    contents = [path.read_bytes() if path.is_file() else b"" for path in paths]
    own = _canonical(config.multimodal.mm_processor_kwargs)
    decoders = f"{PIL.__version__} {' '.join(map(_version, DECODERS))}".encode()
    return _framed(b"quire media 1", architecture.encode(), own, decoders, *contents)


def _version(package: str) -> str:
    return "" if importlib.util.find_spec(package) is None else version(package)


def architecture_of(config: EngineConfig) -> str:
    """Return the architecture of the whole model; that of the language model if it is one alone."""
    part_of = config.arch.part_of
    return config.arch.architecture if part_of is None else part_of.architecture


def make_door(
    config: EngineConfig, *, offline: bool = False, max_sound_bytes: int = MAX_ITEM_BYTES
) -> MediaDoor | None:
    """Return the door of a model; None if it takes no media.

    Raises:
        StartupError: the files of its processor are malformed.
    """
    if config.arch.part_of is None or config.multimodal.language_model_only:
        return None
    _check_limits(config.multimodal.limit_mm_per_prompt)
    directory = _processor_directory(config)
    processor = make_processor(architecture_of(config), directory, config.multimodal.mm_processor_kwargs)
    if processor is None:
        return None
    check_options(config.multimodal.mm_processor_kwargs, processor, directory)
    return MediaDoor(config, processor, directory, offline=offline, max_sound_bytes=max_sound_bytes)


def _check_limits(limits: Mapping[str, Any]) -> None:
    """Raise ConfigError if a limit is that of no kind, or no number."""
    for kind, limit in limits.items():
        if kind not in (IMAGE, VIDEO, AUDIO):
            raise ConfigError(f"--limit-mm-per-prompt has {kind!r}; the kinds are image, video and audio")
        count = limit.get("count", MAX_ITEMS) if isinstance(limit, dict) else limit
        if type(count) is not int or count < 0:
            raise ConfigError(
                f"--limit-mm-per-prompt has {count!r:.60} for {kind}; it must be a number of items from 0 on"
            )


def _processor_directory(config: EngineConfig) -> Path:
    """Return the checkpoint's directory, or for a model in GGUF a private one with the files that it amounts to."""
    part_of = config.arch.part_of
    if part_of is None or not part_of.processor_files:
        return Path(config.model_dir)
    directory = private_directories.make("processor-")
    for name, values in json.loads(part_of.processor_files).items():
        (directory / name).write_text(json.dumps(values), encoding="utf-8")
    return directory
