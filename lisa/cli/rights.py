"""Checks at the start of a program: its rights on the server, and that no password is visible."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lisa.core.redis.address import Address

SUBSCRIBE_TIMEOUT_S = 0.1
"""How long to wait for a refused SUBSCRIBE; the subscriber reports later refusals."""

NODE_TIMEOUT_S = 1.0


def warn_of_password(url: str | None) -> None:
    """Warn if the value of --redis has a password, because the process list shows it."""
    from lisa.core.model.addresses import ServerUrl
    from lisa.core.model.errors import ConfigError

    try:
        has_password = url and ServerUrl.parse(url).has_password
    except ConfigError:  # the address is checked later
        return
    if has_password:
        sys.stderr.write(
            "warning: every user of this machine can read the password in --redis from the process "
            "list: set LISA_REDIS_URL or LISA_REDIS__PASSWORD instead\n"
        )


def check_rights(role: str, address: Address, prefix: str) -> None:
    """Raise ConfigError, in one line, if this user lacks rights.

    An unavailable server is not an error: the daemon waits for it.
    """
    from lisa.admin.acl import rights_of
    from lisa.admin.probes import check
    from lisa.core.model.errors import ServerUnavailable
    from lisa.core.model.keys import Keys
    from lisa.core.redis import errors
    from lisa.core.redis.connection import Connection
    from lisa.core.store.store import SyncStore

    if address.kind == "cluster":  # an unresponsive node must not delay the start
        timeout_s = min(address.socket_timeout_s, NODE_TIMEOUT_S)
        address = replace(address, socket_timeout_s=timeout_s)
    with (
        suppress(ServerUnavailable),
        closing(SyncStore(Connection(address), Keys(prefix), timedelta(0), who=role)) as store,
    ):
        store.drive(check(store, role))
        if "subscribe" in rights_of([role]):
            try:
                with closing(store.connection.subscribe(store.keys.wake)) as subscription:
                    subscription.ping()  # its reply follows that to SUBSCRIBE
                    subscription.get(SUBSCRIBE_TIMEOUT_S)
            except errors.ClientError as error:
                raise errors.translated(error, store.where) from error
