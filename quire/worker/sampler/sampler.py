"""The sampler: logits in, one token per row of them out. A row of the batch has several if it has drafts.

Invariant: a sample's token and logprobs depend on its logits, the tokens before it and its request's parameters alone,
bit for bit; every feature works sample by sample. A new way to change logits is a new class and a line in
`LOGITS_FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.logits_processors import LogitsProcessor
from quire.plugins import FACTORY, PluginTable
from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.structured_output.settings import StructuredOutputsSettings
from quire.structured_output.store import GrammarStore
from quire.worker.devices import Transfers, moved
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.bad_words import BadWords
from quire.worker.sampler.chain import SamplerChain
from quire.worker.sampler.custom import CustomProcessors
from quire.worker.sampler.draw import Draw, StagedDraw
from quire.worker.sampler.dry import Dry
from quire.worker.sampler.feature import Failures, Feature, LogitsFeature
from quire.worker.sampler.grammar import GrammarMask
from quire.worker.sampler.logprobs import Logprobs, LogprobsMode, RawLogprobs, StagedLogprobs
from quire.worker.sampler.masks import AllowedTokenIds, LogitBias, MinTokens
from quire.worker.sampler.penalties import DevicePenalties, WindowedPenalties, make_penalties
from quire.worker.sampler.thinking import ThinkingBudget

LOGITS_FEATURES: PluginTable[Callable[[InputBatch, int], LogitsFeature[Any]]] = PluginTable(
    "quire.logits_features",
    "a logits feature",
    {
        "allowed_token_ids": AllowedTokenIds,
        "bad_words": BadWords,
        "min_tokens": MinTokens,
        "logit_bias": LogitBias,
        "logits_processors": CustomProcessors,
        "penalties": make_penalties,
        "windowed_penalties": WindowedPenalties,
        "dry": Dry,
        "thinking_token_budget": ThinkingBudget,
    },
    FACTORY,
)
"""What may change the logits, in the order in which it does; those of plug-ins come after ours, by name, then grammars,
and the sampler chain last."""

NON_FINITE = "the model produced non-finite logits"
NO_TOKEN_LEFT = (
    "no token is left to choose from: allowed_token_ids, bad_words, min_tokens, stop tokens or "
    "structured_outputs exclude all"
)

_FAILURES = {-1: NO_TOKEN_LEFT, -2: NON_FINITE}
"""What a negative code in the place of a token id means; -1 is that of `ops.sample_tokens`."""
NON_FINITE_CODE = -2


class SamplerOutput(NamedTuple):
    """The choice for N rows."""

    token_ids: NDArray[np.int64]
    """[N]; 0 for rows in `failed`."""
    logprobs: dict[int, TokenLogprobs]
    """Index of a row that wants logprobs -> its logprobs."""
    failed: dict[int, str]
    """Index of a row that cannot go on -> the reason."""


class Sampled(NamedTuple):
    """The same as the device has it."""

    codes: Tensor
    """[N] int64: the token's id, or negative."""
    logprobs: RawLogprobs | None
    wanting: NDArray[np.int64]
    """Rows that `logprobs` are about."""
    failures: Failures
    """Rows that a feature gave up."""

    @staticmethod
    def of_codes(codes: Tensor) -> Sampled:
        """Choices of which nothing else is wanted."""
        return Sampled(codes, None, np.zeros(0, dtype=np.int64), Failures())

    def moved(self, move: Callable[[Tensor], Tensor]) -> Sampled:
        """With its tensors moved, as by `Transfers.download`."""
        logprobs = None if self.logprobs is None else moved(self.logprobs, move)
        return Sampled(move(self.codes), logprobs, self.wanting, self.failures)

    def read(self) -> SamplerOutput:
        """What it says, once it is on the host."""
        token_ids: NDArray[np.int64] = self.codes.numpy()
        failed: dict[int, str] = {}
        if token_ids.min() < 0:
            failed = {row: _FAILURES[int(token_ids[row])] for row in (token_ids < 0).nonzero()[0].tolist()}
            token_ids = token_ids.clip(0)
        failed = {**self.failures, **failed}
        entries = [] if self.logprobs is None else self.logprobs.entries()
        return SamplerOutput(token_ids, dict(zip(self.wanting.tolist(), entries, strict=True)), failed)


class StagedRows(NamedTuple):
    """What all features need for the rows of a step."""

    features: list[tuple[LogitsFeature[Any], Any]]
    draw: StagedDraw | None
    logprobs: StagedLogprobs | None

    @property
    def take_the_first(self) -> bool:
        """Whether all rows want the likeliest token, as the model has it, and nothing else."""
        return not self.features and self.draw is None and self.logprobs is None

    def num_deciding(self) -> int | None:
        """How many tokens at the head of each row's order, as the model has it, decide its choice; None: any may.

        What changes logits may bring any token to the head, and logprobs are shares of the mass of all.
        """
        if self.features or self.logprobs is not None:
            return None
        return 1 if self.draw is None else self.draw.num_deciding()

    def moved(self, move: Callable[[Tensor], Tensor]) -> StagedRows:
        """With its tensors moved, as by `Transfers.upload`."""
        return StagedRows(
            [(feature, moved(value, move)) for feature, value in self.features],
            None if self.draw is None else moved(self.draw, move),
            None if self.logprobs is None else moved(self.logprobs, move),
        )


NOTHING_STAGED = StagedRows([], None, None)
"""Of rows that ask for nothing but their first tokens."""


class Sampler:
    """Samples for the rows of a batch, which it reads and does not change.

    Args:
        logprobs_mode: what is reported where logprobs are wanted.
        processors: logits processors of the whole engine.
        grammars: where the core keeps them.

    Attributes:
        grammar_mask: the feature that has read the texts that grammars constrain.
    """

    def __init__(
        self,
        batch: InputBatch,
        vocab_size: int,
        transfers: Transfers,
        *,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        processors: Sequence[LogitsProcessor] = (),
        grammars: GrammarStore | None = None,
    ) -> None:
        self._batch = batch
        self._replays: dict[
            int, int
        ] = {}  # row -> its tokens when it was added, of which some are to be replayed
        self._transfers = transfers
        self._mode = logprobs_mode
        grammars = grammars or GrammarStore(StructuredOutputsSettings())
        self.grammar_mask = GrammarMask(batch, vocab_size, grammars)
        self._logits_features = [
            *_logits_features(batch, vocab_size, processors),
            self.grammar_mask,
            SamplerChain(batch, vocab_size, transfers.torch_device),
        ]
        self._draw = Draw(batch, vocab_size, transfers.torch_device)
        self._logprobs = Logprobs(batch)
        self._features: list[Feature[Any]] = [*self._logits_features, self._draw, self._logprobs]

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Take in a request that was given a row.

        With sampler state it begins behind its prompt, and `replay` takes in what was sampled before.
        """
        if request.sampling_params.has_sampler_state and len(request.token_ids) > request.num_prompt_tokens:
            self._replays[row] = len(request.token_ids)
            prompt = request.token_ids[: request.num_prompt_tokens]
            request = msgspec.structs.replace(request, token_ids=prompt)
        for feature in self._features:
            feature.add_request(row, request)

    def remove_request(self, row: int) -> None:
        """Forget a row."""
        self._replays.pop(row, None)
        for feature in self._features:
            feature.remove_request(row)

    def columns_to_replay(self, row: int, start: int, end: int) -> range:
        """Return the columns, behind positions from `start` to `end`, that were sampled before the row was added."""
        num_known = self._replays.get(row)
        if num_known is None:
            return range(0)
        return range(max(start + 1, int(self._batch.num_prompt_tokens[row])), min(end + 1, num_known))

    def replay(self, logits: Tensor, row: int, column: int) -> None:
        """Sample a known token again by logits [1, V], which are changed: all features are then as they were behind it.

        Columns of a row must come in order.
        """
        num_tokens = int(self._batch.num_tokens[row])
        self._batch.num_tokens[row] = column
        try:
            staged = self.stage(Samples(np.array([row]), np.array([column])))
            self.sample(logits, staged._replace(logprobs=None))
        finally:
            self._batch.num_tokens[row] = num_tokens
        if column + 1 == self._replays[row]:
            del self._replays[row]

    @property
    def replays(self) -> bool:
        """Whether a row has tokens for `replay`."""
        return bool(self._replays)

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """Whether `stage` needs these rows' sampled tokens on the host."""
        return any(feature.reads_tokens and feature.has_users(rows) for feature in self._features)

    def stage(self, samples: Samples) -> StagedRows:
        """The host's part of sampling for N samples; needs no logits, so it can run while the model computes."""
        return self.stage_on_host(samples).moved(self._transfers.upload)

    def stage_on_host(self, samples: Samples) -> StagedRows:
        """The same, and its tensors are still the host's."""
        staged = ((feature, feature.stage(samples)) for feature in self._logits_features)
        return StagedRows(
            features=[(feature, value) for feature, value in staged if value is not None],
            draw=self._draw.stage(samples),
            logprobs=self._logprobs.stage(samples),
        )

    def only_draws(self, rows: NDArray[np.int64]) -> bool:
        """Whether these rows ask for nothing but their draws, or their first tokens."""
        others = (*self._logits_features, self._logprobs)
        return not any(feature.has_users(rows) for feature in others)

    def draws(self, samples: Samples) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The settings [N, 4] and keys [N, 2] of `ops.sample_tokens` for all N samples; greedy ones have some, too."""
        return self._draw.settings(samples.rows), self._draw.keys(samples)

    @property
    def penalties(self) -> DevicePenalties | None:
        """Those that a device counts, if it does."""
        found = (one for one in self._logits_features if isinstance(one, DevicePenalties))
        return next(found, None)

    def guess(self, logits: Tensor, samples: Samples) -> Tensor:
        """[N] int64 what would be sampled from another model's logits [N, V] float32, contiguous, which are changed in
        place; negative where nothing could be.
        """
        return self.sample(logits, self.stage(samples)._replace(logprobs=None)).codes

    def sample(self, logits: Tensor, staged: StagedRows) -> Sampled:
        """Choose a token for each row; logits [N, V] float32, contiguous, may be changed in place."""
        is_bad, wanted, failures = clear_unusable(logits), staged.logprobs, Failures()
        reported = None if wanted is None or self._mode.is_processed else _raw_logits(logits, staged, wanted)
        for feature, value in staged.features:
            failures.update(feature.apply(logits, value) or {})
        if wanted is not None and self._mode.is_processed:
            reported = self._draw.shaped(logits, staged.draw, wanted.indices)
        chosen = self._draw.choose(logits, staged.draw)
        codes = chosen.masked_fill(is_bad, NON_FINITE_CODE)
        if wanted is None or reported is None:
            return Sampled.of_codes(codes)._replace(failures=failures)
        about = chosen.clamp(min=0)[wanted.indices]
        return Sampled(codes, wanted.of(reported, about, self._mode), wanted.rows, failures)


def _logits_features(
    batch: InputBatch, vocab_size: int, processors: Sequence[LogitsProcessor]
) -> Iterator[LogitsFeature[Any]]:
    for make in LOGITS_FEATURES.resolve_all():
        is_custom = make is CustomProcessors
        yield CustomProcessors(batch, vocab_size, processors) if is_custom else make(batch, vocab_size)


def clear_unusable(logits: Tensor) -> Tensor:
    """Set rows of [N, V] that `ops.unusable_rows` finds to 0; returns which, [N] bool."""
    is_bad = ops.unusable_rows(logits)
    ops.clear_rows(logits, is_bad)
    return is_bad


def _raw_logits(logits: Tensor, staged: StagedRows, wanted: StagedLogprobs) -> Tensor:
    """The logits of the rows that want logprobs; a copy only if it takes one to keep them as they are."""
    if staged.features or len(wanted.rows) < len(logits):
        return logits[wanted.indices]
    return logits
