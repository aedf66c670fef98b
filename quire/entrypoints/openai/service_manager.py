"""Notifications for a service manager (systemd `Type=notify`): ready, stopping, and a watchdog.

The protocol is sd_notify(3): one datagram with lines NAME=VALUE to the socket that $NOTIFY_SOCKET names; a name that
begins with @ is in the abstract namespace. Without the variable nothing is sent. Invariant: a service manager that is
gone or slow never delays or fails the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping

logger = logging.getLogger(__name__)

MICROSECONDS = 1e6
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """Connection to a service manager.

    Args:
        address: of its socket; empty: there is none, and nothing is sent.
        watchdog_s: longest time between two keep-alive messages; None: no watchdog.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s

    @staticmethod
    def adopt(environment: MutableMapping[str, str]) -> ServiceManager:
        """Return the manager that the environment of this process names.

        Its variables are removed, so that processes started from here do not report in this one's name.
        """
        address, micros, pid = (environment.pop(name, "") for name in VARIABLES)
        is_ours = pid in ("", str(os.getpid()))
        has_watchdog = is_ours and micros.isascii() and micros.isdigit() and int(micros) > 0
        return ServiceManager(address, int(micros) / MICROSECONDS if has_watchdog else None)

    def ready(self, status: str) -> None:
        """Report that requests are served, with one line for `systemctl status`."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        """Report that the server drains."""
        self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    async def keep_alive(self, is_alive: Callable[[], bool]) -> None:
        """Send keep-alive messages while `is_alive`, at half of the watchdog's time; returns at once without one."""
        if self._watchdog_s is None or not self._address:
            return
        while True:
            if is_alive():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            logger.warning("cannot notify the service manager at $NOTIFY_SOCKET: %s", error)


def _line(text: str) -> str:
    return " ".join(text.split())
