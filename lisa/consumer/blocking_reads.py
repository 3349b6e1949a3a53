"""A connection for blocking reads, which other threads can end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from redis import exceptions

from lisa.consumer.settler import ReadAcks
from lisa.core.model.errors import LisaError
from lisa.core.redis import errors
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection, reporting_client_id
from lisa.core.redis.flow import Command
from lisa.core.store.store import SyncStore

log = logging.getLogger("lisa.consumer")

LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
"""Errors after which the server may have delivered entries in a reply that was lost."""


def is_about_group(error: BaseException) -> bool:
    """Whether a read failed because its stream or group is missing, or was removed meanwhile."""
    return errors.is_missing_group(error) or str(error).startswith("UNBLOCKED")


class BlockingReads:
    """A separate connection for reads that block for up to `longest`.

    what: what is read, for logs.
    is_reading: whether a read is running; set by the thread that reads.
    """

    def __init__(self, store: SyncStore, address: Address, longest: timedelta, what: str) -> None:
        blocking = address.blocking_for(longest.total_seconds())
        if address.kind != "cluster":
            # CLIENT UNBLOCK must go to the right node; on a cluster, short reads are used instead.
            blocking = reporting_client_id(blocking, self._connected)
        self.connection = Connection(blocking)
        self._store = store
        self._what = what
        self._client_id: int | None = None
        self.is_reading = False

    def _connected(self, client_id: int | None) -> None:
        self._client_id = client_id

    def begin(self) -> None:
        """Record that a read starts. The caller then checks once more whether it must not."""
        self.is_reading = True

    def end(self) -> None:
        """Record that the read has ended."""
        self.is_reading = False

    def exchange(self, acks: Sequence[ReadAcks], commands: Sequence[Command]) -> list[Any]:
        """Send acks and commands in one packet; returns the replies to the commands.

        The last command is the read. Raises client errors, also that of the read; other replies may
        be errors.
        """
        left = deque(acks)
        try:
            replies = self.connection.begin([*(one.command for one in acks), *commands])
            while left:
                reply = next(replies)
                left.popleft().take(reply)
        except Exception as error:
            for one in left:
                one.take(error)
            raise
        found = list(replies)
        if isinstance(found[-1], Exception):
            raise found[-1]
        return found

    def interrupt(self) -> bool:
        """End a running read without losing entries. Returns False if the server did not answer.

        A request that arrives just before the read has no effect.
        """
        client_id = self._client_id
        if self.is_reading and client_id is not None:
            try:
                self._store.ask("CLIENT", "UNBLOCK", client_id)
            except LisaError as error:
                log.debug("%s: cannot interrupt the read: %s", self._what, error)
                return False
        return True

    def close(self) -> None:
        """Close the connection; the next read opens it again."""
        self.connection.close()
