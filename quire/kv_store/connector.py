# SPDX-License-Identifier: Apache-2.0
"""Connectors: how a worker's rows get from a prefill engine to a decode engine.

A connector is a plug-in (`CONNECTORS`). Its methods carry vLLM's verbs, and work on rows named by content: the core
(`quire.kv_store.transfer_tier`) decides what is offered and pulled, and when.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.config.kv_store import read_key
from quire.config.kv_transfer import BUILT_IN, FLAG, KVTransferSettings, place_of
from quire.errors import ConfigError
from quire.kv_cache.rows import LeaseStats
from quire.kv_store import protocol
from quire.kv_store.leases import LeasedRows
from quire.kv_store.peer import PeerStore
from quire.kv_store.protocol import CHECKSUM
from quire.kv_store.row_store import Namespace, Row, RowStore
from quire.kv_store.server import RowServer
from quire.plugins import PluginTable, subclass_of


class Connector(ABC):
    """Transfers of one worker's rows.

    Methods with a `peer` are called from one thread for each peer, the others from a thread of their own. They return
    within a bounded time. Names of one call are distinct, in the order of their sequence, head first; a name covers
    the tokens, adapter and salt of its row.

    Invariant: a row that `start_load_kv` reports as loaded has exactly the bytes that were offered under its name by an
    engine of the same namespace.

    Args:
        settings: keys of `--kv-transfer-config`.
        namespace: everything else that the bytes of this worker's rows depend on.
        port: where this worker offers rows; 0: any.
        port_offset: number of this worker's rank, which the ports of peers are ahead by.

    Attributes:
        host, port: where it offers rows; port 0: nowhere.

    Raises:
        ConfigError: it cannot work with these settings.
    """

    host: str = ""
    port: int = 0

    @abstractmethod
    def __init__(
        self, settings: KVTransferSettings, namespace: Namespace, port: int, port_offset: int
    ) -> None: ...

    @abstractmethod
    def save_kv(self, lease: bytes, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Keep copies of rows for another engine under a lease, new or known; returns which are kept."""

    @abstractmethod
    def drop(self, names: Sequence[bytes]) -> None:
        """End leases of this engine, and drop rows whose content is wrong."""

    @abstractmethod
    def get_new_matched(self, peer: str, names: Sequence[bytes]) -> list[bool]:
        """Return which rows a peer has.

        Raises:
            RowStoreError: the peer does not work now, or its rows do not fit.
        """

    @abstractmethod
    def start_load_kv(self, peer: str, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Fill rows from a peer; returns which were loaded, and the others have undefined content.

        Raises:
            RowStoreError: the peer does not work now, or its rows do not fit.
        """

    @abstractmethod
    def renew_lease(self, peer: str, lease: bytes) -> None:
        """Ask a peer to keep the rows of a lease for longer. Raises RowStoreError: the peer does not work now."""

    @abstractmethod
    def finish_recv(self, peer: str, lease: bytes) -> None:
        """Notify a peer that its rows are not needed any more. Raises RowStoreError: it does not work now."""

    def lease_stats(self) -> LeaseStats:
        """Return the leases that are held; from the thread of `save_kv`. A connector without a count has none."""
        return LeaseStats()

    @abstractmethod
    def shutdown(self) -> None:
        """Release sockets, memory and threads; may be called twice."""


class RowServerConnector(Connector):
    """Offered rows in this process's memory, served by a row server; pulls by its protocol."""

    def __init__(
        self, settings: KVTransferSettings, namespace: Namespace, port: int, port_offset: int
    ) -> None:
        key_file = settings.extra.key_file
        key = None if key_file is None else read_key(key_file, f"{FLAG} key_file")
        self._seed = protocol.checksum_seed(namespace)
        self._sent = protocol.sent_namespace(namespace)
        self._rows: LeasedRows | None = None
        self._server: RowServer | None = None
        self._peers: dict[str, PeerStore] = {}
        if settings.pulls:
            for peer in settings.peers:
                address = protocol.parse_address(peer)
                dialed = place_of(address.host, address.port + port_offset)
                self._peers[peer] = PeerStore(dialed, namespace, key)
        if settings.offers:
            self._serve(settings, port, key)

    def save_kv(self, lease: bytes, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        assert self._rows is not None, "this engine offers nothing"
        sent = [
            [memoryview(CHECKSUM.pack(protocol.checksum(self._seed, name, row))), *row]
            for name, row in zip(names, rows, strict=True)
        ]
        return self._rows.offer(lease, names, sent)

    def drop(self, names: Sequence[bytes]) -> None:
        assert self._rows is not None, "this engine offers nothing"
        self._rows.remove(names)

    def get_new_matched(self, peer: str, names: Sequence[bytes]) -> list[bool]:
        return self._peers[peer].find(names)

    def start_load_kv(self, peer: str, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        return self._peers[peer].read(names, rows)

    def renew_lease(self, peer: str, lease: bytes) -> None:
        self._peers[peer].touch([lease])

    def finish_recv(self, peer: str, lease: bytes) -> None:
        self._peers[peer].remove([lease])

    def lease_stats(self) -> LeaseStats:
        return LeaseStats() if self._rows is None else self._rows.lease_stats()

    def shutdown(self) -> None:
        for peer in self._peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()
        if self._rows is not None:
            self._rows.shut_down()

    def _serve(self, settings: KVTransferSettings, port: int, key: bytes | None) -> None:
        self._rows = LeasedRows(int(settings.kv_buffer_size), settings.extra.lease_s)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._rows.shut_down)
            self._server = RowServer(place_of(settings.kv_ip, port), self._open, key)
            on_error.pop_all()
        self.host, self.port = settings.kv_ip, protocol.parse_address(self._server.address).port
        self._server.start()

    def _open(self, namespace: Namespace) -> RowStore:
        """Return the offered rows for a client whose rows are like these.

        Raises:
            OtherNamespaceError: they are not; has the differing values.
        """
        namespace.check_same(self._sent, "the prefill engine")
        assert self._rows is not None
        return self._rows


CONNECTORS: PluginTable[type[Connector]] = PluginTable(
    "quire.kv_connectors",
    f'{FLAG}: "kv_connector"',
    {BUILT_IN: RowServerConnector},
    subclass_of(Connector),
)


def open_connector(
    settings: KVTransferSettings, namespace: Namespace, port: int, port_offset: int
) -> Connector:
    """Return the configured connector of one worker.

    Raises:
        ConfigError: there is none of that name, or it cannot work with these settings.
    """
    try:
        return CONNECTORS.resolve(settings.kv_connector)(settings, namespace, port, port_offset)
    except ConfigError as error:
        raise ConfigError(f"{FLAG}: {str(error).removeprefix(f'{FLAG}: ')}") from error
