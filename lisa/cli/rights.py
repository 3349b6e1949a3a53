"""What a daemon asks once, before it begins: whether the server permits all that its role does."""

from __future__ import annotations

from contextlib import closing, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lisa.core.address import Address

__all__ = ["check_rights"]

ANSWERED_WITHIN_S = 0.1
"""How long a refusal to listen may take; a later one is told by who listens."""


def check_rights(role: str, address: Address, prefix: str) -> None:
    """Raise ConfigError, in one line, if this user lacks rights.

    A server that is not there is left to the daemon, which knows how to wait for it.
    """
    from lisa.admin.acl import rights_of
    from lisa.admin.probes import check
    from lisa.core import failures
    from lisa.core.connection import Connection
    from lisa.core.errors import ServerUnavailable
    from lisa.core.keys import Keys
    from lisa.core.store import SyncStore

    with (
        suppress(ServerUnavailable),
        closing(SyncStore(Connection(address), Keys(prefix), timedelta(0), who=role)) as store,
    ):
        store.drive(check(store, role))
        if "subscribe" in rights_of([role]):
            try:
                with closing(store.connection.subscribe(store.keys.wake)) as subscription:
                    subscription.get(ANSWERED_WITHIN_S)
            except failures.ClientError as error:
                raise failures.translated(error, store.where) from error
