# SPDX-License-Identifier: Apache-2.0
"""The table of built-in architectures: in order, each with a tiny checkpoint that the tests of all families have."""

from __future__ import annotations

from pathlib import Path

from quire.models.built_in import BUILT_IN, TRANSFORMERS
from tests.fixtures.folded import folded
from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.tiny_models import TINY_MODELS
from tools.models_page import PAGE, models_page


def architecture_of(name: str) -> str:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if name in PLAIN:
        return str(PLAIN[name].config["architectures"][0])
    if name in FOREIGN:
        return FOREIGN[name].architecture
    return str(MODEL_FOR_CAUSAL_LM_MAPPING[type(TINY_MODELS[name]())].__name__)


def test_rows_are_in_the_order_of_the_alphabet() -> None:
    assert list(BUILT_IN) == sorted(BUILT_IN, key=str.lower)


def test_every_architecture_has_a_checkpoint_in_the_tests() -> None:
    tested = {architecture_of(name) for name in [*TINY_MODELS, *FOREIGN, *PLAIN]}
    assert tested == BUILT_IN.keys()


@folded("architecture", BUILT_IN)
def test_architectures_in_transformers_have_it_as_oracle(architecture: str) -> None:
    import transformers

    assert hasattr(transformers, architecture) == (BUILT_IN[architecture].oracle == TRANSFORMERS)


def test_the_page_of_models_is_that_of_the_table() -> None:
    assert Path(PAGE).read_text() == models_page(), "run: python -m tools.models_page"
    assert f"{len(BUILT_IN)} architectures" in Path("README.md").read_text()
