# SPDX-License-Identifier: Apache-2.0
"""The store of embeddings on texts, which its tower computes together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.media import MediaItem
from quire.multimodal.worker.encoders import EncoderStore, open_encoder
from tests.models.harness import prepared_config
from tests.seq2seq.tiny import VOCAB, save, texts


def item(number: int, ids: Sequence[int]) -> MediaItem:
    return MediaItem(bytes([number]), "text", 0, len(ids), [(0, len(ids))], "", token_ids=list(ids))


def rows(encoder: EncoderStore, one: MediaItem) -> Tensor:
    found = encoder.embeddings(one.digest)
    assert found is not None
    return found.values


@pytest.mark.skipif(not cpu.available(), reason="rows have their own bits by the C++ kernels")
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_texts_together_have_the_bits_of_each_alone(tmp_path: Path, name: str) -> None:
    save(name, tmp_path)
    encoder = open_encoder(prepared_config(tmp_path))
    good = [item(number, ids) for number, ids in enumerate(texts(5, 33, 1, 20))]
    alone = []
    for one in good:
        encoder.encode([one], 1e9)
        alone.append(rows(encoder, one))
    encoder.drop([one.digest for one in good])
    bad = item(9, [3, VOCAB])
    assert not encoder.encode([good[0], bad, *good[1:]], 0.0).done
    encoder.drop([good[1].digest])  # in mid-work; it is asked for again below
    left = [good[0], bad, *good[2:], good[1]]
    progress = encoder.encode(left, 1e9)
    assert progress.done == [one.digest for one in left if one is not bad]
    assert "tokens below 96" in progress.failed[bad.digest]
    assert all(map(torch.equal, [rows(encoder, one) for one in good], alone))
