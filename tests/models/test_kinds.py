# SPDX-License-Identifier: Apache-2.0
"""The tiny models of engine tests (`COVER`) have every kind of part, and each of them is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.kinds import MODELS, cover, kinds_of
from tests.fixtures.quick import COVER, SOME_MODELS


@pytest.mark.more
def test_some_models_have_every_kind_of_part(tiny_model: Callable[[str], Path]) -> None:
    kinds = {name: kinds_of(tiny_model(name)) for name in MODELS}
    assert cover(kinds, COVER) == [*COVER], "a new kind of part: add the last to COVER"
    for name in set(COVER) - {*SOME_MODELS}:
        rest = frozenset[str]().union(*(kinds[other] for other in COVER if other != name))
        assert kinds[name] - rest, f"others of COVER have all that {name} has"
