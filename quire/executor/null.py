"""`NullExecutor`: computes nothing, and checks everything that a worker takes on trust.

Its next token is a pure function of the tokens before it and the request's seed, so an output does not depend on
its company. In place of keys, values and states, each slot of its cache holds a fingerprint of all tokens up to that
position (`quire.executor.fingerprints`); a plan that would make a worker read wrong, stale or foreign cache content, or
lose some while it is swapped or copied, therefore fails here.

Invariant: a plan that breaks a promise of `quire.scheduler.output` raises AssertionError; the checks are
explicit, so that `python -O` keeps them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.executor.fingerprints import FingerprintCache, fingerprint
from quire.executor.fingerprints import check as _check
from quire.kv_cache.block_pool import NULL_BLOCK_ID
from quire.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVMemory,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from quire.scheduler.output import (
    WAIST_VERSION,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprobs,
)

DEFAULT_NUM_BLOCKS = 16384
DEFAULT_VOCAB_SIZE = 32000


Place = tuple[int, tuple[int, int]]
"""A position, and where its fingerprint lies in a group's cache: (index in the block table, offset in the block)."""


def places_read(spec: KVCacheSpec, start: int, end: int) -> Iterator[Place]:
    """What the token at position `end` reads of those from `start` on."""
    if isinstance(spec, RecurrentStateSpec):
        return ((position, (position // spec.block_size, 0)) for position in range(max(end - 1, 0), end))
    first = max(spec.first_block(end) * spec.block_size, start)
    return ((position, divmod(position, spec.block_size)) for position in range(first, end))


def places_written(spec: KVCacheSpec, table: list[int], start: int, end: int) -> Iterator[Place]:
    """What computing the tokens `start` to `end` (exclusive) leaves behind."""
    if not isinstance(spec, RecurrentStateSpec):
        return ((position, divmod(position, spec.block_size)) for position in range(start, end))
    indices = range(start // spec.block_size, (end - 1) // spec.block_size + 1)
    wanted = [i for i in indices if table[i] != NULL_BLOCK_ID or i == indices[-1]]
    return ((min((i + 1) * spec.block_size, end) - 1, (i, 0)) for i in wanted)


class _Row:
    """One request as the worker knows it; `fingerprints[i]` stands for tokens 0 to i."""

    def __init__(self, data: NewRequestData) -> None:
        self.request_id = data.request_id
        self.params = data.sampling_params
        self.eos_token_ids = data.eos_token_ids
        self.num_prompt_tokens = data.num_prompt_tokens
        self.num_computed_tokens = data.num_computed_tokens
        self.block_ids = [list(ids) for ids in data.block_ids]
        self.token_ids: list[int] = []
        self.fingerprints: list[int] = []
        for token_id in data.token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self.fingerprints.append(fingerprint(self.fingerprints[-1] if self.fingerprints else 0, token_id))
        self.token_ids.append(token_id)


class NullExecutor(Executor):
    """An executor without a model, for tests of everything above it.

    It honours `min_tokens`, `logprobs` and `prompt_logprobs` (as of a uniform distribution); what else shapes
    a distribution has nothing to act on here. `specs` and `vocab_size` are used where the config has no model.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        specs: Mapping[str, KVCacheSpec] | None = None,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
    ) -> None:
        super().__init__(config)
        self.vocab_size = config.model_arch.vocab_size if config.model_arch else vocab_size
        self._specs = dict(specs or _default_specs(config))
        self._kv_config: KVCacheConfig | None = None
        self._cache = FingerprintCache(0, 0)
        self._rows: dict[str, _Row] = {}
        self._holders: Counter[int] = Counter()
        self._last_step_id = 0
        self._submitted: deque[SchedulerOutput] = deque()

    def load(self) -> None:
        """Nothing to load."""

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._specs

    def kv_memory(self) -> KVMemory:
        """Room for `DEFAULT_NUM_BLOCKS` blocks of all layers together."""
        block_bytes = sum(spec.block_bytes for spec in self._specs.values())
        return KVMemory(DEFAULT_NUM_BLOCKS * block_bytes, "as much as a null executor has")

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        _check(self._kv_config is None, "the cache is allocated once")
        self._kv_config = kv_config
        self._cache = FingerprintCache(kv_config.num_blocks, kv_config.num_host_blocks)

    def submit(self, plan: SchedulerOutput) -> None:
        """Keep the plan until its result is asked for: the latest that a worker may begin."""
        self._submitted.append(plan)

    def collect(self) -> ModelRunnerOutput:
        """Check the plan, then do what a worker does with it, less the computing.

        Raises:
            AssertionError: the plan is inconsistent with itself, with earlier plans or with the cache.
        """
        plan = self._submitted.popleft()
        self._check_header(plan)
        self._last_step_id = plan.step_id
        for request_id in plan.removed_request_ids:
            self._remove_row(request_id)
        for cached_request in plan.cached_requests:
            self._let_go(cached_request)
        self._move_blocks(plan)
        for new_request in plan.new_requests:
            self._add_row(new_request)
        for cached_request in plan.cached_requests:
            self._grow_row(cached_request)
        _check(len(self._rows) <= self.config.scheduler.max_num_seqs, f"{len(self._rows)} rows are too many")
        scheduled = [(self._rows[name], count) for name, count in plan.num_scheduled_tokens.items()]
        output = ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids={})
        for row, count in scheduled:
            self._run_row(row, count, output)
        return output

    def _run_row(self, row: _Row, count: int, output: ModelRunnerOutput) -> None:
        """Compute `count` tokens, sample if that reaches the last known one, and report as asked for."""
        params, start = row.params, row.num_computed_tokens
        self._compute(row, count)
        if params.prompt_logprobs is not None and start + 1 < row.num_prompt_tokens:
            about = row.token_ids[start + 1 : min(start + 1 + count, row.num_prompt_tokens)]
            output.prompt_logprobs[row.request_id] = self._uniform(about, params.prompt_logprobs)
        if row.num_computed_tokens == len(row.token_ids):
            row.append(self._next_token(row))
            output.sampled_token_ids[row.request_id] = [row.token_ids[-1]]
            if params.logprobs is not None:
                output.logprobs[row.request_id] = self._uniform(row.token_ids[-1:], params.logprobs)

    def _check_header(self, plan: SchedulerOutput) -> None:
        _check(self._kv_config is not None, "a plan came before the cache was allocated")
        _check(plan.version == WAIST_VERSION, f"waist version {plan.version}, not {WAIST_VERSION}")
        _check(plan.step_id > self._last_step_id, f"step {plan.step_id} after step {self._last_step_id}")
        planned = [data.request_id for data in plan.new_requests]
        planned += [data.request_id for data in plan.cached_requests]
        _check(len(set(planned)) == len(planned), f"a request is planned twice: {planned}")
        _check(set(planned) == plan.num_scheduled_tokens.keys(), "planned requests and token counts differ")
        counts = plan.num_scheduled_tokens.values()
        _check(all(count > 0 for count in counts), "a request is planned without tokens")
        _check(sum(counts) == plan.total_num_scheduled_tokens, "the token counts do not add up")
        budget = self.config.scheduler.max_num_batched_tokens
        _check(plan.total_num_scheduled_tokens <= budget, f"the plan exceeds the budget of {budget} tokens")

    def _remove_row(self, request_id: str) -> None:
        _check(request_id in self._rows, f"{request_id} is removed and has no row")
        for ids in self._rows.pop(request_id).block_ids:
            self._holders.subtract(block_id for block_id in ids if block_id != NULL_BLOCK_ID)

    def _move_blocks(self, plan: SchedulerOutput) -> None:
        written = {target for _, target in plan.swap_ins + plan.block_copies}
        _check(len(written) == len(plan.swap_ins) + len(plan.block_copies), "a block is written twice")
        held = [block_id for block_id in written if self._holders[block_id]]
        _check(not held, f"blocks {held} are written, and rows hold them")
        self._cache.move_blocks(plan)

    def _add_row(self, data: NewRequestData) -> None:
        _check(data.request_id not in self._rows, f"{data.request_id} is new and has a row")
        assert self._kv_config is not None
        _check(
            len(data.block_ids) == len(self._kv_config.groups), f"{data.request_id}: not one list per group"
        )
        row = self._rows[data.request_id] = _Row(data)
        for spec, ids in self._tables(row):
            self._hold(row, spec, ids, ids)
        self._check_reads(row, 0)

    def _let_go(self, data: CachedRequestData) -> None:
        """Blocks that a row reads no more may serve others in this plan."""
        _check(data.request_id in self._rows, f"{data.request_id} is cached and has no row")
        row = self._rows[data.request_id]
        expected = row.num_computed_tokens
        _check(data.num_computed_tokens == expected, f"{data}, but {expected} tokens are computed")
        for spec, table in self._tables(row):
            for index in range(min(spec.first_block(expected), len(table))):
                if table[index] != NULL_BLOCK_ID:
                    self._holders[table[index]] -= 1
                    table[index] = NULL_BLOCK_ID

    def _grow_row(self, data: CachedRequestData) -> None:
        row = self._rows[data.request_id]
        for (spec, ids), new_ids in zip(self._tables(row), data.new_block_ids, strict=True):
            ids.extend(new_ids)
            self._hold(row, spec, ids, new_ids)

    def _tables(self, row: _Row) -> Iterator[tuple[KVCacheSpec, list[int]]]:
        assert self._kv_config is not None
        specs = [group.spec for group in self._kv_config.groups]
        return zip(specs, row.block_ids, strict=True)

    def _hold(self, row: _Row, spec: KVCacheSpec, table: list[int], new_ids: list[int]) -> None:
        """Blocks may be left out where nothing is read, and between states."""
        if not new_ids:
            return
        assert self._kv_config is not None
        held = [block_id for block_id in table if block_id != NULL_BLOCK_ID]
        _check(len(set(held)) == len(held), f"{row.request_id}: a block is twice in {table}")
        num_old = len(table) - len(new_ids)
        num_unread = max(spec.first_block(row.num_computed_tokens) - num_old, 0)
        lowest = NULL_BLOCK_ID + (not isinstance(spec, RecurrentStateSpec))
        valid = range(lowest, self._kv_config.num_blocks)
        good = all(block_id in valid for block_id in new_ids[num_unread:])
        _check(good and not any(new_ids[:num_unread]), f"{row.request_id}: no such blocks {new_ids}")
        self._holders.update(block_id for block_id in new_ids if block_id != NULL_BLOCK_ID)

    def _check_reads(self, row: _Row, start: int) -> None:
        for spec, table in self._tables(row):
            for position, place in places_read(spec, start, row.num_computed_tokens):
                slot = self._slot(row, table, position, place)
                found = self._cache.device.read(*slot) == row.fingerprints[position]
                _check(found, f"{row.request_id}: {slot} does not hold the prefix to token {position}")

    def _compute(self, row: _Row, count: int) -> None:
        """Write the fingerprints of the next `count` tokens to their slots."""
        start, end = row.num_computed_tokens, row.num_computed_tokens + count
        _check(end <= len(row.token_ids), f"{row.request_id}: token {end} of {len(row.token_ids)} planned")
        limit = self.config.model.max_model_len
        _check(
            end < limit, f"{row.request_id}: token {end} planned, and the context of {limit} is full before"
        )
        self._check_reads(row, max(start - 1, 0))
        for spec, table in self._tables(row):
            for position, place in places_written(spec, table, start, end):
                slot = self._slot(row, table, position, place)
                _check(self._holders[slot[0]] == 1, f"{row.request_id} writes to a shared block: {slot}")
                self._cache.device.write(*slot, row.fingerprints[position])
        row.num_computed_tokens = end

    def _slot(self, row: _Row, table: list[int], position: int, place: tuple[int, int]) -> tuple[int, int]:
        """(block id, offset) of a place."""
        index, offset = place
        covered = index < len(table) and table[index] != NULL_BLOCK_ID
        _check(covered, f"{row.request_id}: no block covers token {position}")
        return table[index], offset

    def _next_token(self, row: _Row) -> int:
        """A function of the row's tokens and seed alone; no end token before `min_tokens`."""
        drawn = (
            row.fingerprints[-1]
            if row.params.greedy
            else fingerprint(row.fingerprints[-1], row.params.seed or 0)
        )
        token_id = (drawn >> 33) % self.vocab_size
        if len(row.token_ids) - row.num_prompt_tokens >= row.params.min_tokens:
            return token_id
        masked = {*row.eos_token_ids, *row.params.stop_token_ids}
        candidates = (i % self.vocab_size for i in range(token_id, token_id + self.vocab_size))
        return next(i for i in candidates if i not in masked)

    def _uniform(self, token_ids: list[int], num_logprobs: int) -> list[TokenLogprobs]:
        """Logprobs at positions where every token was equally likely; -1 lists all tokens."""
        top = list(range(self.vocab_size if num_logprobs < 0 else min(num_logprobs, self.vocab_size)))
        logprobs = [-math.log(self.vocab_size)] * (len(top) + 1)
        return [TokenLogprobs([token_id, *top], logprobs, rank=1) for token_id in token_ids]


def _default_specs(config: EngineConfig) -> dict[str, KVCacheSpec]:
    """The model's layers in float32, or one small layer where no model is configured."""
    arch, block_size = config.model_arch, config.cache.block_size
    if arch is None:
        return {"layers.0": FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype_bytes=4)}
    sizes = (block_size, arch.num_kv_heads, arch.head_dim, 4)
    full, window = FullAttentionSpec(*sizes), SlidingWindowSpec(*sizes, arch.sliding_window or 1)
    windowed = [kind == "sliding_attention" for kind in arch.layer_types] or [False] * arch.num_layers
    return {f"layers.{i}": window if is_windowed else full for i, is_windowed in enumerate(windowed)}
