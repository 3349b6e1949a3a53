"""Opens stream entries: their messages, decoded, and within their windows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from lisa.core.model.envelope import (
    HEAD_BYTES,
    UnknownFormat,
    decode_content,
    has_window,
    headers_of,
    token_of,
)
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import TopicKeys
from lisa.core.model.message import Message
from lisa.core.model.options import BYTES_PER_CALL, TopicOptions
from lisa.core.model.sharding import topic_of
from lisa.core.model.stream import Entry
from lisa.core.model.windows.placing import window_of
from lisa.core.model.windows.window import limits_at
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.replies import microseconds
from lisa.core.store.store import Store
from lisa.core.transitions.base import HasWindow, text
from lisa.core.transitions.delivery import Limits, Open, Opened
from lisa.core.transitions.lease import Release

log = logging.getLogger("lisa")


class Undecodable(NamedTuple):
    """Why a message cannot be decoded, and how to fail it: for good, or by its policy (None)."""

    reason: str
    delay: Literal["discard"] | None


def unpack(
    topic: str, group: str, entry: Entry, data: bytes, state: Any = None
) -> tuple[Message, Undecodable | None]:
    """The message of an entry, and why its body cannot be decoded; None if it can.

    A message that cannot be decoded has None as its body. In a rolling deployment another process
    may know a form that this one does not. `state` is that of the consumer.
    """
    _, message_id, due_ms, attempt, *_ = entry
    fault: Undecodable | None = None
    try:
        body, headers = decode_content(data)
    except InvalidMessage as error:
        body, headers = None, {}
        fault = Undecodable(str(error), None if isinstance(error, UnknownFormat) else "discard")
        said = "topic %s: message %s, attempt %d, cannot be read: %s"
        log.warning(said, topic, message_id, attempt, error)
    return Message(
        id=message_id,
        topic=topic,
        group=group,
        body=body,
        due_ms=due_ms,
        attempt=attempt,
        headers=headers,
        token=token_of(data),
        state=state,
    ), fault


MARGIN_MS = 20
"""The end of a window in which nothing is handed over: a handler takes a moment to begin."""

FIRST_BYTES = 1024
"""How much of each envelope to read first; longer headers take another read."""

UNKNOWN_ZONES = "unknown_zones"
"""The counter in a topic's `stats` of deliveries whose header names no time zone."""

MOST_TOLD = 1_000
"""Maximum errors about zones that a process logs: headers are users' data."""

_told: set[tuple[str, str]] = set()


def open_in_windows(store: Store, call: Open) -> Flow[Opened]:
    """Open the first of the entries within their windows. Raises LisaError.

    Raises ConfigError if a window names holidays and their library is not installed; the entries
    are then released.
    """
    keys = store.keys.topic(call.topic)
    now_ms = yield from store.server_time_ms(keys.waiting)
    window: Command = ("HGET", keys.options, "window")
    bodies = list(call.id_keys(keys))
    topic_window, *heads = yield from store.commands(
        [window, *[("GETRANGE", body, 0, FIRST_BYTES - 1) for body in bodies]]
    )
    heads = yield from _complete(store, bodies, heads)
    unknown: list[str] = []
    try:
        limits = [
            limits_of(head, text(topic_window or b""), now_ms, unknown.append) for head in heads
        ]
    except ConfigError:
        # Otherwise the leases would end and count attempts that no handler made.
        receipts = [(entry.id, entry.entry) for entry in call.entries]
        yield from store.run(Release(call.topic, call.group, receipts))
        raise
    if unknown:
        _warn(topic_of(call.topic), unknown)
        yield from store.command("HINCRBY", keys.stats, UNKNOWN_ZONES, len(unknown))
    return (yield from store.run(replace(call, limits=limits)))


def _warn(topic: str, unknown: Sequence[str]) -> None:
    """Log each error about a zone once."""
    for zone_error in dict.fromkeys(unknown):
        if (topic, zone_error) not in _told and len(_told) < MOST_TOLD:
            _told.add((topic, zone_error))
            log.warning("topic %s: %s", topic, zone_error)


def _complete(store: Store, bodies: Sequence[str], heads: Sequence[bytes]) -> Flow[list[bytes]]:
    """The beginnings of envelopes, with all their headers."""
    found = list(heads)
    ends = [_end(head) for head in found]
    long = [i for i, (head, end) in enumerate(zip(found, ends, strict=True)) if end > len(head)]
    if long:
        reads: list[Command] = [("GETRANGE", bodies[i], 0, ends[i] - 1) for i in long]
        for i, head in zip(long, (yield from store.commands(reads)), strict=True):
            found[i] = head
    return found


def _end(head: bytes) -> int:
    """Where the headers end; 0 if that cannot be read."""
    try:
        return HEAD_BYTES + int(head[11:HEAD_BYTES], 16)
    except ValueError:
        return 0


def limits_of(
    head: bytes, topic_window: str, now_ms: int, unknown: Callable[[str], None]
) -> Limits | None:
    """The limits of one message; None if it has no window, or one that no longer opens.

    unknown: called if a header should name a zone and does not.
    """
    window = window_of(headers_of(head), topic_window, unknown)
    found = None if window is None else limits_at(window, now_ms)
    if found is None:
        return None
    closes_ms, opens_ms = found
    return Limits(max(0, closes_ms - MARGIN_MS), opens_ms)


MOST_READS = 8
"""With more entries in a call, the script is cheaper, because one command reads all bodies."""

AGAIN_S = 1.0
"""How long to open by script after plain reads did not suffice, or in windows after one was met."""

DEFAULT_ACK_MS = TopicOptions().ack_timeout // timedelta(milliseconds=1)


class PlainState(NamedTuple):
    """A topic whose messages can be opened without a script, as far as the topic decides."""

    now_us: int
    ack_timeout_ms: int


def state_commands(keys: TopicKeys, group: str) -> list[Command]:
    """The commands that ask for a topic's state; `state_of` takes their replies."""
    return [
        ("HEXISTS", keys.groups, group),
        ("HMGET", keys.options, "ack_timeout", "paused", "journal", "window"),
        ("EXISTS", keys.expiry),
        ("TIME",),
    ]


def state_of(replies: Sequence[Any]) -> PlainState | None:
    """A topic's state; None if opening its messages is more than reading them."""
    if any(isinstance(reply, Exception) for reply in replies):
        return None
    is_declared, options, has_ttls, clock = replies
    ack_timeout, paused, journal, window = options
    if not is_declared or has_ttls or window or b"1" in (paused, journal):
        return None
    ack_ms = DEFAULT_ACK_MS if ack_timeout is None else int(ack_timeout)
    return PlainState(microseconds(clock), ack_ms)


def _opened(envelopes: list[bytes], state: PlainState | None) -> Opened | None:
    """What the script would return; None if it would do more than read.

    envelopes: those of live messages, read before the state; empty for others. A message lives as
        long as the stream has its entry, so one that its entry carried needs no further check.
    """
    if state is None or not all(envelopes) or any(map(has_window, envelopes)):
        return None
    return Opened(
        now_us=state.now_us,
        ack_timeout_ms=state.ack_timeout_ms,
        paused=False,
        past_ttl=[False] * len(envelopes),
        envelopes=[*envelopes],
    )


class Opening:
    """Opens the entries of a topic or shard for a group, without the script if reading suffices.

    It suffices for topics without special options, if the entries carry their envelopes, or are
    few. A script call would cost Redis more than twice as much: with few calls, its code is never
    in the processor's caches.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._script_until = self._windows_until = 0.0

    def open(self, call: Open, state: PlainState | None = None) -> Flow[Opened]:
        """Open the first of the entries; see `Open`. Raises LisaError.

        state: the topic's, right after the read that returned the entries.
        """
        now = time.monotonic()
        if now < self._windows_until:
            return (yield from open_in_windows(self._store, call))
        if call.ack_timeout_ms is None and not call.late:
            if opened := _opened([entry.envelope for entry in call.entries], state):
                return opened
            if len(call.entries) <= MOST_READS and now >= self._script_until:
                if opened := (yield from self._read(call)):
                    return opened
                self._script_until = now + AGAIN_S
        try:
            return (yield from self._store.run(call))
        except HasWindow:
            self._windows_until = now + AGAIN_S
        return (yield from open_in_windows(self._store, call))

    def _read(self, call: Open) -> Flow[Opened | None]:
        """Open by plain reads; None if they do not suffice."""
        keys = self._store.keys.topic(call.topic)
        most = BYTES_PER_CALL // len(call.entries)
        commands: list[Command] = [
            *[("GETRANGE", body, 0, most) for body in call.id_keys(keys)],
            ("HMGET", keys.group(call.group).entries, *[entry.id for entry in call.entries]),
        ]
        asks = state_commands(keys, call.group)
        replies = yield from self._store.chain(keys.waiting, [*commands, *asks])
        *bodies, indexed = replies[: len(commands)]
        if any(isinstance(reply, Exception) for reply in replies):
            return None
        envelopes = [
            body if known == entry.entry.encode() and len(body) <= most else b""
            for entry, known, body in zip(call.entries, indexed, bodies, strict=True)
        ]
        return _opened(envelopes, state_of(replies[len(commands) :]))
