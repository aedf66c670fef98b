# SPDX-License-Identifier: Apache-2.0
"""Media of rows: rotary positions as transformers counts them, rows, sight, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.media import MediaItem
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.inputs import StepLayout
from quire.worker.media_rows import Embeddings, MediaBatch, rope_positions
from tests.fixtures.seeing_models import IMAGE_TOKEN, SEEING

H = 3


def item(start: int, *runs: tuple[int, int], **options: Any) -> MediaItem:
    return MediaItem(bytes([start]) * 32, "image", start, runs[-1][1], list(runs), "", **options)


class Store:
    """Embeddings whose every value says which item and index it is of."""

    def __init__(self, media: list[MediaItem], deepstack: int = 0) -> None:
        self.of = {
            each.digest: Embeddings(
                self.rows(each, 0), tuple(self.rows(each, layer + 1) for layer in range(deepstack))
            )
            for each in media
        }

    @staticmethod
    def rows(one: MediaItem, layer: int) -> Tensor:
        count = one.num_embeddings
        return (1000.0 * layer + 100.0 * one.start + torch.arange(count))[:, None].expand(count, H).clone()

    def embeddings(self, digest: bytes) -> Embeddings | None:
        return self.of.get(digest)


def request(num_tokens: int, media: list[MediaItem], prompt: int | None = None) -> NewRequestData:
    ids = [1] * num_tokens
    return NewRequestData("r", ids, prompt or num_tokens, SamplingParams(), [[]], 0, media=media)


def layout(*spans: tuple[int, int, int]) -> StepLayout:
    """Rows with their first and end positions."""
    rows, starts, ends = (np.array(each, dtype=np.int64) for each in zip(*spans, strict=True))
    none = np.zeros(0, dtype=np.int64)
    first = np.concatenate(([0], (ends - starts).cumsum()))
    return StepLayout(rows, starts, ends, first, np.zeros_like(rows), none, none, rows < 0)


def batch(media: list[MediaItem], *, deepstack: int = 0, has_axes: bool = False) -> MediaBatch:
    store = Store(media, deepstack)
    return MediaBatch(store, 4, hidden_size=H, num_deepstack=deepstack, has_axes=has_axes, max_position=64)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_rope_positions_of_images_equal_those_of_transformers(name: str) -> None:
    import transformers

    family = SEEING[name]
    with torch.device("meta"):
        model = getattr(transformers, family.architecture)(family.config())
    grids = [(1, 2, 3), (1, 4, 2), (1, 1, 1)]
    ids, media = [5, 6], []
    for grid in grids:
        first = len(ids)
        ids += [IMAGE_TOKEN] * int(np.prod(grid))
        media.append(item(first, (first, len(ids)), grid=grid))
        ids += [7, 8, 9]
    tokens = torch.tensor([ids])
    full = torch.tensor([[frames, 2 * rows, 2 * columns] for frames, rows, columns in grids])
    want, deltas = model.model.get_rope_index(
        tokens, mm_token_type_ids=(tokens == IMAGE_TOKEN).int(), image_grid_thw=full
    )
    got, delta = rope_positions(len(ids), media)
    assert got.tolist() == want[:, 0].tolist()
    assert delta == int(deltas[0, 0])


def test_rope_positions_of_a_video_count_its_seconds() -> None:
    import transformers

    family = SEEING["qwen2.5-vl"]
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(family.config())
    ids = torch.tensor([[5] + [IMAGE_TOKEN + 1] * 12 + [6, 7]])
    rate = family.config().vision_config.tokens_per_second
    want, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=2 * (ids == IMAGE_TOKEN + 1).int(),
        video_grid_thw=torch.tensor([[3, 4, 4]]),
        second_per_grid_ts=torch.tensor([1.5]),
    )
    video = MediaItem(b"v", "video", 1, 13, [(1, 13)], "", (3, 2, 2), seconds_per_frame=1.5)
    got, delta = rope_positions(15, [video], rate)
    assert got.tolist() == want[:, 0].tolist()
    assert delta == int(want[0, 0, -1]) + 1 - 15  # as generate() goes on, if a time is later than the text


def test_a_video_with_timestamps_has_a_frame_in_each_run() -> None:
    video = MediaItem(b"v", "video", 1, 8, [(1, 3), (6, 8)], "", (2, 1, 2))
    got, delta = rope_positions(9, [video])
    assert got.tolist() == [
        [0, 1, 1, 3, 4, 5, 6, 6, 8],
        [0, 1, 1, 3, 4, 5, 6, 6, 8],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert delta == 0


def test_text_alone_has_equal_positions_and_no_delta() -> None:
    got, delta = rope_positions(4, [])
    assert got.tolist() == [[0, 1, 2, 3]] * 3
    assert delta == 0


def test_rows_of_any_chunk_are_those_of_their_positions() -> None:
    media = [item(2, (2, 4), (5, 8)), item(9, (9, 11))]
    rows = batch(media, deepstack=2)
    rows.add_request(1, request(14, media))
    rows.add_request(3, request(14, media))
    found = rows.gather(layout((3, 3, 6), (0, 0, 5), (1, 7, 12)))
    assert found is not None
    assert found.rows is not None
    assert found.rows.rows.tolist() == [0, 2, 8, 10, 11]
    assert found.rows.values[:, 0].tolist() == [201.0, 202.0, 204.0, 900.0, 901.0]
    assert [each[:, 0].tolist() for each in found.rows.deepstack] == [
        [1201.0, 1202.0, 1204.0, 1900.0, 1901.0],
        [2201.0, 2202.0, 2204.0, 2900.0, 2901.0],
    ]
    assert found.rope_positions is None
    assert found.last_seen is None


def test_steps_behind_the_media_have_nothing_but_a_delta() -> None:
    media = [item(1, (1, 7), grid=(1, 2, 3))]
    rows = batch(media, has_axes=True)
    rows.add_request(2, request(9, media))
    assert rows.deltas.tolist() == [0, 0, -3, 0]
    assert not rows.are_in(layout((2, 7, 8)))
    assert rows.gather(layout((2, 7, 8), (0, 0, 3))) is None
    found = rows.gather(layout((2, 6, 9), (0, 4, 6)))
    assert found is not None
    assert found.rope_positions is not None
    assert found.rope_positions.tolist() == [[1, 4, 5, 4, 5], [2, 4, 5, 4, 5], [3, 4, 5, 4, 5]]
    rows.remove_request(2)
    assert rows.deltas.tolist() == [0] * 4
    assert rows.gather(layout((2, 0, 3))) is None


def test_both_ways_items_are_seen_whole() -> None:
    media = [item(2, (2, 5), both_ways=True)]
    rows = batch(media)
    rows.add_request(0, request(8, media))
    found = rows.gather(layout((1, 3, 5), (0, 1, 7)))
    assert found is not None
    assert found.last_seen is not None
    assert found.last_seen.tolist() == [3, 4, 1, 4, 4, 4, 5, 6]
    assert found.last_seen.dtype == torch.int32


@pytest.mark.parametrize(
    ("media", "reason"),
    [
        ([item(5, (5, 9))], "does not fit the prompt"),
        ([item(3, (3, 5)), item(4, (4, 6))], "does not fit the prompt"),
        ([MediaItem(b"x", "image", 3, 5, [(2, 4)], "")], "does not fit the prompt"),
        ([item(1, (1, 4), grid=(1, 2, 2))], "3 embeddings for a grid"),
        ([MediaItem(b"other", "image", 3, 5, [(3, 5)], "")], "has no embeddings"),
    ],
)
def test_media_that_do_not_fit_cost_their_request(media: list[MediaItem], reason: str) -> None:
    rows = batch([one for one in media if one.digest != b"other"])
    assert reason in str(rows.why_unusable(request(8, media, prompt=8)))


def test_embeddings_of_wrong_shape_cost_their_request() -> None:
    media = [item(1, (1, 4))]
    store = Store([item(1, (1, 5))])
    rows = MediaBatch(store, 1, hidden_size=H, max_position=64)
    assert "for [3, 3] positions and sizes" in str(rows.why_unusable(request(8, media)))
    deep = MediaBatch(Store(media, 2), 1, hidden_size=H, num_deepstack=1, max_position=64)
    assert "features for 2 layers; the model adds 1" in str(deep.why_unusable(request(8, media)))
    video = MediaItem(b"v" * 32, "video", 1, 4, [(1, 4)], "", (3, 1, 1), seconds_per_frame=40.0)
    far = MediaBatch(Store([video]), 1, hidden_size=H, has_axes=True, max_position=64)
    assert "reach position 82, the limit is 64" in str(far.why_unusable(request(8, [video])))


def test_a_later_stage_needs_no_embeddings(tmp_path: Path) -> None:
    media = [item(1, (1, 4), grid=(1, 1, 3), both_ways=True)]
    rows = MediaBatch(None, 1, hidden_size=H, has_axes=True, max_position=64)
    assert rows.why_unusable(request(8, media)) is None
    rows.add_request(0, request(8, media))
    found = rows.gather(layout((0, 0, 8)))
    assert found is not None
    assert found.rows is None
    assert found.rope_positions is not None
    assert found.last_seen is not None
