# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: a request's part in a transfer of its prompt's KV cache, with vLLM's names.

A proxy asks the prefill engine with `do_remote_decode`, copies the reply's params into the request to the decode
engine, and that one pulls (`do_remote_prefill`). Blocks are named by content, so the params name a place and a lease
and no block: `remote_block_ids` is there for proxies that count it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config.kv_transfer import FLAG, KVTransferSettings, place_of
from quire.errors import ValidationError

FIELD = "kv_transfer_params"
PULL_FAILED = "the blocks of its prompt did not all come from the prefill engine; try again"
"""Reason of a request that ends because its pull failed (`kv_load_failure_policy`)."""
LEASE_CHARS = 36
MAX_KEYS = 64
MAX_TEXT_CHARS = 256
MAX_BLOCK_IDS = 2**17
_KINDS: dict[str, tuple[type, str]] = {
    "do_remote_decode": (bool, "true or false"),
    "do_remote_prefill": (bool, "true or false"),
    "remote_engine_id": (str, "text"),
    "remote_request_id": (str, "text"),
    "remote_host": (str, "text"),
    "remote_port": (int, "an integer"),
    "remote_block_ids": (list, "a list"),
}


class KVTransfer(msgspec.Struct, frozen=True):
    """Part of one request in a transfer: an offer of its blocks, or a pull.

    Args:
        place: address of the engine to pull from; empty: offer.
        lease: name under which that engine keeps the blocks.
    """

    place: str = ""
    lease: str = ""

    @property
    def is_pull(self) -> bool:
        return bool(self.place)


class KVOffer(msgspec.Struct, frozen=True):
    """Blocks of a finished request that are kept for another engine.

    Args:
        lease: their name as a whole; 36 characters.
        num_tokens: tokens whose blocks are kept, from the start of the prompt; 0: nothing is.
        num_blocks: the blocks that hold them, of all groups.
        expires_at: seconds since the epoch; renewable.
    """

    lease: str
    num_tokens: int
    num_blocks: int
    expires_at: float
    host: str
    port: int
    engine_id: str
    tp_size: int = 1
    pp_size: int = 1

    def as_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the reply."""
        return {
            "do_remote_prefill": self.num_tokens > 0,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(self.num_blocks))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.lease,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_num_tokens": self.num_tokens,
            "remote_blocks_expiry_time": self.expires_at,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
        }


def read_transfer(params: Any, settings: KVTransferSettings | None) -> KVTransfer | None:
    """Return a request's part in a transfer; None if it has none.

    Unknown keys are ignored, since each version of vLLM adds some for its own engines.

    Raises:
        ValidationError: names the key, what was given and what is allowed.
    """
    if params is None:
        return None
    checked = _checked(params)
    is_offer, is_pull = bool(checked.get("do_remote_decode")), bool(checked.get("do_remote_prefill"))
    if not is_offer and not is_pull:
        return None
    if is_offer and is_pull:
        raise _refusal("do_remote_decode", "and do_remote_prefill are both true; an engine does one half")
    key = "do_remote_decode" if is_offer else "do_remote_prefill"
    if settings is None:
        raise _refusal(key, f"needs an engine that was started with {FLAG}")
    if not (settings.offers if is_offer else settings.pulls):
        raise _refusal(key, f"is not for this engine, whose kv_role is {settings.kv_role}")
    return KVTransfer() if is_offer else _pull(checked, settings)


def _pull(params: dict[str, Any], settings: KVTransferSettings) -> KVTransfer:
    for key in ("remote_host", "remote_port", "remote_request_id"):
        if params.get(key) is None:
            raise _refusal(key, "is missing; pass on what the prefill engine has replied")
    host, port, lease = params["remote_host"], params["remote_port"], params["remote_request_id"]
    if not 1 <= port <= 65535:
        raise _refusal("remote_port", f"is {port}; valid are 1 to 65535")
    if len(lease) != LEASE_CHARS or not lease.isascii():
        raise _refusal(
            "remote_request_id", f"must be the {LEASE_CHARS} characters that the prefill engine gave"
        )
    place = place_of(host, port)
    if place not in settings.peers:
        raise _refusal(
            "remote_host",
            f"and remote_port name {place}, which is not among the peers that this engine may pull from "
            f"({FLAG}, kv_connector_extra_config.peers)",
        )
    return KVTransfer(place, lease)


def _checked(params: Any) -> dict[str, Any]:
    """Return the params with known keys of the right types."""
    if not isinstance(params, dict):
        raise ValidationError(f"{FIELD} must be an object, got {type(params).__name__}", param=FIELD)
    if len(params) > MAX_KEYS:
        raise ValidationError(f"{FIELD} has {len(params)} keys; {MAX_KEYS} are allowed", param=FIELD)
    for key, (kind, name) in _KINDS.items():
        value = params.get(key)
        if value is not None and type(value) is not kind:
            raise _refusal(key, f"must be {name} or null, got {type(value).__name__}")
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
            raise _refusal(key, f"has {len(value)} characters; {MAX_TEXT_CHARS} are allowed")
    _check_block_ids(params.get("remote_block_ids") or [])
    return params


def _check_block_ids(value: list[Any]) -> None:
    """Check ids, which may be in a list for each group; they are not used."""
    groups = value if all(isinstance(item, list) for item in value) else [value]
    number = len(groups) + sum(map(len, groups))
    if number > MAX_BLOCK_IDS:
        raise _refusal("remote_block_ids", f"has {number} entries; {MAX_BLOCK_IDS} are allowed")
    if not all(type(item) is int for group in groups for item in group):
        raise _refusal("remote_block_ids", "must hold integers, or a list of integers for each group")


def _refusal(key: str, why: str) -> ValidationError:
    return ValidationError(f"{FIELD}.{key} {why}", param=f"{FIELD}.{key}")
