"""The address of a running Ray cluster, checked before anything is begun. Loads no Ray."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from runner.errors import ConfigError

REACH_DEADLINE_S = 5.0
TOKEN_FILE = Path("~/.ray/auth_token")


def use_token() -> None:
    """Make Ray show its token to the cluster it joins, if there is one. Before Ray is imported.

    Ray does so by itself only for a cluster that it finds without an address; a cluster that asks
    for no token takes no notice. RAY_AUTH_MODE, when set, stands.
    """
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if named or TOKEN_FILE.expanduser().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def check_reachable(address: str) -> None:
    """Raise ConfigError when nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        if address == "auto":
            return
        raise ConfigError(
            f"--address {address}: expected HOST:PORT, for example head:6379, or auto"
        )
    try:
        socket.create_connection((host, int(port)), timeout=REACH_DEADLINE_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--address {address}: no Ray cluster answers there ({error}); "
            "`ray status` on its head names the right one"
        ) from error
