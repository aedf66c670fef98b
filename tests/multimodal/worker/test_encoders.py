# SPDX-License-Identifier: Apache-2.0
"""The store of embeddings: slices within a budget, and items that cannot be encoded."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.media import MediaItem
from quire.multimodal.worker.encoders import EncoderStore, open_encoder
from tests.fixtures.seeing_models import SEEING, make_seeing
from tests.models.harness import prepared_config
from tests.multimodal.worker.driver import seeing_worker, shown, write_item


@pytest.fixture(name="store", scope="module")
def _store(tmp_path_factory: Any) -> Iterator[tuple[EncoderStore, Path]]:
    path = tmp_path_factory.mktemp("llava")
    make_seeing("llava", path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(EncoderStore, "_floats", lambda _self, arrays: arrays)
        yield open_encoder(prepared_config(path)), path


def image(path: Path, seed: int = 0) -> MediaItem:
    (found,) = shown([SEEING["llava"].picture(seed)], path).media
    return found


def test_a_budget_of_nothing_computes_one_slice_at_a_time(store: tuple[EncoderStore, Path]) -> None:
    encoder, path = store
    media = [image(path, 1), image(path, 2)]
    calls = 0
    while len(encoder.encode(media, 0.0).done) < 2:
        calls += 1
        assert calls < 1000
    assert calls > 10
    progress = encoder.encode(media, 0.0)
    assert progress.done == [each.digest for each in media]
    assert progress.num_bytes == {each.digest: 16 * 64 * 4 for each in media}
    encoder.drop([media[0].digest, b"unknown"])
    assert encoder.embeddings(media[0].digest) is None
    assert encoder.embeddings(media[1].digest) is not None


def test_bad_items_cost_themselves(store: tuple[EncoderStore, Path], tmp_path: Path) -> None:
    encoder, path = store
    good = image(path, 3)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(Path(good.path).read_bytes()[:100])
    odd = {"pixel_values": np.zeros((1, 3, 18, 16), dtype=np.float32)}
    small = {"pixel_values": np.zeros((1, 3, 8, 8), dtype=np.float32)}
    flat = {"pixel_values": np.zeros((3, 16), dtype=np.float32)}
    bad = [
        msgspec.structs.replace(good, digest=b"gone", path=str(tmp_path / "gone")),
        msgspec.structs.replace(good, digest=b"torn", path=str(torn)),
        msgspec.structs.replace(good, digest=b"few", runs=[(0, 15)]),
    ]
    for name, arrays in {"odd": odd, "small": small, "flat": flat, "none": {"x": np.zeros(1)}}.items():
        _, at = write_item(arrays, tmp_path)
        bad.append(msgspec.structs.replace(good, digest=name.encode(), path=at))
    progress = encoder.encode([*bad, good], 1e9)
    assert progress.done == [good.digest]
    assert set(progress.failed) == {each.digest for each in bad}
    assert "its positions take [15, 64]" in progress.failed[b"few"]
    assert "no whole patches of 4" in progress.failed[b"odd"]
    assert "the image has 2 x 2" in progress.failed[b"small"]


def test_embeddings_from_a_file_are_kept_as_they_are(
    store: tuple[EncoderStore, Path], tmp_path: Path
) -> None:
    encoder, _ = store
    values = np.random.default_rng(0).standard_normal((5, 64), dtype=np.float32)
    digest, at = write_item({"values": values}, tmp_path)
    embeds = MediaItem(digest, "embeds", 0, 5, [(0, 5)], at)
    assert encoder.encode([embeds], 0.0).done == [digest]
    found = encoder.embeddings(digest)
    assert found is not None
    assert torch.equal(found.values, torch.from_numpy(values))
    narrow = msgspec.structs.replace(embeds, digest=b"narrow", runs=[(0, 4)])
    assert "embeddings [5, 64]" in encoder.encode([narrow], 0.0).failed[b"narrow"]


def test_the_language_model_only_has_no_encoder(store: tuple[EncoderStore, Path]) -> None:
    _, path = store
    encoder = open_encoder(prepared_config(path, language_model_only=True))
    item = image(path, 4)
    assert "no encoder" in encoder.encode([item], 0.0).failed[item.digest]


def test_towers_compute_in_bfloat16_and_int8(store: tuple[EncoderStore, Path]) -> None:
    encoder, path = store
    item = image(path, 5)
    encoder.encode([item], 1e9)
    want = encoder.embeddings(item.digest)
    assert want is not None
    for args in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        other = EncoderStore(*_config_and_tower(path, args))
        assert other.encode([item], 1e9).done == [item.digest]
        found = other.embeddings(item.digest)
        assert found is not None
        error = (found.values - want.values).norm() / want.values.norm()
        assert 0 < error < 0.05


TOWERS = {
    "llava-onevision": ["vision_tower", "multi_modal_projector"],
    "qwen2.5-vl": ["visual"],
    "qwen3-vl": ["visual"],
    "llama4": ["vision_model", "multi_modal_projector"],
}
"""Name -> prefixes of the tower's layers."""


@pytest.mark.parametrize("name", TOWERS)
def test_an_int8_tower_is_near_and_can_be_left_out(name: str, tmp_path: Path) -> None:
    make_seeing(name, tmp_path)
    arrays = SEEING[name].picture(0).arrays
    rounded = {"quantization": "int8"}
    embeddings = []
    for more in ({}, rounded, rounded | {"quantization_config": {"ignore": [*TOWERS[name], "lm_head"]}}):
        _, tower = _config_and_tower(tmp_path, more)
        state = tower.begin(arrays)
        with torch.inference_mode():
            while not tower.advance(state):
                pass
        embeddings.append(tower.finish(state).values)
    plain, near, ignored = embeddings
    assert 0 < (near - plain).norm() / plain.norm() < 0.1  # random weights, 3 times as large
    assert torch.equal(ignored, plain)


def test_names_of_either_part_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_seeing("llava", tmp_path)
    both = {"quantization": "int8", "quantization_config": {"ignore": ["vision_tower", "lm_head"]}}
    seeing_worker(tmp_path, monkeypatch, **both).shutdown()
    for wrong in ("vision_towers", "vision_tower.layers", "lm_heads"):
        options = {"quantization": "int8", "quantization_config": {"ignore": [wrong]}}
        with pytest.raises(ConfigError, match=f"ignore names '{wrong}', which no layer bears"):
            seeing_worker(tmp_path, monkeypatch, **options)


def _config_and_tower(path: Path, args: dict[str, Any]) -> tuple[Any, Any]:
    from quire.multimodal.towers.load import load_tower

    config = prepared_config(path, **args)
    return config, load_tower(replace(config))
