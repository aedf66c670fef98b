# SPDX-License-Identifier: Apache-2.0
"""Hostile and foreign `kv_transfer_params`, and the keys of `--kv-transfer-config`."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.kv_transfer import parse_transfer_config, place_of, with_absolute_key_file
from quire.errors import ConfigError, ValidationError
from quire.kv_transfer_params import KVOffer, KVTransfer, read_transfer
from tests.fixtures.folded import folded

EXTRA = {"peers": ["10.0.0.7:14579", "tcp://[FE80::1]:7"]}
BOTH = {"kv_connector": "RowServerConnector", "kv_role": "kv_both", "kv_connector_extra_config": EXTRA}
SETTINGS = parse_transfer_config(BOTH)
LEASE = str(uuid.UUID(int=7))
PULL: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_request_id": LEASE,
    "remote_host": "10.0.0.7", "remote_port": 14579, "remote_block_ids": [[1, 2], [3]], "tp_size": 1,
}  # fmt: skip
ASKED: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def test_vllms_params_are_an_offer_or_a_pull() -> None:
    assert read_transfer(ASKED, SETTINGS) == KVTransfer()
    assert read_transfer(PULL, SETTINGS) == KVTransfer("tcp://10.0.0.7:14579", LEASE)
    assert read_transfer(PULL | {"remote_host": "fe80::1", "remote_port": 7}, SETTINGS) == KVTransfer(
        "tcp://[fe80::1]:7", LEASE
    )
    nothing: list[Any] = [None, {}, {"do_remote_prefill": False, "a key of a later vLLM": 3}]
    assert [read_transfer(params, SETTINGS) for params in nothing] == [None] * 3


def test_the_params_of_an_offer_are_those_of_a_pull() -> None:
    offer = KVOffer(LEASE, 16, 4, 1.0, "10.0.0.7", 14579, "engine")
    assert read_transfer(offer.as_params(), SETTINGS) == KVTransfer("tcp://10.0.0.7:14579", LEASE)
    nothing = KVOffer(LEASE, 0, 0, 1.0, "10.0.0.7", 14579, "engine")
    assert read_transfer(nothing.as_params(), SETTINGS) is None


@folded(
    ("params", "message"),
    [
        ([], "must be an object, got list"),
        ("x", "must be an object, got str"),
        ({str(number): 1 for number in range(65)}, "has 65 keys; 64 are allowed"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill must be true or false or null, got str"),
        ({"do_remote_decode": 1}, "do_remote_decode must be true or false or null, got int"),
        (PULL | {"do_remote_decode": True}, "both true"),
        (PULL | {"remote_host": None}, "remote_host is missing"),
        (PULL | {"remote_host": ["10.0.0.7"]}, "remote_host must be text"),
        (PULL | {"remote_host": "h" * 257}, "has 257 characters; 256 are allowed"),
        (PULL | {"remote_port": "14579"}, "remote_port must be an integer"),
        (PULL | {"remote_port": True}, "remote_port must be an integer"),
        (PULL | {"remote_port": 0}, "valid are 1 to 65535"),
        (PULL | {"remote_port": 10**30}, "valid are 1 to 65535"),
        (PULL | {"remote_host": "169.254.169.254"}, "not among the peers"),
        (PULL | {"remote_host": "10.0.0.7:14579"}, "not among the peers"),
        (PULL | {"remote_port": 14580}, "not among the peers"),
        (PULL | {"remote_host": "10.0.0.7@evil"}, "not among the peers"),
        (PULL | {"remote_request_id": "short"}, "36 characters"),
        (PULL | {"remote_request_id": "é" * 36}, "36 characters"),
        (PULL | {"remote_request_id": None}, "remote_request_id is missing"),
        (PULL | {"remote_block_ids": {"a": 1}}, "remote_block_ids must be a list"),
        (PULL | {"remote_block_ids": [["a"]]}, "must hold integers"),
        (PULL | {"remote_block_ids": [1, [2]]}, "must hold integers"),
        (PULL | {"remote_block_ids": [[[1]]]}, "must hold integers"),
        (PULL | {"remote_block_ids": [0] * 2**17}, "131072 are allowed"),
        (PULL | {"remote_block_ids": [[]] * (2**17 + 1)}, "131072 are allowed"),
    ],
)
def test_hostile_params_are_refused_with_a_message(params: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        read_transfer(params, SETTINGS)


def test_roles_and_engines_without_transfers_refuse() -> None:
    producer = parse_transfer_config(BOTH | {"kv_role": "kv_producer"})
    consumer = parse_transfer_config(BOTH | {"kv_role": "kv_consumer"})
    with pytest.raises(ValidationError, match="whose kv_role is kv_producer"):
        read_transfer(PULL, producer)
    with pytest.raises(ValidationError, match="whose kv_role is kv_consumer"):
        read_transfer(ASKED, consumer)
    with pytest.raises(ValidationError, match="started with --kv-transfer-config"):
        read_transfer(ASKED, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(changes=st.dictionaries(st.sampled_from(sorted(PULL)), JSON), base=st.sampled_from([PULL, ASKED]))
def test_any_params_are_read_or_refused(changes: dict[str, Any], base: dict[str, Any]) -> None:
    with contextlib.suppress(ValidationError):
        read = read_transfer(base | changes, SETTINGS)
        assert read is None or read.place in ("", "tcp://10.0.0.7:14579", "tcp://[fe80::1]:7")


@folded(
    ("changes", "message"),
    [
        ({"kv_role": None}, 'needs "kv_role"'),
        ({"kv_role": "both"}, "kv_role must be one of kv_producer, kv_consumer, kv_both, got 'both'"),
        ({"kv_connector": None}, 'needs "kv_connector"'),
        ({"kv_connector": "NixlConnector"}, "a connector of vLLM"),
        ({"kv_conector": 1}, "kv_conector"),
        ({"kv_port": "x"}, "kv_port"),
        ({"kv_port": 70000}, "kv_port"),
        ({"kv_ip": "0.0.0.0"}, "the address of this host"),
        ({"kv_ip": ""}, "the address of this host"),
        ({"kv_connector_module_path": "a.b"}, "run code from a path"),
        ({"kv_load_failure_policy": "ignore"}, "must be one of recompute, fail"),
        ({"kv_connector_extra_config": {"peer": []}}, "unknown key 'peer'"),
        ({"kv_connector_extra_config": {"peers": ["host"]}}, "must be HOST:PORT"),
        ({"kv_connector_extra_config": {"peers": ["h:99999"]}}, "must be HOST:PORT"),
        ({"kv_connector_extra_config": {"peers": ["u@h:1"]}}, "must be HOST:PORT"),
        ({"kv_connector_extra_config": {"lease_s": 0}}, "lease_s"),
        ({"kv_role": "kv_consumer", "kv_connector_extra_config": {}}, "needs the prefill engines"),
        ({"kv_connector_extra_config": {"peers": ["h:1"] * 257}}, "at most 256"),
    ],
)
def test_impossible_configs_are_refused_with_a_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_transfer_config(BOTH | changes)


def test_keys_without_meaning_are_accepted() -> None:
    changes = {"kv_rank": 0, "kv_parallel_size": 2, "kv_buffer_device": "cuda", "engine_id": "e"}
    settings = parse_transfer_config(BOTH | changes)
    assert settings is not None
    assert (settings.offers, settings.pulls) == (True, True)
    assert parse_transfer_config({}) is None


def test_a_relative_key_file_becomes_absolute(tmp_path: Path) -> None:
    value = BOTH | {"kv_connector_extra_config": {"key_file": "key"}}
    got = with_absolute_key_file(value, tmp_path)
    assert got["kv_connector_extra_config"] == {"key_file": str(tmp_path / "key")}
    assert with_absolute_key_file(BOTH, tmp_path) == BOTH
    assert place_of("Host", 1) == "tcp://host:1"
