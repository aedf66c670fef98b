# SPDX-License-Identifier: Apache-2.0
"""A request and a reply of a plug-in's own: the one in examples/plugins/io_processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.io_processors import IO_PROCESSORS, make_io_processor
from tests.entrypoints.pooling.conftest import Serve
from tests.entrypoints.pooling.test_embeddings import vectors
from tests.fixtures.entry_points import Offer
from tests.fixtures.pooling import EMBEDDER

EXAMPLE = Path(__file__).parents[3] / "examples" / "plugins" / "io_processor"
TEXTS = ["abc", "d", "hello world"]


@pytest.fixture
def outliers(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    (line,) = [
        one for one in (EXAMPLE / "pyproject.toml").read_text().splitlines() if one.startswith("outliers")
    ]
    offer(IO_PROCESSORS.group, line.replace('"', "").replace(" ", ""))


async def test_the_example_answers_in_its_own_form(serve: Serve, outliers: None) -> None:
    async with serve(EMBEDDER, engine_args={"io_processor_plugin": "outliers"}) as client:
        reply = await client.post("/pooling", json={"data": {"texts": TEXTS}, "task": "plugin"})
        assert reply.status_code == 200, reply.text
        found = np.array(await vectors(client, input=TEXTS))
        unit = found / np.linalg.norm(found, axis=1, keepdims=True)
        likeness = [(sum(one @ other for other in unit) - 1) / 2 for one in unit]
        assert reply.json()["data"]["likeness"] == pytest.approx(likeness)
        assert reply.json()["data"]["odd_one"] == TEXTS[int(np.argmin(likeness))]
        for data in ({"texts": ["a"]}, [], {"texts": ["a", "", "b"]}, {"texts": ["a" * 99, "b", "c"]}):
            refused = await client.post("/pooling", json={"data": data})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data")
        assert (await client.post("/pooling", json={"input": "abc"})).status_code == 200


async def test_without_one_its_form_is_refused(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        reply = await client.post("/pooling", json={"data": {"texts": TEXTS}})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "data")


def test_unknown_io_processor_name_is_refused(offer: Offer) -> None:
    with pytest.raises(ConfigError, match="--io-processor-plugin must be one of"):
        make_io_processor(EngineConfig.from_args(model="x", io_processor_plugin="nobody"))
