# SPDX-License-Identifier: Apache-2.0
"""Sampling settings at fixed addresses, for captured sampling."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.attention_metadata import ANY_LIMITS, NO_LIMITS
from quire.worker.sampler.feature import LogitsFeature
from quire.worker.sampler.penalties import DevicePenalties, StagedPlaces
from quire.worker.sampler.sampler import Sampler, StagedDraw, StagedRows, greedy_settings
from quire.worker.transfers import Transfers


class SampleKind(NamedTuple):
    """Key of the kernels that sample a step; everything else is numbers that they read."""

    is_random: bool
    """True if some row samples randomly."""
    is_limited: bool
    """True if some row has min_p, top_k or top_p."""
    is_penalized: bool
    """True if some row has penalties."""

    @classmethod
    def of(cls, staged: StagedRows) -> SampleKind | None:
        """Return the kind of staged rows; None: they vary too much to be captured."""
        penalized = [isinstance(feature, DevicePenalties) for feature, _ in staged.features]
        if staged.logprobs is not None or not all(penalized):
            return None
        draw = staged.draw
        return cls(draw is not None, draw is not None and any(draw.limits), bool(penalized))

    @property
    def is_plain(self) -> bool:
        """True if there are no numbers to read."""
        return self == _PLAIN


_PLAIN = SampleKind(False, False, False)

KINDS = tuple(
    SampleKind(is_random, is_limited, is_penalized)
    for is_penalized in (True, False)
    for is_random, is_limited in ((True, True), (True, False), (False, False))
)
"""All kinds, the largest in memory first."""


class _Numbers(NamedTuple):
    """Views of `_WIDTH` 64-bit numbers for each of S samples."""

    settings: Tensor
    keys: Tensor
    places: Tensor
    factors: Tensor

    @classmethod
    def within(cls, numbers: Tensor, size: int) -> _Numbers:
        """Return the views, with the dtypes of `StagedDraw` and `StagedPlaces`."""
        sizes = [4 * size, 2 * size, 4 * size, 3 * size]
        parts = torch.split_with_sizes(numbers[: _WIDTH * size], sizes)
        settings, keys, places, factors = (part.view(size, -1) for part in parts)
        return cls(settings.view(torch.float64), keys, places, factors.view(torch.float64))


_WIDTH = 4 + 2 + 4 + 3


class SettingsBuffer:
    """Sampling settings of up to `most` samples at fixed addresses, for captured sampling.

    Invariant: an unused place has neutral settings (greedy, no penalties), so it does not change the bits of the
    others.

    Args:
        longest: most tokens before a sample.
    """

    def __init__(
        self, sampler: Sampler, most: int, vocab_size: int, longest: int, transfers: Transfers
    ) -> None:
        self._penalties = sampler.penalties
        self._longest = longest
        self._transfers = transfers
        self._greedy = torch.tensor(greedy_settings(vocab_size), dtype=torch.float64)
        on = transfers.torch_device
        self._numbers = torch.zeros(_WIDTH * most, dtype=torch.int64, device=on)
        self._all_greedy = self._greedy.to(on).repeat(most, 1)

    @property
    def kinds(self) -> tuple[SampleKind, ...]:
        """Kinds that can occur."""
        return tuple(kind for kind in KINDS if self._penalties is not None or not kind.is_penalized)

    def place(self, size: int, staged: StagedRows) -> None:
        """Write staged settings to where graphs of `size` samples read them."""
        host = torch.zeros(_WIDTH * size, dtype=torch.int64)
        numbers = _Numbers.within(host, size)
        numbers.settings[:] = self._greedy
        numbers.places[:, 0] = torch.arange(size)
        numbers.factors[:, 0] = 1.0
        if staged.draw is not None and staged.draw.keys is not None:
            count = len(staged.draw.settings)
            numbers.settings[:count], numbers.keys[:count] = staged.draw.settings, staged.draw.keys
        for _, penalties in staged.features:
            samples = penalties.places[:, 0]
            numbers.places[samples], numbers.factors[samples] = penalties.places, penalties.factors
        self._numbers[: len(host)].copy_(self._transfers.upload(host))

    def staged(self, size: int, kind: SampleKind) -> StagedRows:
        """Return staged rows that read the buffer."""
        numbers = _Numbers.within(self._numbers, size)
        draw = StagedDraw(self._all_greedy[:size], None, NO_LIMITS)
        if kind.is_random:
            limits = ANY_LIMITS if kind.is_limited else NO_LIMITS
            draw = StagedDraw(numbers.settings, numbers.keys, limits)
        features: list[tuple[LogitsFeature[Any], Any]] = []
        if kind.is_penalized and self._penalties is not None:
            places = StagedPlaces(numbers.places, numbers.factors, self._longest)
            features.append((self._penalties, places))
        return StagedRows(features, draw, None)
