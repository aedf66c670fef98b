# SPDX-License-Identifier: Apache-2.0
"""Plays the engine for a worker with media: encodes items, plans chunks, and takes in tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy

from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import KVCacheConfig
from quire.media import MediaItem, Prefix, chunk_end
from quire.multimodal.worker import encoders
from quire.sampling_params import SamplingParams
from quire.scheduler.output import (
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from quire.worker.worker import Worker
from tests.fixtures.seeing_models import IMAGE_TOKEN, Arrays, Picture
from tests.models.harness import prepared_config
from tests.worker.test_worker import FakeDevice, RoomyHost

NUM_BLOCKS = 400
BREAK = 7
"""Token after each run of an image that has several."""
LONG = 256


def seeing_worker(path: Path, monkeypatch: Any, **args: Any) -> Worker:
    """A worker whose files hold what processors return as floats."""
    monkeypatch.setattr(encoders.EncoderStore, "_floats", lambda _self, arrays: arrays)
    limits = {"max_model_len": LONG, "max_num_seqs": 4, "max_num_batched_tokens": LONG}
    worker = Worker(prepared_config(path, **limits | args), FakeDevice(RoomyHost(2**30)))
    worker.load()
    specs = worker.kv_cache_specs()
    worker.initialize_kv_cache(KVCacheConfig(NUM_BLOCKS, group_layers(specs, LONG), dict(specs)))
    return worker


@dataclasses.dataclass
class Shown:
    """Prompt with its items."""

    token_ids: list[int]
    media: list[MediaItem]
    pictures: list[Picture]


def write_item(arrays: Arrays, directory: Path) -> tuple[bytes, str]:
    """Write the arrays of an item; return its digest and path."""
    data = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    digest = hashlib.sha256(data).digest()
    path = directory / f"{digest.hex()}.safetensors"
    path.write_bytes(data)
    return digest, str(path)


def shown(
    parts: Sequence[int | Picture], directory: Path, *, both_ways: bool = False, is_prefix: bool = False
) -> Shown:
    """Return the prompt of some tokens and pictures."""
    found = Shown([], [], [])
    for part in parts:
        if isinstance(part, int):
            found.token_ids.append(part)
            continue
        start, runs = len(found.token_ids), []
        for length in part.run_lengths or (part.count,):
            first = len(found.token_ids)
            found.token_ids += [IMAGE_TOKEN] * length
            runs.append((first, first + length))
            found.token_ids += [BREAK] if part.run_lengths else []
        digest, path = write_item(part.arrays, directory)
        found.media.append(
            MediaItem(digest, "image", start, runs[-1][1], runs, path, part.grid, both_ways=both_ways)
        )
        found.pictures.append(part)
    if is_prefix and found.media:
        prefix = Prefix(len(found.token_ids), hashlib.sha256(repr(found).encode()).digest())
        found.media[0] = msgspec.structs.replace(found.media[0], prefix=prefix)
    return found


@dataclasses.dataclass
class Running:
    """Request as the driver knows it."""

    token_ids: list[int]
    num_prompt_tokens: int
    media: list[MediaItem]
    params: SamplingParams
    blocks: list[list[int]]
    num_computed: int = 0
    is_new: bool = True
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class MediaDriver:
    """Plans steps of a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        assert worker._runner is not None
        self.tables = worker._runner.batch.block_tables
        self.free = list(range(1, NUM_BLOCKS))
        self.running: dict[str, Running] = {}
        self.removed: list[str] = []
        self.step_id = 0

    def submit(self, request_id: str, prompt: Shown, params: SamplingParams) -> Running:
        """Encode the request's items whole, and let it run."""
        progress = self.worker.encode_media(prompt.media, 1e9)
        assert not progress.failed, progress.failed
        request = Running(
            list(prompt.token_ids), len(prompt.token_ids), prompt.media, params, [[] for _ in self.tables]
        )
        self.running[request_id] = request
        return request

    def preempt(self, request_id: str) -> None:
        """Take row and blocks away; the request starts again with its known tokens."""
        request = self.running[request_id]
        self.removed.append(request_id)
        self.free += [block for blocks in request.blocks for block in blocks]
        request.blocks = [[] for _ in self.tables]
        request.num_computed, request.is_new = 0, True

    def finish(self, request_id: str) -> Running:
        """End a request."""
        self.preempt(request_id)
        self.step({})
        return self.running.pop(request_id)

    def step(self, counts: Mapping[str, int]) -> ModelRunnerOutput:
        """Compute up to so many tokens of each request."""
        new, scheduled, ends = [], [], {}
        for request_id, count in counts.items():
            request = self.running[request_id]
            start = request.num_computed
            end = min(start + count, len(request.token_ids))
            ends[request_id] = end = chunk_end(request.media, start, end)
            assert end > start, "a chunk must hold an item that is seen both ways"
            added = [self._grow(request, group, end) for group in range(len(self.tables))]
            if request.is_new:
                blocks = [list(each) for each in request.blocks]
                known = (list(request.token_ids), request.num_prompt_tokens, request.params, blocks, start)
                new.append(NewRequestData(request_id, *known, media=request.media))
                added = [[] for _ in added]
            request.is_new = False
            samples = int(end == len(request.token_ids))
            scheduled.append(ScheduledRequest(request_id, start, end - start, samples, added))
        plan = SchedulerOutput(self.step_id, new, scheduled, self.removed)
        self.step_id, self.removed = self.step_id + 1, []
        output = self.worker.submit(plan)()
        for request_id, end in ends.items():
            request = self.running[request_id]
            request.num_computed = end
            request.token_ids += output.sampled_token_ids.get(request_id, [])
            request.logprobs += output.logprobs.get(request_id, [])
        return output

    def generate(self, request_id: str, num_tokens: int, chunk: int = LONG) -> Running:
        """Run one request alone until it has so many tokens."""
        request = self.running[request_id]
        while len(request.output) < num_tokens:
            output = self.step({request_id: chunk})
            assert not output.failed, output.failed
        return request

    def _grow(self, request: Running, group: int, num_tokens: int) -> list[int]:
        size = self.tables[group].block_size
        missing = max(-(-num_tokens // size) - len(request.blocks[group]), 0)
        added = [self.free.pop() for _ in range(missing)]
        request.blocks[group] += added
        return added
