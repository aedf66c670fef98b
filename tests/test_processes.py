from __future__ import annotations

import gc
import weakref

from quire.processes import collect_garbage


class Node:
    """It knows itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


def test_what_has_settled_is_collected_too_and_what_is_left_stays_settled() -> None:
    try:
        node = Node()
        alive = weakref.ref(node)
        gc.freeze()
        del node
        gc.collect()
        assert alive() is not None
        collect_garbage()
        assert alive() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    collect_garbage()
    assert gc.get_freeze_count() == 0
