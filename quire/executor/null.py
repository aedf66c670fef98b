# SPDX-License-Identifier: Apache-2.0
"""Null executor: computes nothing, and checks everything that a worker takes on trust.

Its next token is a pure function of the preceding tokens and the request's seed, so an output does not depend on the
batch. In place of keys, values and states, each slot of its cache holds a fingerprint of all tokens up to that
position. A plan that would make a worker read wrong, stale or foreign cache content, or lose some while it is swapped
or copied, therefore fails here.

Invariant: a plan that violates `quire.scheduler.output` raises AssertionError; the checks are explicit, so that
`python -O` keeps them. A slot holds a fingerprint only if it was written, or copied with its block from one that was;
invalid ids and moves whose outcome would depend on their order raise AssertionError.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quire.adapters import AdapterRequest
from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.kv_cache.spec import (
    NULL_BLOCK_ID,
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVMemory,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from quire.media import EncodeProgress, MediaItem, chunk_end
from quire.scheduler.output import (
    STEP_PROTOCOL_VERSION,
    BranchedRow,
    ModelRunnerOutput,
    NewRequestData,
    Pooled,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)

Moves = list[tuple[int, int]]


def fingerprint(previous: int, token_id: int) -> int:
    """Return the fingerprint of a sequence plus one token: a step of Knuth's MMIX linear congruential generator."""
    return ((previous ^ (token_id + 1)) * 6364136223846793005 + 1442695040888963407) % 2**64


UNCHECKED = -1
"""Content from outside that is taken for what the plan says it is."""


class FingerprintTier:
    """Blocks of one tier: block id -> offset -> fingerprint."""

    def __init__(self, num_blocks: int) -> None:
        self._ids = range(NULL_BLOCK_ID + 1, num_blocks)
        self._blocks: dict[int, dict[int, int]] = {}

    def read(self, block_id: int, offset: int) -> int | None:
        """Return the fingerprint in a slot; None if there is none."""
        slots = self._blocks.get(block_id, {})
        return slots.get(offset, slots.get(UNCHECKED))

    def write(self, block_id: int, offset: int, value: int) -> None:
        self._blocks.setdefault(block_id, {})[offset] = value

    def content(self, block_id: int) -> dict[int, int]:
        """Return a copy of a block: offset -> fingerprint."""
        return dict(self._blocks.get(block_id, {}))

    def fill(self, block_id: int, content: Mapping[int, int]) -> None:
        """Replace a block's content."""
        self.check_ids([block_id], "filled")
        self._blocks[block_id] = dict(content)

    def check_ids(self, block_ids: list[int], who: str) -> None:
        """Raise AssertionError unless all are blocks that may be held."""
        check(all(block_id in self._ids for block_id in block_ids), f"{who}: no such blocks {block_ids}")

    def copy_to(self, other: FingerprintTier, moves: Moves) -> None:
        """Copy whole blocks, (source, target)."""
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        self.check_ids(sources, "copied from")
        other.check_ids(targets, "copied to")
        check(len(set(targets)) == len(targets), f"a block is written twice: {moves}")
        if other is self:
            check(set(sources).isdisjoint(targets), f"a block is read and written: {moves}")
        for source, target in moves:
            other._blocks[target] = self.content(source)


class FingerprintCache:
    """Fingerprints of the device and the host tier."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.device = FingerprintTier(num_blocks)
        self.host = FingerprintTier(num_host_blocks + 1)

    def move_blocks(self, plan: SchedulerOutput) -> None:
        """Copy blocks as a worker does before its forward pass, in the same order."""
        self.device.copy_to(self.host, plan.swap_outs)
        self.host.copy_to(self.device, plan.swap_ins)
        self.device.copy_to(self.device, plan.block_copies)


def check(condition: bool, message: str) -> None:
    """Assert, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


DEFAULT_NUM_BLOCKS = 16384
DEFAULT_VOCAB_SIZE = 32000
NUM_POOLED = 3  # Size of a pooled output.


CacheSlot = tuple[int, tuple[int, int]]  # (token position, (index in the block table, offset in the block))


def slots_read(spec: KVCacheSpec, start: int, end: int) -> Iterator[CacheSlot]:
    """Return the slots that the token at position `end` reads, from token `start` on."""
    if isinstance(spec, EncoderOnlySpec):
        return iter(())
    if isinstance(spec, RecurrentStateSpec):
        return ((position, (position // spec.block_size, 0)) for position in range(max(end - 1, 0), end))
    first = max(spec.first_block(end) * spec.block_size, start)
    return ((position, divmod(position, spec.block_size)) for position in range(first, end))


def slots_written(
    spec: KVCacheSpec, table: list[int], start: int, end: int, num_drafts: int = 0
) -> Iterator[CacheSlot]:
    """Return the slots written by computing tokens `start` to `end` (exclusive) and the drafts behind them."""
    if isinstance(spec, EncoderOnlySpec):
        return iter(())
    if not isinstance(spec, RecurrentStateSpec):
        return ((position, divmod(position, spec.block_size)) for position in range(start, end + num_drafts))
    indices = range(start // spec.block_size, (end - 1) // spec.block_size + 1)
    wanted = [i for i in indices if table[i] != NULL_BLOCK_ID or i == indices[-1]]
    return ((min((i + 1) * spec.block_size, end) - 1, (i, 0)) for i in wanted)


class _NullRow:
    """Worker row of one request; `fingerprints[i]` covers its adapter, tokens 0 to i and the media in their place."""

    def __init__(self, data: NewRequestData) -> None:
        self.request_id = data.request_id
        self.params = data.sampling_params
        self.pools = data.pooling_params is not None
        self.eos_token_ids = data.eos_token_ids
        self.num_prompt_tokens = data.num_prompt_tokens
        self.num_computed_tokens = data.num_computed_tokens
        self.block_ids = [list(ids) for ids in data.block_ids]
        self.adapter = None if data.adapter_request is None else data.adapter_request.key
        self.media = data.media
        self._contents = {position: item for item in data.media for position in range(item.start, item.end)}
        self._root = 0 if data.adapter_request is None else data.adapter_request.number
        self.token_ids: list[int] = []
        self.fingerprints: list[int] = []
        for token_id in data.token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        previous, item = self.fingerprints[-1] if self.fingerprints else self._root, None
        if self._contents:
            item = self._contents.get(len(self.token_ids))
        if item is not None:
            previous = fingerprint(previous, int.from_bytes(item.digest[:8], "big"))
        self.fingerprints.append(fingerprint(previous, token_id))
        self.token_ids.append(token_id)

    def truncate(self, num_tokens: int) -> None:
        del self.fingerprints[num_tokens:], self.token_ids[num_tokens:]


class NullExecutor(Executor):
    """Executor without a model, for tests of everything above it.

    It honors `min_tokens`, `allowed_token_ids`, `logprobs` and `prompt_logprobs` (as of a uniform distribution);
    other sampling parameters have no effect. `specs` and `vocab_size` are used if the config has no model. Pooled
    output is a function of the prompt alone. It proposes up to `max_drafts` drafts, the first of which are right; how
    many is a function of the tokens, too. Encoding an item takes a few slices, a function of its digest, of which a
    call with a time limit computes one; those of `failing_media` fail with the last.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        specs: Mapping[str, KVCacheSpec] | None = None,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        max_drafts: int = 0,
    ) -> None:
        super().__init__(config)
        self.max_drafts = max_drafts
        self.vocab_size = config.model_arch.vocab_size if config.model_arch else vocab_size
        self._specs = dict(specs or _default_specs(config))
        self._kv_config: KVCacheConfig | None = None
        self._cache = FingerprintCache(0, 0)
        self._rows: dict[str, _NullRow] = {}
        self._adapters: set[str] = set()
        self.failing_media: set[bytes] = set()
        self.embeddings: dict[bytes, int] = {}  # bytes by digest
        self._slices: dict[bytes, int] = {}  # computed, of items that are not done
        self._holders: Counter[int] = Counter()
        self._last_step_id = 0
        self._asleep: set[str] = set()
        self._has_new_weights = False
        self._submitted: deque[tuple[SchedulerOutput, frozenset[bytes]]] = deque()
        self._encoded: frozenset[bytes] = frozenset()  # when the plan being executed was submitted

    def load(self) -> None:
        pass

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._specs

    def kv_memory(self) -> KVMemory:
        """Return room for `DEFAULT_NUM_BLOCKS` blocks of all layers together."""
        block_bytes = sum(spec.block_bytes for spec in self._specs.values())
        return KVMemory(DEFAULT_NUM_BLOCKS * block_bytes, "null executor")

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        check(self._kv_config is None, "the cache is allocated once")
        self._kv_config = kv_config
        self._cache = FingerprintCache(kv_config.num_blocks, kv_config.num_host_blocks)

    def sleep(self, level: int) -> None:
        """Discard the cache."""
        check(not self._submitted, "sleep() while a step is in flight")
        check(not self._rows and not +self._holders, f"sleep() with rows {[*self._rows]}")
        self._asleep |= {"weights", "kv_cache"}
        self._cache = FingerprintCache(0, 0)

    def wake_up(self, tag: str) -> None:
        check(tag == "weights" or "weights" not in self._asleep, "a cache wakes after the weights")
        self._asleep.remove(tag)
        assert self._kv_config is not None
        if tag == "kv_cache":
            self._cache = FingerprintCache(self._kv_config.num_blocks, self._kv_config.num_host_blocks)

    def prepare_weights(self, model_dir: str) -> None:
        check("weights" not in self._asleep, "prepare_weights() while the weights are asleep")
        self._has_new_weights = True

    def commit_weights(self, *, keeps_cache: bool = False) -> None:
        """Discard the cache, whose content was computed with the old weights, unless requests go on with it."""
        check(self._has_new_weights, "commit_weights() without prepare_weights()")
        check(not self._submitted, "commit_weights() while a step is in flight")
        check(not self._rows and not +self._holders, f"commit_weights() with rows {[*self._rows]}")
        self._has_new_weights = False
        if "kv_cache" not in self._asleep and not keeps_cache:
            assert self._kv_config is not None
            self._cache = FingerprintCache(self._kv_config.num_blocks, self._kv_config.num_host_blocks)

    def drop_weights(self) -> None:
        self._has_new_weights = False

    def call_workers(self, name: str, args: Sequence[Any]) -> list[Any]:
        return [None]

    def prepare_adapter(self, request: AdapterRequest) -> Future[None]:
        """Register the adapter for the checks of plans."""
        self._adapters.add(request.key)
        return super().prepare_adapter(request)

    def drop_adapter(self, key: str) -> None:
        self._adapters.discard(key)

    def encode_media(self, items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        check("weights" not in self._asleep, "encode_media() while the weights are asleep")
        done, failed, has_budget = dict[bytes, int](), dict[bytes, str](), True
        for item in items:
            while has_budget and item.digest not in self.embeddings and item.digest not in failed:
                has_budget = math.isinf(budget_s)
                self._encode_slice(item, failed)
            if item.digest in self.embeddings:
                done[item.digest] = self.embeddings[item.digest]
        return EncodeProgress(list(done), failed, done)

    def _encode_slice(self, item: MediaItem, failed: dict[bytes, str]) -> None:
        count = self._slices[item.digest] = self._slices.get(item.digest, 0) + 1
        if count <= item.digest[-1] % 3:
            return
        del self._slices[item.digest]
        if item.digest in self.failing_media:
            failed[item.digest] = "its file is damaged"
            return
        self.embeddings[item.digest] = item.num_embeddings * self.config.embedding_bytes
        used, limit = sum(self.embeddings.values()), self.config.multimodal.encoder_cache_bytes
        check(used <= limit, f"the embeddings take {used} bytes of {limit}")

    def drop_media(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.embeddings.pop(digest, None)
            self._slices.pop(digest, None)

    def has_embeddings(self, item: MediaItem) -> bool:
        """Return whether an item was encoded when the plan being executed was submitted."""
        return item.digest in self._encoded

    def trust(self, block_ids: Sequence[int]) -> None:
        """Take the content of host blocks, which came from outside, for what later plans say it is."""
        for block_id in block_ids:
            self._cache.host.fill(block_id, {UNCHECKED: UNCHECKED})

    def submit(self, plan: SchedulerOutput) -> None:
        """Keep the plan until its result is requested, the latest time at which a worker may start it."""
        check(not self._asleep, f"step {plan.step_id} came while {self._asleep} are asleep")
        self._submitted.append((plan, frozenset(self.embeddings)))

    def collect(self) -> ModelRunnerOutput:
        """Check the plan, then apply it as a worker does, without the model.

        Raises:
            AssertionError: the plan is inconsistent with itself, with earlier plans or with the cache.
        """
        plan, self._encoded = self._submitted.popleft()
        self._check_header(plan)
        self._last_step_id = plan.step_id
        self._branch_rows(plan)
        for request_id in plan.removed_request_ids:
            self._remove_row(request_id)
        new = {data.request_id for data in plan.new_requests}
        for scheduled in plan.scheduled:
            if scheduled.request_id not in new:
                self._drop_unread_blocks(scheduled.request_id)
        self._move_blocks(plan)
        for branch in plan.branches:
            self._hold_branched(branch)
        for data in plan.new_requests:
            self._add_row(data)
        for scheduled in plan.scheduled:
            self._grow_row(scheduled)
        check(len(self._rows) <= self.config.scheduler.max_num_seqs, f"{len(self._rows)} rows are too many")
        adapters = {row.adapter for row in self._rows.values() if row.adapter}
        check(len(adapters) <= self.config.max_adapters, f"the rows have too many adapters: {adapters}")
        output = ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids={})
        for scheduled in plan.scheduled:
            self._run_row(self._rows[scheduled.request_id], scheduled, output)
        if plan.max_decode_steps > 1:
            self._run_further(plan, output)
        return output

    def _run_further(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for scheduled in plan.scheduled:
            good = scheduled.num_tokens == scheduled.num_samples == 1
            check(good, f"{scheduled} is to run {plan.max_decode_steps} decode steps")
        for _ in range(1, self._num_decode_steps(plan)):
            for scheduled in plan.scheduled:
                self._decode_again(self._rows[scheduled.request_id], output)

    def _num_decode_steps(self, plan: SchedulerOutput) -> int:
        """Return a number of decode steps that the plan allows, a function of its first request's tokens."""
        drawn = self._rows[plan.scheduled[0].request_id].fingerprints[-1]
        return 1 + (drawn >> 11) % plan.max_decode_steps

    def _decode_again(self, row: _NullRow, output: ModelRunnerOutput) -> None:
        """Compute the token that was sampled last, and sample the next."""
        start = row.num_computed_tokens
        more = ModelRunnerOutput(step_id=output.step_id, sampled_token_ids={})
        self._run_row(row, ScheduledRequest(row.request_id, start, 1, 1, []), more)
        output.sampled_token_ids[row.request_id] += more.sampled_token_ids[row.request_id]
        if row.request_id in more.logprobs:
            output.logprobs[row.request_id] += more.logprobs[row.request_id]

    def _run_row(self, row: _NullRow, scheduled: ScheduledRequest, output: ModelRunnerOutput) -> None:
        """Compute, sample and report one planned chunk."""
        params, start = row.params, scheduled.start
        count = scheduled.num_tokens - len(scheduled.draft_token_ids)
        self._compute(row, count, scheduled)
        if params.prompt_logprobs is not None and start + 1 < row.num_prompt_tokens:
            about = row.token_ids[start + 1 : min(start + 1 + count, row.num_prompt_tokens)]
            output.prompt_logprobs[row.request_id] = self._uniform(about, params.prompt_logprobs)
        if scheduled.pools:
            output.pooled[row.request_id] = self._pool(row)
        if scheduled.num_samples:
            sampled = self._sample(row, scheduled.draft_token_ids)
            output.sampled_token_ids[row.request_id] = sampled
            if params.logprob_token_ids is not None:
                output.logprobs[row.request_id] = self._listed(sampled, params.logprob_token_ids)
            elif params.logprobs is not None:
                output.logprobs[row.request_id] = self._uniform(sampled, params.logprobs)
            if self.max_drafts:
                output.draft_token_ids[row.request_id] = self._propose(row)

    def _sample(self, row: _NullRow, drafts: list[int]) -> list[int]:
        """Sample and append tokens, up to the first that differs from its draft."""
        sampled: list[int] = []
        for draft in [*drafts, None]:
            sampled.append(self._next_token(row))
            row.append(sampled[-1])
            if sampled[-1] != draft:
                break
        assert self._kv_config is not None
        if self._kv_config.rolls_back:
            row.num_computed_tokens += len(sampled) - 1
        return sampled

    def _pool(self, row: _NullRow) -> Pooled:
        spec = self.config.pooling
        size = NUM_POOLED if spec is None else spec.size
        return Pooled.from_array([(fingerprint(row.fingerprints[-1], i) >> 33) / 2**31 for i in range(size)])

    def _propose(self, row: _NullRow) -> list[int]:
        """Propose drafts; their number, and how many are right, is a function of the row's tokens."""
        num_known, drawn = len(row.token_ids), row.fingerprints[-1] >> 7
        for _ in range(drawn % (self.max_drafts + 1)):
            row.append(self._next_token(row))
        drafts = row.token_ids[num_known:]
        row.truncate(num_known)
        num_right = drawn // 31 % (self.max_drafts + 1)
        return [token if i < num_right else (token + i) % self.vocab_size for i, token in enumerate(drafts)]

    def _check_header(self, plan: SchedulerOutput) -> None:
        check(self._kv_config is not None, "a plan came before the cache was allocated")
        version = STEP_PROTOCOL_VERSION
        check(plan.version == version, f"step protocol version {plan.version}, not {version}")
        check(plan.step_id > self._last_step_id, f"step {plan.step_id} after step {self._last_step_id}")
        planned = [request.request_id for request in plan.scheduled]
        check(len(set(planned)) == len(planned), f"a request is planned twice: {planned}")
        new = [data.request_id for data in plan.new_requests]
        check(len(set(new)) == len(new) and set(new) <= set(planned), f"{new} are new, and {planned} planned")
        budget = self.config.scheduler.max_num_batched_tokens
        check(plan.total_num_scheduled_tokens <= budget, f"the plan exceeds the budget of {budget} tokens")

    def _branch_rows(self, plan: SchedulerOutput) -> None:
        """Give rows of searches the tokens of others, and release the blocks that they give up."""
        tokens = [[*self._rows[one.parent_id].token_ids[:-1], one.token_id] for one in plan.branches]
        for branch, token_ids in zip(plan.branches, tokens, strict=True):
            row = self._rows[branch.request_id]
            check(len(row.token_ids) == len(token_ids), f"{branch} continues a row of another length")
            row.truncate(0)
            for token_id in token_ids:
                row.append(token_id)
            row.params = row.params.replace_unchecked(logprobs=branch.num_logprobs)
            if branch.block_ids:
                self._release(row)

    def _hold_branched(self, branch: BranchedRow) -> None:
        """Take the blocks of a row that continues another one."""
        if branch.block_ids:
            row = self._rows[branch.request_id]
            row.block_ids = [list(ids) for ids in branch.block_ids]
            for spec, ids in self._tables(row):
                self._hold(row, spec, ids, ids)
            self._check_reads(row, 0)

    def _remove_row(self, request_id: str) -> None:
        check(request_id in self._rows, f"{request_id} is removed and has no row")
        self._release(self._rows.pop(request_id))

    def _release(self, row: _NullRow) -> None:
        for ids in row.block_ids:
            self._holders.subtract(block_id for block_id in ids if block_id != NULL_BLOCK_ID)
        row.block_ids = [[] for _ in row.block_ids]

    def _move_blocks(self, plan: SchedulerOutput) -> None:
        written = {target for _, target in plan.swap_ins + plan.block_copies}
        check(len(written) == len(plan.swap_ins) + len(plan.block_copies), "a block is written twice")
        held = [block_id for block_id in written if self._holders[block_id]]
        check(not held, f"blocks {held} are written, and rows hold them")
        self._cache.move_blocks(plan)

    def _add_row(self, data: NewRequestData) -> None:
        check(data.request_id not in self._rows, f"{data.request_id} is new and has a row")
        assert self._kv_config is not None
        check(
            len(data.block_ids) == len(self._kv_config.groups), f"{data.request_id}: not one list per group"
        )
        row = self._rows[data.request_id] = _NullRow(data)
        check(row.adapter is None or row.adapter in self._adapters, f"{data.request_id}: no {row.adapter!r}")
        self._check_media(row)
        for spec, ids in self._tables(row):
            self._hold(row, spec, ids, ids)
        self._check_reads(row, 0)

    def _check_media(self, row: _NullRow) -> None:
        missing = [item.digest.hex() for item in row.media if not self.has_embeddings(item)]
        check(not missing, f"{row.request_id} is planned without the embeddings of {missing}")

    def _drop_unread_blocks(self, request_id: str) -> None:
        """Release blocks that a row reads no more, so that others may use them in this plan."""
        check(request_id in self._rows, f"{request_id} is not new and has no row")
        row = self._rows[request_id]
        for spec, table in self._tables(row):
            for index in range(min(spec.first_block(row.num_computed_tokens), len(table))):
                if table[index] != NULL_BLOCK_ID:
                    self._holders[table[index]] -= 1
                    table[index] = NULL_BLOCK_ID

    def _grow_row(self, scheduled: ScheduledRequest) -> None:
        row = self._rows[scheduled.request_id]
        if not any(scheduled.new_block_ids):
            return
        for (spec, ids), new_ids in zip(self._tables(row), scheduled.new_block_ids, strict=True):
            ids.extend(new_ids)
            self._hold(row, spec, ids, new_ids)

    def _tables(self, row: _NullRow) -> Iterator[tuple[KVCacheSpec, list[int]]]:
        assert self._kv_config is not None
        specs = [group.spec for group in self._kv_config.groups]
        return zip(specs, row.block_ids, strict=True)

    def _hold(self, row: _NullRow, spec: KVCacheSpec, table: list[int], new_ids: list[int]) -> None:
        """Take new blocks; null entries are allowed where nothing is read and where the spec permits them."""
        if not new_ids:
            return
        assert self._kv_config is not None
        held = [block_id for block_id in table if block_id != NULL_BLOCK_ID]
        check(len(set(held)) == len(held), f"{row.request_id}: a block is twice in {table}")
        num_old = len(table) - len(new_ids)
        num_unread = max(spec.first_block(row.num_computed_tokens) - num_old, 0)
        nulls = [index for index, block_id in enumerate(new_ids, num_old) if block_id == NULL_BLOCK_ID]
        missing = [i for i in nulls if spec.needs_block(i, row.num_computed_tokens, len(table))]
        good = all(block_id in range(self._kv_config.num_blocks) for block_id in new_ids) and not missing
        check(good and not any(new_ids[:num_unread]), f"{row.request_id}: no such blocks {new_ids}")
        self._holders.update(block_id for block_id in new_ids if block_id != NULL_BLOCK_ID)

    def _check_reads(self, row: _NullRow, start: int) -> None:
        for spec, table in self._tables(row):
            for position, place in slots_read(spec, start, row.num_computed_tokens):
                slot = self._slot(row, table, position, place)
                found = self._cache.device.read(*slot) in (row.fingerprints[position], UNCHECKED)
                check(found, f"{row.request_id}: {slot} does not hold the prefix to token {position}")

    def _check_scheduled(self, row: _NullRow, end: int, scheduled: ScheduledRequest) -> None:
        """Check a chunk; `end` is exclusive and without drafts."""
        who, num_known, num_drafts = row.request_id, len(row.token_ids), len(scheduled.draft_token_ids)
        expected = row.num_computed_tokens
        check(scheduled.start == expected, f"{scheduled}, but {expected} tokens are computed")
        check(scheduled.start < end, f"{who} is planned without tokens")
        check(end <= num_known, f"{who}: token {end} of {num_known} planned")
        is_last = end == num_known
        num_samples = 1 + num_drafts if is_last and not row.pools else 0
        check(scheduled.num_samples == num_samples, f"{scheduled}, which is to have {num_samples} samples")
        check(scheduled.pools == (is_last and row.pools), f"{scheduled}, which pools at its end, or never")
        check(num_drafts == 0 or num_samples > 0, f"{who}: drafts behind token {end} of {num_known}")
        limit, last = self.config.model.max_model_len - (not row.pools), end + num_drafts
        check(last <= limit, f"{who}: token {last} planned, and only {limit} are ever computed")
        if row.media:
            self._check_media(row)
            good = chunk_end(row.media, scheduled.start, end) == end
            check(good, f"{scheduled} ends inside an item that attends both ways")

    def _compute(self, row: _NullRow, count: int, scheduled: ScheduledRequest) -> None:
        """Write the fingerprints of the next `count` tokens, and of drafts behind them, to their slots."""
        start, end, drafts = row.num_computed_tokens, scheduled.start + count, scheduled.draft_token_ids
        self._check_scheduled(row, end, scheduled)
        self._check_reads(row, max(start - 1, 0))
        num_known = len(row.token_ids)
        for token_id in drafts:
            row.append(token_id)
        for spec, table in self._tables(row):
            is_part = (start, end) != (0, num_known) and isinstance(spec, EncoderOnlySpec)
            check(not is_part, f"{scheduled}, of {num_known} tokens, which an encoder computes whole")
            for position, place in slots_written(spec, table, start, end, len(drafts)):
                slot = self._slot(row, table, position, place)
                check(self._holders[slot[0]] == 1, f"{row.request_id} writes to a shared block: {slot}")
                self._cache.device.write(*slot, row.fingerprints[position])
        row.truncate(num_known)
        row.num_computed_tokens = end

    def _slot(
        self, row: _NullRow, table: list[int], position: int, place: tuple[int, int]
    ) -> tuple[int, int]:
        """Return (block id, offset) of a slot."""
        index, offset = place
        covered = index < len(table) and table[index] != NULL_BLOCK_ID
        check(covered, f"{row.request_id}: no block covers token {position}")
        return table[index], offset

    def _next_token(self, row: _NullRow) -> int:
        """Return an allowed token, a function of tokens and seed alone; no stop token before `min_tokens`."""
        drawn = (
            row.fingerprints[-1]
            if row.params.greedy
            else fingerprint(row.fingerprints[-1], row.params.seed or 0)
        )
        allowed = row.params.allowed_token_ids or range(self.vocab_size)
        place = (drawn >> 33) % len(allowed)
        if len(row.token_ids) - row.num_prompt_tokens >= row.params.min_tokens:
            return allowed[place]
        masked = {*row.eos_token_ids, *row.params.stop_token_ids}
        candidates = (allowed[i % len(allowed)] for i in range(place, place + len(allowed)))
        return next(i for i in candidates if i not in masked)

    def _listed(self, token_ids: list[int], listed: Sequence[int]) -> list[TokenLogprobs]:
        """Return uniform logprobs of listed tokens, each with its id + 1 as rank."""
        logprobs, ranks = [-math.log(self.vocab_size)] * (len(listed) + 1), [i + 1 for i in listed]
        return [TokenLogprobs([token_id, *listed], logprobs, 1, ranks) for token_id in token_ids]

    def _uniform(self, token_ids: list[int], num_logprobs: int) -> list[TokenLogprobs]:
        """Return logprobs of a uniform distribution; -1 lists all tokens."""
        top = list(range(self.vocab_size if num_logprobs < 0 else min(num_logprobs, self.vocab_size)))
        logprobs = [-math.log(self.vocab_size)] * (len(top) + 1)
        return [TokenLogprobs([token_id, *top], logprobs, rank=1) for token_id in token_ids]


def _default_specs(config: EngineConfig) -> dict[str, KVCacheSpec]:
    """Return specs of the model's layers in float32, or of one small layer without a model."""
    arch, block_size = config.model_arch, config.cache.block_size
    if arch is None:
        return {"layers.0": FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype_bytes=4)}
    if arch.bidirectional:
        return {"layers.0": EncoderOnlySpec(config.model.max_model_len)}
    sizes = (block_size, arch.num_kv_heads, arch.head_dim, 4)
    full, window = FullAttentionSpec(*sizes), SlidingWindowSpec(*sizes, arch.sliding_window or 1)
    windowed = [kind == "sliding_attention" for kind in arch.layer_types] or [False] * arch.num_layers
    return {f"layers.{i}": window if is_windowed else full for i, is_windowed in enumerate(windowed)}
