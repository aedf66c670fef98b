# SPDX-License-Identifier: Apache-2.0
"""Towers against transformers' encoders and projections, of random tiny checkpoints in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.multimodal.towers.base import Tower
from quire.multimodal.towers.load import load_tower, warm_up
from quire.worker.media_rows import Embeddings
from tests.fixtures.seeing_models import IMAGE_TOKEN, SEEING, Picture, make_seeing
from tests.models.harness import prepared_config


@pytest.fixture(name="family", scope="module", params=list(SEEING))
def _family(request: Any, tmp_path_factory: Any) -> tuple[str, Any, Path]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, make_seeing(request.param, path), path


@torch.inference_mode()
def features_of(model: Any, picture: Picture) -> Embeddings:
    """Return the embeddings that transformers puts in the stream."""
    inputs = {name: torch.from_numpy(array) for name, array in picture.arrays.items()}
    if hasattr(getattr(model, "model", None), "embed_tokens_extend"):
        ids = torch.full((1, picture.count), IMAGE_TOKEN)
        rows = torch.zeros(1, picture.count, model.config.hidden_size)
        return Embeddings(model.model.embed_tokens_extend.image_embed(ids, rows, **inputs)[0])
    found = getattr(model, "model", model).get_image_features(**inputs, return_dict=True)
    values = found.pooler_output
    if values is None:  # Llama 4 projects them later
        values = model.multi_modal_projector(found.last_hidden_state)
    values = torch.cat(list(values)) if isinstance(values, (list, tuple)) else values
    deep = getattr(found, "deepstack_features", None) or ()
    deep = (torch.cat(list(each)) if isinstance(each, (list, tuple)) else each for each in deep)
    return Embeddings(values.reshape(-1, values.shape[-1]), tuple(deep))


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5 * float(want.abs().max()))


@torch.inference_mode()
def computed(tower: Tower, picture: Picture) -> Embeddings:
    state = tower.begin(picture.arrays)
    while not tower.advance(state):
        pass
    return tower.finish(state)


def test_a_warm_up_changes_no_bit(family: tuple[str, Any, Path]) -> None:
    name, _, path = family
    picture, (cold, warm) = SEEING[name].picture(0), [load_tower(prepared_config(path)) for _ in range(2)]
    warm_up(warm)
    assert torch.equal(computed(cold, picture).values, computed(warm, picture).values)


def test_embeddings_equal_those_of_transformers(family: tuple[str, Any, Path]) -> None:
    name, model, path = family
    tower = load_tower(prepared_config(path))
    for seed in range(3):
        picture = SEEING[name].picture(seed)
        got, want = computed(tower, picture), features_of(model, picture)
        assert len(got.values) == picture.count
        assert want.values.abs().mean() > 1e-3
        assert_near(got.values, want.values)
        assert len(got.deepstack) == len(want.deepstack)
        for mine, theirs in zip(got.deepstack, want.deepstack, strict=True):
            assert_near(mine, theirs)
