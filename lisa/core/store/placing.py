"""Sends in the window of a topic, and keeps the list of messages with a wall time.

Managers follow these messages when the time zone data of their machine changes. The list is a
sorted set by due time in the topic's own slot. It has the id of each message, followed by its wall
time if a reschedule has changed that. It is written before the messages; managers remove entries
that turn out to be unused, or whose time has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from lisa.core.model.envelope import headers_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import COALESCED_IDS, LOCAL_HEADER, WINDOW_HEADER, keyed_id
from lisa.core.model.windows.placing import (
    LISTED,
    LocalTime,
    clock_ms,
    due_again,
    for_send,
    moved,
    window_of,
)
from lisa.core.model.windows.window import parse_stored
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store
from lisa.core.transitions.coalesce import Coalesce
from lisa.core.transitions.enqueue import Enqueue, Sent, WindowChanged
from lisa.core.transitions.restore import RestoreItem

MOST_CHANGES = 5
"""How often a topic's window may change during one send."""


def enqueue_placed(
    store: Store,
    call: Enqueue,
    windows: dict[str, str],
    write: Callable[[Enqueue], Flow[list[Sent]]],
) -> Flow[list[Sent]]:
    """Send the messages of a call with due times in the topic's window.

    windows: the windows of topics, as far as known. Raises what `write` raises, and InvalidMessage
    if the topic's window does not open within 400 days, or if it takes the zone from a header that
    names none.
    """
    is_current = False
    for left in reversed(range(MOST_CHANGES)):
        try:
            placed = in_window(call, windows.get(call.topic, ""))
        except InvalidMessage:
            if is_current:
                raise
            placed = call  # perhaps the topic has another window by now, which the reply tells
        if call.has_local:
            yield from note_local(store, placed)
        try:
            return (yield from write(placed))
        except WindowChanged as error:
            if not left:
                raise
            is_current = True
            if error.window:
                windows[call.topic] = error.window
            else:
                windows.pop(call.topic, None)  # another thread may have done so
    raise AssertionError  # the last round returned or raised


def in_window(call: Enqueue, window: str) -> Enqueue:
    """The call with the due times of messages without their own window moved to openings."""
    if not window:
        return call
    now_ms, dues = clock_ms(), list[str]()
    for due, envelope in _messages(call):
        headers = headers_of(envelope)
        is_own = WINDOW_HEADER in headers or window_of(headers, window) is None
        applies = None if is_own else for_send(parse_stored(window), headers)
        dues.append(due if applies is None else moved(due, applies, now_ms))
    alike = dues.count(dues[0]) == len(dues)
    return replace(call, dues=dues[:1] if alike else dues, window=window)


def note_local(store: Store, call: Enqueue) -> Flow[None]:
    """List the messages of a call that have a wall time, and announce the topic to managers."""
    members: list[str | int] = []
    for message_id, (due, envelope) in zip(call.ids, _messages(call), strict=True):
        if LOCAL_HEADER in headers_of(envelope):
            members += (int(due), message_id)
    yield from _note(store, call.topic, members)


def note_coalesced(store: Store, call: Coalesce) -> Flow[None]:
    """List the coalescing sends of a call that have a wall time, under both ids of their keys."""
    members: list[str | int] = []
    for key, rule, envelope in zip(call.keys, call.rules, call.envelopes, strict=True):
        if LOCAL_HEADER in headers_of(envelope):
            for own_id in COALESCED_IDS:
                members += (int(rule[1:]), keyed_id(key, own_id))
    yield from _note(store, call.topic, members)


def note_restored(store: Store, topic: str, items: Sequence[RestoreItem]) -> Flow[None]:
    """List the messages to be restored that wait for their wall time.

    A message that was rescheduled waits for another time, which its envelope does not tell.
    """
    pairs = [(item, headers_of(item.envelope)) for item in items if not item.group_states]
    local = [(item, headers) for item, headers in pairs if LOCAL_HEADER in headers]
    if not local:
        return
    window, now_ms = (yield from store.options(topic)).window or "", clock_ms()
    members: list[str | int] = []
    for item, headers in local:
        with suppress(InvalidMessage):  # its window does not open any more
            if item.due_ms == due_again(headers, window, now_ms):
                members += (item.due_ms, item.id)
    yield from _note(store, topic, members)


def note_new_local(
    store: Store, topic: str, message_id: str, due: str, local: LocalTime
) -> Flow[None]:
    """List a message with the wall time to which it is about to be rescheduled."""
    yield from _note(store, topic, [int(due), f"{message_id}{LISTED}{local}"])


def _note(store: Store, topic: str, members: Sequence[str | int]) -> Flow[None]:
    """List members, each after its due time, and announce the topic to managers."""
    if members:
        yield from store.command("ZADD", store.keys.topic(topic).local, *members)
        yield from store.list_local(topic)


def _messages(call: Enqueue) -> Iterator[tuple[str, bytes]]:
    """Due time and envelope of each message."""
    dues = call.dues if len(call.dues) == len(call.ids) else list(call.dues) * len(call.ids)
    return zip(dues, call.envelopes, strict=True)
