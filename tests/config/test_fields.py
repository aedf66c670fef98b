# SPDX-License-Identifier: Apache-2.0
"""Every field of every config class is documented, has a valid default, and refuses what lies outside its limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from quire.config import ServerConfig, child_configs
from quire.config.fields import Config, field_types, flag_of, info_of, plain_type
from quire.errors import ConfigError
from tests.fixtures.folded import folded

OWNERS = [*child_configs().values(), ServerConfig]
Field = dataclasses.Field[Any]
Check = Callable[[type[Config], Field], None]


def every_field(check: Check) -> Callable[[type[Config]], None]:
    """Make a test of each config class that checks all of its fields."""

    @pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
    def test(owner: type[Config]) -> None:
        for field in dataclasses.fields(owner):
            try:
                check(owner, field)
            except BaseException as error:
                error.add_note(f"the field {field.name}")
                raise

    return test


def kind_of(owner: type[Config], field: Field) -> Any:
    return plain_type(field_types(owner)[field.name])


@folded("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_defaults_are_valid_and_the_class_is_frozen(owner: type[Config]) -> None:
    config = owner()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(owner)[0].name, None)


@every_field
def test_documentation_is_a_sentence(owner: type[Config], field: Field) -> None:
    doc = info_of(field).doc
    assert doc.endswith(".")
    assert doc[0].isupper() or doc.split()[0].rstrip(":") in info_of(field).choices
    assert len(doc) < 140


@every_field
def test_name_is_a_flag(owner: type[Config], field: Field) -> None:
    assert flag_of(field.name) == "--" + field.name.replace("_", "-")
    assert not field.name.startswith("no_"), "--no-x is the opposite of a flag --x"


@every_field
def test_only_known_kinds(owner: type[Config], field: Field) -> None:
    assert kind_of(owner, field) in (int, float, bool, str, tuple, dict)


@every_field
def test_wrong_type_is_refused(owner: type[Config], field: Field) -> None:
    wrong: Any = object()
    with pytest.raises(ConfigError, match=f"^{flag_of(field.name)} must be "):
        owner(**{field.name: wrong})


@every_field
def test_value_that_is_no_choice_is_refused(owner: type[Config], field: Field) -> None:
    choices = info_of(field).choices
    if choices:
        with pytest.raises(ConfigError, match=f"^{flag_of(field.name)} must be one of {choices[0]}.*'bogus'"):
            owner(**{field.name: "bogus"})
        for choice in choices:
            owner(**{field.name: choice})


@every_field
def test_limits_are_refused_beyond_and_taken_at(owner: type[Config], field: Field) -> None:
    info = info_of(field)
    for limit, beyond in ((info.ge, -1), (info.le, 1)):
        if limit is not None:
            owner(**{field.name: limit})
            with pytest.raises(ConfigError, match=f"^{flag_of(field.name)} must be at (least|most) "):
                owner(**{field.name: limit + beyond})
    if info.gt is not None:
        with pytest.raises(ConfigError, match=f"^{flag_of(field.name)} must be greater than "):
            owner(**{field.name: info.gt})


@every_field
def test_numbers_must_be_finite_and_no_booleans(owner: type[Config], field: Field) -> None:
    kind = kind_of(owner, field)
    if kind is float:
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(ConfigError, match="finite"):
                owner(**{field.name: value})
    if kind in (int, float):
        with pytest.raises(ConfigError, match=r"must be (an integer|a number), got True"):
            owner(**{field.name: True})
