"""Reads what is new in one group's stream: a read that waits, and that others may end."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from lisa.consumer.settler import Settler
from lisa.consumer.subscription import Subscription
from lisa.core.address import Address
from lisa.core.clients import telling_its_id
from lisa.core.connection import Connection
from lisa.core.errors import LisaError
from lisa.core.flow import Command
from lisa.core.stream import Entry, parse_read, read_command

__all__ = ["Intake"]

log = logging.getLogger("lisa.consumer")

LONGEST_CLUSTER_BLOCK = timedelta(seconds=1)


class Intake:
    """A connection of its own for one subscription's reads; `longest` is how long one may wait."""

    def __init__(
        self, sub: Subscription, address: Address, poll: timedelta, settler: Settler
    ) -> None:
        # CLIENT UNBLOCK needs to know the node; on a cluster short blocks do instead.
        self.longest = min(poll, LONGEST_CLUSTER_BLOCK) if address.kind == "cluster" else poll
        blocking = address.blocking_for(self.longest.total_seconds())
        if address.kind != "cluster":
            blocking = telling_its_id(blocking, self._connected)
        self._connection = Connection(blocking)
        self._sub = sub
        self._settler = settler
        self._client_id: int | None = None
        self.is_reading = False

    def _connected(self, client_id: int | None) -> None:
        self._client_id = client_id

    def read(self, count: int, block: timedelta) -> list[Entry]:
        """At most `count` entries; none if it was interrupted. Raises client errors."""
        sub = self._sub
        stream = sub.store.keys.topic(sub.topic).group(sub.group).ready
        block_ms = block // timedelta(milliseconds=1)
        command = read_command(stream, sub.group, sub.name, count, block_ms)
        self.is_reading, was_forgotten = True, sub.is_forgotten
        try:
            if sub.is_interrupted():
                return []
            reply = self._ask(command)
        finally:
            self.is_reading = False
        if was_forgotten:  # the group is there all the same: only the record was swept
            sub.is_forgotten = False
        return parse_read(reply)

    def _ask(self, command: Command) -> Any:
        """The reply of a read; a few acks go along with it."""
        along = self._settler.along(self._sub)
        if along is None:
            return self._connection.execute(command)
        try:
            replies = self._connection.begin((along.command, command))
            acked = next(replies)
        except Exception as error:
            along.take(error)
            raise
        along.take(acked)
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def interrupt(self) -> bool:
        """End the read, without losing what it may just be given.

        False if the server could not be asked to.
        """
        client_id = self._client_id
        if self.is_reading and client_id is not None:
            try:
                self._sub.store.ask("CLIENT", "UNBLOCK", client_id)
            except LisaError as error:
                log.debug("topic %s: cannot be interrupted: %s", self._sub.topic, error)
                return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
