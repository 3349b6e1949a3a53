"""Records what this process sends to the test's server, and dates delays by the test's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lisa.core.model.addresses import ServerUrl
from lisa.core.model.sharding import topic_of
from lisa.core.redis.flow import Flow
from lisa.core.transitions.base import ById
from lisa.core.transitions.change import Reschedule
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.producer.sending import Sending
from lisa.testing.records import SentMessage, dated, sent_by

_write = Sending._write  # noqa: SLF001  the one method through which all producers write


class ProducerWatch:
    """Follows all producers of this process while it is active.

    The server's clock stands still only to the millisecond, and the end of a delay is rounded up.
    A delay is therefore replaced by the due time that it means at the test's clock, so that a test
    that advances by the same delay always reaches it.

    url, prefix: of the server to follow; calls to others are left alone.
    now_ms: the test's clock, in epoch milliseconds.
    """

    def __init__(self, url: str, prefix: str, now_ms: Callable[[], int]) -> None:
        self._where = _server(url), prefix
        self._now_ms = now_ms
        self.sent: list[SentMessage] = []
        self.topics: set[str] = set()

    def start(self) -> None:
        """Begin to follow."""
        watch = self

        def write(self: Sending, call: ById[Any], ids: Sequence[str]) -> Flow[list[Any]]:
            return watch._follow(self, call, ids)

        Sending._write = write  # type: ignore[method-assign]  # noqa: SLF001  as above

    def stop(self) -> None:
        """End, so that producers write as before."""
        Sending._write = _write  # type: ignore[method-assign]  # noqa: SLF001  as above

    def _follow(self, producer: Sending, call: ById[Any], ids: Sequence[str]) -> Flow[list[Any]]:
        store = producer._store  # noqa: SLF001  a producer does not show its server
        if (_server(store.connection.address.url), store.keys.prefix) != self._where:
            return (yield from _write(producer, call, ids))
        now_ms = self._now_ms()
        if isinstance(call, Reschedule):
            items = [(message_id, dated(due, now_ms)) for message_id, due in call.items]
            return (yield from _write(producer, replace(call, items=items), ids))
        if not isinstance(call, Enqueue):
            return (yield from _write(producer, call, ids))
        dues = [dated(due, now_ms) for due in call.dues]
        self.topics.add(topic_of(call.topic))
        outcomes = yield from _write(producer, replace(call, dues=dues), ids)
        for message, outcome in zip(sent_by(call, now_ms), outcomes, strict=True):
            if outcome in (Sent.ACCEPTED, Sent.REPLACED):
                self.sent.append(message)
        return outcomes


def _server(url: str) -> object:
    """The server and the database of a URL, which may be written in several ways."""
    parts = ServerUrl.parse(url)
    if parts.scheme != "redis" or parts.kind:
        return url
    ((host, port),) = parts.nodes
    return "127.0.0.1" if host == "localhost" else host, port, parts.path.strip("/") or "0"
