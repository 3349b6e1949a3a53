"""`clearAll`: cancels what came by this face, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from lisa.admin.messages import State, list_messages
from lisa.core.flow import Flow
from lisa.core.store import Store
from lisa.core.transitions.cancel import Cancel, Cancelled
from lisa.core.transitions.inspect import Inspect
from lisa.gateway.compat.by_id import headers_of
from lisa.gateway.compat.mykit.wire import MARK

__all__ = ["clear"]

PAGE = 50
"""Their bodies are read, to know whose they are."""

STATES = (State.WAITING, State.READY, State.RETRY, State.GARBAGE)
"""What is in flight finishes."""


def clear(store: Store, topics: Iterable[str]) -> Flow[int]:
    """Cancel this face's messages in topics; how many were."""
    total = 0
    for topic in topics:
        for state in STATES:
            total += yield from _clear(store, topic, state)
    return total


def _clear(store: Store, topic: str, state: State) -> Flow[int]:
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
