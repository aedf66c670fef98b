from __future__ import annotations

import pytest

from quire.engine.client import SPIN_COUNT, core_environment


def test_the_core_does_not_spin_for_long() -> None:
    assert core_environment({"PATH": "/bin"}) == {"PATH": "/bin", "GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_what_the_user_chose_stands(chosen: dict[str, str]) -> None:
    assert core_environment(chosen) == chosen
