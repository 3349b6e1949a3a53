"""Access to the Redis server from Spark's driver and workers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

from lisa.core.model.keys import DEFAULT_PREFIX, Keys
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.core.redis.address import DEFAULT_URL, Address, chosen_url
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Flow
from lisa.core.store.server_checks import info
from lisa.core.store.store import Store, SyncStore


@dataclass(frozen=True, slots=True)
class Server:
    """The address of the server; it is pickled and sent to workers, which open connections."""

    url: str = DEFAULT_URL
    prefix: str = DEFAULT_PREFIX
    patience: timedelta = PRODUCER_RETRY_TIME

    @classmethod
    def of(
        cls, url: str | None, prefix: str | None, patience: timedelta = PRODUCER_RETRY_TIME
    ) -> Server:
        """The given server; else the one that the environment names, else the default.

        Call this on the driver, because workers have another environment. Raises ConfigError if the
        URL or the prefix is not valid.
        """
        url = chosen_url(url or None)
        Address(url)
        return cls(url, Keys.of(prefix or None).prefix, patience)

    def as_options(self) -> dict[str, str]:
        """The options of `format("lisa")` that select this server."""
        return {"url": self.url, "prefix": self.prefix}

    def connect(self) -> SyncStore:
        """A store with its own connection; the caller closes it."""
        connection = Connection(Address(self.url))
        return SyncStore(connection, Keys(self.prefix), self.patience, "pipeline")

    def open(self) -> closing[SyncStore]:
        """A store with its own connection; closes it on exit."""
        return closing(self.connect())


def check_layout(store: Store) -> Flow[None]:
    """`Store.check_schema` without writing to an empty server."""
    found = yield from store.command("EXISTS", store.keys.schema)
    if found:
        yield from store.check_schema()


def started_ms(store: Store) -> Flow[int]:
    """Start time of the server process in epoch ms, by its own clock, accurate to a second."""
    reply = yield from store.command("INFO", "server")
    now = yield from store.server_time_ms()
    return now - 1000 * int(info(reply).get("uptime_in_seconds", 0))
