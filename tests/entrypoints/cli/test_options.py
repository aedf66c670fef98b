# SPDX-License-Identifier: Apache-2.0
"""Flags are the config classes: what the command line gives is what the config holds, and nothing else changes."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig, ServerConfig, child_configs, engine_fields
from quire.config.fields import Config, field_types, flag_of, hashed_key, info_of, plain_type
from quire.entrypoints.cli.main import cli
from quire.entrypoints.cli.options import COMMON, engine_config, server_config
from quire.entrypoints.cli.serve import serve
from tests.fixtures.folded import folded

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
KEY = TEXT.map(str.strip).filter(bool)
FIELDS = {
    field.name: (owner, field)
    for owner in (*child_configs().values(), ServerConfig)
    for field in dataclasses.fields(owner)
}


def parsed(*argv: str) -> dict[str, Any]:
    """The parameters of `quire serve` with these arguments."""
    root = click.Context(cli, info_name="quire", **cli.context_settings)  # type: ignore[arg-type]
    with serve.make_context("serve", list(argv), parent=root) as ctx:
        return ctx.params


def configs(*argv: str) -> tuple[EngineConfig, ServerConfig]:
    params = parsed(*argv)
    return engine_config(params), server_config(params)


def value_of(configs: tuple[EngineConfig, ServerConfig], name: str) -> Any:
    engine, server = configs
    return (
        getattr(getattr(engine, engine_fields()[name][0]), name)
        if name in engine_fields()
        else getattr(server, name)
    )


def values(owner: type[Config], field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    info = info_of(field)
    if field.name == "quantization_config":
        return st.fixed_dictionaries(
            {"group_size": st.sampled_from([32, 64, 128]), "symmetric": st.booleans()}
        )
    if field.name == "structured_outputs_config":
        return st.fixed_dictionaries({"cache_mb": st.integers(1), "disable_any_whitespace": st.booleans()})
    if field.name == "kv_events_config":
        return st.fixed_dictionaries({"buffer_steps": st.integers(1), "topic": TEXT})
    if field.name == "kv_transfer_config":
        required = {"kv_connector": st.just("RowServerConnector"), "kv_role": st.just("kv_both")}
        return st.fixed_dictionaries({**required, "kv_port": st.integers(1, 60000)})
    if field.name == "profiler_config":
        return st.fixed_dictionaries({"profiler": st.just("torch"), "torch_profiler_dir": TEXT})
    if field.name == "speculative_config":
        return st.fixed_dictionaries({"method": TEXT, "num_speculative_tokens": st.integers(1, 64)})
    if field.name in ("api_key", "admin_api_key"):
        return KEY if field.name == "admin_api_key" else st.lists(KEY, min_size=1).map(tuple)
    if info.choices:
        return st.sampled_from(info.choices)
    if field_types(owner)[field.name] == tuple[int, ...]:
        return st.lists(st.integers(1), min_size=1).map(tuple)
    low, high = info.ge if info.ge is not None else info.gt, info.le
    strategies: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(min_value=low and int(low), max_value=high and int(high)),
        float: st.floats(low, high, exclude_min=info.gt is not None, allow_nan=False, allow_infinity=False),
        str: TEXT,
        tuple: st.lists(TEXT, min_size=1).map(tuple),
        dict: st.dictionaries(TEXT, st.integers(1), min_size=1),
    }
    return strategies[plain_type(field_types(owner)[field.name])]


def kept(name: str, value: Any) -> Any:
    """Return the value that a config field stores for a given one: for API keys, their hashes."""
    if name == "admin_api_key":
        return hashed_key(value)
    return tuple(map(hashed_key, value)) if name == "api_key" else value


def spelt(name: str, value: Any, underscores: bool) -> list[str]:
    """The arguments that say `name = value`."""
    flag = "--" + name if underscores else flag_of(name)
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no_" if underscores else "--no-", 1)]
    if isinstance(value, tuple):
        return [f"{flag}={item}" for item in value]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


@folded("name", FIELDS)
@settings(derandomize=True, max_examples=3, deadline=None)
@given(data=st.data())
def test_every_flag_reaches_its_field_and_no_other(name: str, data: st.DataObject) -> None:
    value = data.draw(values(*FIELDS[name]))
    given_configs = configs(*spelt(name, value, underscores=data.draw(st.booleans())))
    defaults = (EngineConfig(), ServerConfig())
    assert value_of(given_configs, name) == kept(name, value)
    assert all(
        value_of(given_configs, other) == value_of(defaults, other) for other in FIELDS if other != name
    )


def test_no_flags_is_the_default_config() -> None:
    assert configs() == (EngineConfig(), ServerConfig())


def test_help_lists_every_flag_with_its_documentation_by_owner() -> None:
    root = click.Context(cli, info_name="quire", **{**cli.context_settings, "terminal_width": 400})  # type: ignore[arg-type]
    text = serve.get_help(
        click.Context(serve, info_name="serve", parent=root, max_content_width=400, terminal_width=400)
    )
    for name, (owner, field) in FIELDS.items():
        heading = "Common" if name in COMMON else owner.__name__.removesuffix("Config")
        section = text.split(f"{heading} options:")[1].split("options:")[0]
        assert re.search(rf"  (-\w+, )?{flag_of(name)} ", section), name
        assert info_of(field).doc in section


def test_help_begins_with_ten_common_flags() -> None:
    text = serve.get_help(click.Context(serve))
    section = text.split("Common options:")[1].split("options:")[0]
    assert re.findall(r"^  (?:-\w+, )?(--[\w-]+)", section, flags=re.MULTILINE) == [
        flag_of(name) for name in COMMON
    ]
    assert len(COMMON) == 10
    assert text.index("Common options:") < text.index("Model options:")


def test_default_is_shown_where_there_is_one() -> None:
    text = " ".join(serve.get_help(click.Context(serve)).split())
    assert "Tokens per KV cache block. [default: 16]" in text
    assert "between requests. [default: true]" in text
    assert "default: the model's own. --revision" in text


def test_human_integers() -> None:
    assert configs("--max-model-len", "4K")[0].model.max_model_len == 4096
    assert configs("--max-model-len", "auto")[0].model.max_model_len == -1


@folded(
    ("argv", "message"),
    [
        (["--block-size", "big"], "'--block-size': 'big' is not an integer"),
        (["--hf-overrides", "[]"], "'--hf-overrides': '[]' is not a JSON object"),
        (["--dtype", "int3"], "'--dtype': 'int3' is not one of 'auto'"),
        (["--gpu-memory-utilization", "much"], "'much' is not a valid float"),
        (["--block-siz", "3"], "Did you mean '--block-size'"),
        (["a", "b"], "unexpected extra argument"),
    ],
)
def test_usage_errors(argv: list[str], message: str) -> None:
    with pytest.raises(click.UsageError) as error:
        parsed(*argv)
    assert message in error.value.format_message()
