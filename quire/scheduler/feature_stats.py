# SPDX-License-Identifier: Apache-2.0
"""Statistics of features, in `SchedulerStats`."""

from __future__ import annotations

import msgspec


class SpecDecodingStats(msgspec.Struct, omit_defaults=True):
    """Totals of speculative decoding since start."""

    num_drafts: int = 0  # Drafts verified, each of one or more tokens.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []  # Per draft position: how often it was accepted.

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Count one verified draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        per_position = self.num_accepted_tokens_per_pos
        per_position.extend([0] * (num_accepted - len(per_position)))
        for place in range(num_accepted):
            per_position[place] += 1

    def copy(self) -> SpecDecodingStats:
        """Return a snapshot."""
        per_position = list(self.num_accepted_tokens_per_pos)
        return msgspec.structs.replace(self, num_accepted_tokens_per_pos=per_position)


class AdapterStats(msgspec.Struct, frozen=True):
    """Sorted adapter names of running and of waiting requests, and the most adapters that may run at a time."""

    running: list[str]
    waiting: list[str]
    limit: int


class TransferStats(msgspec.Struct, omit_defaults=True):
    """Transfers of one engine with others; counters are totals since start.

    Args:
        num_offers: finished requests whose blocks were offered.
        num_offered, num_unoffered: blocks of these that were kept, and those that were not.
        num_pulls: requests that were to be pulled; of them `num_failed_pulls` came in part or not at all.
        num_pulled: blocks that were loaded.
        num_leases, oldest_lease_s: leases that are held for other engines, and the age of the oldest in seconds.
    """

    num_offers: int = 0
    num_offered: int = 0
    num_unoffered: int = 0
    num_pulls: int = 0
    num_failed_pulls: int = 0
    num_pulled: int = 0
    num_leases: int = 0
    oldest_lease_s: float = 0.0


class StoreStats(msgspec.Struct, omit_defaults=True):
    """State of a store of KV cache blocks outside the engine; counters are totals since start, mostly of rows (blocks).

    Args:
        medium: its tier, as in KV events.
        num_hit_tokens: prompt tokens that finished requests took from it.
        num_unsaved: computed blocks that it was not given, or had no room for.
        num_timeouts: requests that did not wait for it any longer.
        num_rests: times at which it was left alone for a while; `is_resting`: it is so now.
        num_rows, num_bytes: what it has now.
        num_reloads: preempted requests that loaded their prefix again.
    """

    medium: str = ""
    num_hit_tokens: int = 0
    num_loaded: int = 0
    num_failed_loads: int = 0
    num_saved: int = 0
    num_unsaved: int = 0
    num_timeouts: int = 0
    num_rests: int = 0
    is_resting: bool = False
    num_rows: int = 0
    num_bytes: int = 0
    num_corrupt: int = 0
    num_evicted: int = 0
    num_reloads: int = 0


class EncoderStats(msgspec.Struct, omit_defaults=True):
    """State of the embeddings of images and other media; counters are totals since start.

    Args:
        num_bytes: of all embeddings, of which requests use `num_used_bytes`; `most_bytes` is the limit of the former.
        num_hits: items of new requests whose embeddings were there or being computed.
        num_misses: items of new requests that had to be encoded.
        num_items: kind -> items of new requests.
        num_failed: items that could not be encoded.
        encode_s: seconds that encoding took.
    """

    num_bytes: int = 0
    num_used_bytes: int = 0
    most_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_items: dict[str, int] = {}
    num_failed: int = 0
    encode_s: float = 0.0
