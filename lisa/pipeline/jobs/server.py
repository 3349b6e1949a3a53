"""The live side, as Spark's workers reach it: what is sent to them is an address, not a client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from lisa.admin.reading import info
from lisa.core.address import DEFAULT_URL
from lisa.core.flow import Flow
from lisa.core.keys import DEFAULT_PREFIX
from lisa.core.options import PRODUCER_RETRY_TIME
from lisa.core.store import Store, SyncStore
from lisa.pipeline.source.options import open_store

__all__ = ["Server", "check_layout", "now_ms", "started_ms"]


@dataclass(frozen=True, slots=True)
class Server:
    """Where the live messages are: a URL that holds all that workers need to know."""

    url: str = DEFAULT_URL
    prefix: str = DEFAULT_PREFIX
    patience: timedelta = PRODUCER_RETRY_TIME

    def as_options(self) -> dict[str, str]:
        """The options of `format("lisa")` that name it."""
        return {"url": self.url, "prefix": self.prefix}

    @contextmanager
    def open(self) -> Iterator[SyncStore]:
        """A store on a connection of its own, closed at the end. Raises ConfigError."""
        store = open_store(self.url, self.prefix, self.patience)
        try:
            yield store
        finally:
            store.close()


def check_layout(store: Store) -> Flow[None]:
    """`Store.check_schema`, without leaving a mark on an empty server."""
    found = yield from store.command("EXISTS", store.keys.schema)
    if found:
        yield from store.check_schema()


def now_ms(store: Store) -> Flow[int]:
    """The server's clock."""
    micros = yield from store.server_time_us()
    return micros // 1000


def started_ms(store: Store) -> Flow[int]:
    """When the server process began, to the second, by its own clock."""
    reply = yield from store.command("INFO", "server")
    now = yield from now_ms(store)
    return now - 1000 * int(info(reply).get("uptime_in_seconds", 0))
