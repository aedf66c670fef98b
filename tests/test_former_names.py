# SPDX-License-Identifier: Apache-2.0
"""Former places of public names stay importable for one release, with a warning that names the new one."""

from __future__ import annotations

import importlib
import sys

import pytest

FORMER = {
    ("quire.pooling_outputs", "EmbeddingRequestOutput"): "quire.pooling.outputs",
    ("quire.engine.replay", "replay"): "quire.engine.trace",
    (
        "quire.structured_output.params",
        "StructuredOutputsParams",
    ): "quire.structured_outputs_params",
}


@pytest.mark.parametrize(("former", "present"), FORMER.items(), ids=str)
def test_former_module_imports_with_warning(
    former: tuple[str, str], present: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = former
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.warns(DeprecationWarning, match=present):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(present), name)
