# SPDX-License-Identifier: Apache-2.0
"""Holds of requests whose media are being encoded, so that other requests go on meanwhile.

Between two steps the worker computes encoders for a slice of time. A request refers to the embeddings of all its items
from when there is room for them until it ends, so a preempted request needs no encoder again. Embeddings that no
request refers to stay until their room is needed.

Invariant: the worker has the embeddings of every request without a hold, because it drops only what it is asked to
drop, and this only drops what no request refers to. All embeddings, with those to come, fit the limit. Requests get
room in order of arrival; each hold ends with the embeddings, or with its request.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.messages import EngineCoreRequest
from quire.engine.step_loop import Clock
from quire.errors import ConflictError, ValidationError
from quire.executor.base import Executor
from quire.media import EncodeProgress, MediaItem
from quire.scheduler.explain import Cause
from quire.scheduler.feature_stats import EncoderStats
from quire.scheduler.holds import Hold
from quire.scheduler.output import RequestUpdate, SchedulerStats
from quire.scheduler.scheduler import Scheduler

DETAIL = "its media"
_MOST_TEXTS = 64  # Of one call of the executor.
IDLE_SLICE_S = 0.1
"""Time of a slice while no step waits for it: a new request or an abort waits for so long at most."""
STEP_SHARE = 0.75
"""Time of a slice by that of the last step, at most: streams take less than twice as long for a token."""


@dataclass(eq=False)
class EmbeddingEntry:
    """Embeddings of one content: encoded, or to be encoded for the requests that use it, in order of arrival.

    Each user has an item of its own, because the file of one may go with its request.
    """

    num_embeddings: int
    num_bytes: int
    is_ready: bool = False
    users: dict[str, MediaItem] = field(default_factory=dict)

    @property
    def item(self) -> MediaItem:
        """Item of the first user."""
        return next(iter(self.users.values()))


@dataclass(eq=False)
class User:
    """Request with media; `missing` are the digests for which it is held, once there is room for them."""

    request_id: str
    items: dict[bytes, MediaItem]
    missing: set[bytes] = field(default_factory=set)


class EmbeddingTable:
    """Table of the worker's embeddings, with the requests that use them; evicts what none uses.

    Attributes:
        most_bytes: limit of all entries.
        num_bytes: bytes of all entries.
        num_unused_bytes: bytes of the entries without a user, all of which are ready.
        unfinished: entries to be encoded, in the order in which requests got room.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = self.num_unused_bytes = 0
        self.unfinished: dict[bytes, EmbeddingEntry] = {}
        self._entries: dict[bytes, EmbeddingEntry] = {}
        self._unused: OrderedDict[bytes, EmbeddingEntry] = OrderedDict()  # least recently used first

    def get(self, digest: bytes) -> EmbeddingEntry | None:
        """Return the entry of a digest."""
        return self._entries.get(digest)

    def use(self, user: str, items: Sequence[MediaItem], bytes_each: int) -> list[bytes] | None:
        """Let a request use these items; returns the digests that were evicted for it, None if there is no room."""
        num_used = self.num_bytes - self.num_unused_bytes
        if num_used + self._num_further_bytes(items, bytes_each) > self.most_bytes:
            return None
        for item in items:
            entry = self._entries.get(item.digest)
            if entry is None:
                entry = EmbeddingEntry(item.num_embeddings, item.num_embeddings * bytes_each)
                self._entries[item.digest] = self.unfinished[item.digest] = entry
                self.num_bytes += entry.num_bytes
            elif self._unused.pop(item.digest, None) is not None:
                self.num_unused_bytes -= entry.num_bytes
            entry.users[user] = item
        return self._evict()

    def stop_using(self, user: str, digests: Iterable[bytes]) -> list[bytes]:
        """End a request's use; returns the digests of unfinished entries that no other request uses."""
        removed = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None:
                continue
            entry.users.pop(user, None)
            if not entry.users and entry.is_ready:
                self._unused[digest] = entry
                self.num_unused_bytes += entry.num_bytes
            elif not entry.users:
                self.remove(digest)
                removed.append(digest)
        return removed

    def finish(self, digest: bytes, num_bytes: int) -> list[bytes]:
        """Note that an entry is encoded and how large it is; returns the digests that were evicted for it."""
        entry = self.unfinished.pop(digest)
        self.num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes, entry.is_ready = num_bytes, True
        return self._evict()

    @property
    def has_ready(self) -> bool:
        """True if an entry is encoded."""
        return any(entry.is_ready for entry in self._entries.values())

    def clear_unused(self) -> list[bytes]:
        """Remove all entries without a user; returns their digests."""
        digests = list(self._unused)
        for digest in digests:
            self.remove(digest)
        return digests

    def remove(self, digest: bytes) -> None:
        """Remove an entry."""
        entry = self._entries.pop(digest)
        self.num_bytes -= entry.num_bytes
        self.unfinished.pop(digest, None)
        if self._unused.pop(digest, None) is not None:
            self.num_unused_bytes -= entry.num_bytes

    def check_integrity(self, users: set[str]) -> None:
        """Check the sums, and that these are the requests that use an entry; for tests.

        Raises:
            AssertionError: internal bug.
        """
        entries = self._entries
        found = {name for entry in entries.values() for name in entry.users}
        assert found == users, f"{found} use embeddings, and not {users}"
        assert self.num_bytes == sum(entry.num_bytes for entry in entries.values()), (
            "the bytes are miscounted"
        )
        assert self.num_bytes <= self.most_bytes, "the embeddings exceed their limit"
        unused = {digest for digest, entry in entries.items() if not entry.users}
        assert unused == self._unused.keys(), "entries without a user are not listed as such"
        unfinished = {digest for digest, entry in entries.items() if not entry.is_ready}
        assert unfinished == self.unfinished.keys(), "unfinished entries are not listed as such"
        assert self.num_unused_bytes == sum(entries[digest].num_bytes for digest in unused)

    def _num_further_bytes(self, items: Sequence[MediaItem], bytes_each: int) -> int:
        """Return the bytes by which the used entries grow with these items."""
        num = 0
        for item in items:
            entry = self._entries.get(item.digest)
            if entry is None:
                num += item.num_embeddings * bytes_each
            elif not entry.users:
                num += entry.num_bytes
        return num

    def _evict(self) -> list[bytes]:
        """Remove entries without a user until all fit the limit; returns their digests."""
        evicted = []
        while self.num_bytes > self.most_bytes and self._unused:
            digest = next(iter(self._unused))
            self.remove(digest)
            evicted.append(digest)
        return evicted


class MediaHolds(CoreFeature):
    """Encodings of one core, the embeddings that its worker has, and the requests that use them."""

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        self._bytes_each = config.embedding_bytes
        self._slice_s = config.multimodal.max_encoder_slice_ms / 1000
        self._step_began, self._step_s = clock(), 0.0
        self._table = EmbeddingTable(config.multimodal.encoder_cache_bytes)
        self._users: dict[str, User] = {}
        self._without_room: dict[str, User] = {}  # in order of arrival
        self._new: User | None = None  # until it is admitted
        self._stats = EncoderStats(most_bytes=self._table.most_bytes)

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"reset_encoder_cache": self.reset}

    def reset(self) -> bool:
        """Drop the embeddings that no request uses; false if some are in use."""
        self._end_gone()
        self._drop(self._table.clear_unused())
        return not self._users

    def check_new_weights(self) -> None:
        """Drop unused embeddings, which the old weights computed.

        Raises:
            ConflictError: requests use embeddings of the old weights.
        """
        self._end_gone()
        self._drop(self._table.clear_unused())
        if self._table.has_ready:
            raise ConflictError(
                "requests in flight use embeddings of images or other media that the old weights computed: pause with "
                "mode=wait or mode=abort"
            )

    def holds_for(self, message: EngineCoreRequest) -> list[Hold]:
        """Return the hold of a request with media.

        Raises:
            ValidationError: its embeddings exceed the limit even alone, or an item is that of another request with
                another number of embeddings.
        """
        self._new = None
        if not message.media:
            return []
        items = {item.digest: item for item in message.media}
        self._check(list(items.values()))
        self._new = User(message.request_id, items)
        return [Hold(_room_key(message.request_id), Cause.ENCODER_ROOM)]

    def admitted(self, request_id: str) -> None:
        """Give a new request its room, unless others wait for theirs."""
        user, self._new = self._new, None
        if user is None:
            return
        if request_id in self._users:  # a former request of this id, which has ended
            self._end(self._users[request_id])
        self._users[request_id] = self._without_room[request_id] = user
        for item in user.items.values():
            self._stats.num_items[item.kind] = self._stats.num_items.get(item.kind, 0) + 1
        if len(self._without_room) == 1 or self._shares_all(user):
            self._find_room(user)

    @property
    def has_work(self) -> bool:
        if any(not self._scheduler.has(name) for name in self._users):
            return True
        if self._scheduler.is_paused:
            return self._table.num_unused_bytes > 0
        return bool(self._table.unfinished)

    def stepped(self, updates: list[RequestUpdate]) -> None:
        """Measure the step, by which the next slice is limited."""
        self._step_s = self._clock() - self._step_began

    def advance(self) -> list[RequestUpdate]:
        """Encode for a slice of time, release the requests that have their embeddings, and end those that cannot."""
        updates = self._advance()
        self._step_began = self._clock()
        return updates

    def _advance(self) -> list[RequestUpdate]:
        self._end_gone()
        if self._scheduler.is_paused:
            self._drop(self._table.clear_unused())
            return []
        self._find_rooms()
        if not self._table.unfinished:
            return []
        start = self._clock()
        updates = self._encode(self._budget_s())
        self._stats.encode_s += self._clock() - start
        self._find_rooms()
        return updates

    def _budget_s(self) -> float:
        """Return the time of the next slice."""
        if not self._scheduler.has_work():
            return max(IDLE_SLICE_S, self._slice_s)
        return min(self._slice_s, STEP_SHARE * self._step_s)

    def _encode(self, slice_s: float) -> list[RequestUpdate]:
        """Encode item after item, so that it is known whose was in work if the core dies of one; texts together."""
        updates: list[RequestUpdate] = []
        left_s, until = slice_s, self._clock() + slice_s
        while entries := self._next_entries():
            self._executor.note_encoding([name for entry in entries for name in entry.users])
            progress = self._executor.encode_media([entry.item for entry in entries], left_s)
            updates += self._apply(progress)
            left_s = until - self._clock()
            if left_s <= 0 or len(progress.done) + len(progress.failed) < len(entries):
                break
        self._executor.note_encoding(())
        return updates

    def _next_entries(self) -> list[EmbeddingEntry]:
        """Return the next entry to be encoded, and if it is a text, the texts that follow it."""
        found: list[EmbeddingEntry] = []
        for entry in itertools.islice(self._table.unfinished.values(), _MOST_TEXTS):
            if found and entry.item.kind != "text":
                break
            found.append(entry)
            if entry.item.kind != "text":
                break
        return found

    def add_stats(self, stats: SchedulerStats) -> None:
        if not self._stats.num_items:
            return
        self._stats.num_bytes = self._table.num_bytes
        self._stats.num_used_bytes = self._table.num_bytes - self._table.num_unused_bytes
        stats.encoder = msgspec.structs.replace(self._stats, num_items=dict(self._stats.num_items))

    def check_integrity(self) -> None:
        """Check the table of embeddings against the requests; for tests."""
        self._table.check_integrity(self._users.keys() - self._without_room.keys())

    # Requests

    def _check(self, items: Sequence[MediaItem]) -> None:
        needed = sum(item.num_embeddings for item in items) * self._bytes_each
        if needed > self._table.most_bytes:
            raise ValidationError(
                f"the embeddings of the request's media take {needed} bytes, and the encoder cache has "
                f"{self._table.most_bytes}: send fewer or smaller ones, or start with a larger --encoder-cache-gb",
                param="media",
            )
        for item in items:
            known = self._table.get(item.digest)
            if known is not None and known.num_embeddings != item.num_embeddings:
                raise ValidationError(
                    f"an item of the request takes {item.num_embeddings} embeddings, and the same content in another "
                    f"request took {known.num_embeddings}",
                    param="media",
                )

    def _shares_all(self, user: User) -> bool:
        """Return whether other requests use all items of a request, which then needs no room."""
        return all((entry := self._table.get(digest)) and entry.users for digest in user.items)

    def _find_rooms(self) -> None:
        """Give room to requests in order of arrival, until one has to wait."""
        while self._without_room:
            if not self._find_room(next(iter(self._without_room.values()))):
                return

    def _find_room(self, user: User) -> bool:
        """Let a request use its items, and hold it for those that are not encoded; False if there is no room."""
        known = [entry for digest in user.items if (entry := self._table.get(digest)) is not None]
        evicted = self._table.use(user.request_id, list(user.items.values()), self._bytes_each)
        if evicted is None:
            return False
        del self._without_room[user.request_id]
        self._drop(evicted)
        self._stats.num_hits += len(known)
        self._stats.num_misses += len(user.items) - len(known)
        user.missing = user.items.keys() & self._table.unfinished.keys()
        now = self._clock()
        if user.missing:
            hold = Hold(_encoding_key(user.request_id), Cause.NOT_READY, DETAIL)
            self._scheduler.hold(user.request_id, hold, now)
        self._scheduler.release(_room_key(user.request_id), now)
        return True

    def _end_gone(self) -> None:
        """End the use of embeddings by requests that have ended."""
        for name in [name for name in self._users if not self._scheduler.has(name)]:
            self._end(self._users[name])

    def _end(self, user: User) -> None:
        del self._users[user.request_id]
        if self._without_room.pop(user.request_id, None) is None:
            self._drop(self._table.stop_using(user.request_id, user.items))

    # Encoding

    def _apply(self, progress: EncodeProgress) -> list[RequestUpdate]:
        """Note what was encoded and what could not be; returns the ends of requests."""
        updates = [one for digest, reason in progress.failed.items() for one in self._fail(digest, reason)]
        for digest in progress.done:
            entry = self._table.get(digest)
            if entry is None or entry.is_ready:
                continue
            self._drop(self._table.finish(digest, progress.num_bytes[digest]))
            if self._table.num_bytes > self._table.most_bytes:
                updates += self._fail(digest, "its embeddings exceed the encoder cache (--encoder-cache-gb)")
                continue
            self._release(digest, entry)
        return updates

    def _release(self, digest: bytes, entry: EmbeddingEntry) -> None:
        """Release the requests that miss nothing but these embeddings."""
        for name in entry.users:
            missing = self._users[name].missing
            missing.discard(digest)
            if not missing:
                self._scheduler.release(_encoding_key(name), self._clock())

    def _fail(self, digest: bytes, reason: str) -> list[RequestUpdate]:
        """End the requests that use an item that cannot be encoded."""
        entry = self._table.get(digest)
        if entry is None:
            return []
        self._stats.num_failed += 1
        kind, names = entry.item.kind, list(entry.users)
        updates = self._scheduler.finish_requests(names, "error", self._clock())
        for update in updates:
            update.error, update.refused = f"the {kind} cannot be used: {reason}", True
        for name in names:
            if name in self._users:
                self._end(self._users[name])
        if self._table.get(digest) is not None:
            self._table.remove(digest)
            self._drop([digest])
        return updates

    def _drop(self, digests: Sequence[bytes]) -> None:
        if digests:
            self._executor.drop_media(digests)


def _room_key(request_id: str) -> str:
    return f"media room {request_id}"


def _encoding_key(request_id: str) -> str:
    return f"media {request_id}"
