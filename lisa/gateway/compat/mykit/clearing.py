"""`clearAll`: cancels only the messages that were sent through this API."""

from __future__ import annotations

from collections.abc import Iterable

from lisa.admin.messages import LiveState, list_messages
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store
from lisa.core.transitions.cancel import Cancel, Cancelled
from lisa.core.transitions.inspect import Inspect
from lisa.gateway.compat.job_lookup import headers_of
from lisa.gateway.compat.mykit.wire import MARK

PAGE = 50
"""Messages per page; small, because the bodies are read to find the API's header."""

STATES = (LiveState.WAITING, LiveState.READY, LiveState.RETRY, LiveState.GARBAGE)
"""Messages in flight are not cancelled."""


def clear(store: Store, topics: Iterable[str]) -> Flow[int]:
    """Cancel this API's messages in the topics; returns the number of cancelled messages."""
    total = 0
    for topic in topics:
        for state in STATES:
            total += yield from _clear(store, topic, state)
    return total


def _clear(store: Store, topic: str, state: LiveState) -> Flow[int]:
    total, cursor = 0, None
    while True:
        page = yield from list_messages(store, topic, state, cursor=cursor, limit=PAGE)
        ids = list(dict.fromkeys(row.id for row in page.rows))
        total += yield from _cancel(store, topic, ids)
        cursor = page.cursor
        if cursor is None:
            return total


def _cancel(store: Store, topic: str, ids: list[str]) -> Flow[int]:
    if not ids:
        return 0
    seen = yield from store.run_by_id(Inspect(topic, ids))
    own = [one for one, looked in zip(ids, seen, strict=True) if MARK in headers_of(looked)]
    if not own:
        return 0
    outcomes = yield from store.run_by_id(Cancel(topic, own))
    return sum(one is Cancelled.CANCELLED for one in outcomes)
