"""Opens stream entries without a script call: by what they carry, or with plain reads.

A script call costs Redis twice as much as plain reads. Most of the cost of a call with a few
messages is overhead: arguments, functions and cold code. A transaction of plain reads also sees
the topic at a single instant.
"""

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
    fence_of,
    has_window,
    headers_of,
)
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import TopicKeys
from lisa.core.model.lateness import kept_ms, letter
from lisa.core.model.message import Message
from lisa.core.model.options import BYTES_PER_CALL, TopicOptions
from lisa.core.model.sharding import topic_of
from lisa.core.model.stream import Entry, entry_ms
from lisa.core.model.windows.placing import window_of
from lisa.core.model.windows.window import limits_at
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.replies import microseconds
from lisa.core.store.store import Store
from lisa.core.transitions.ack import NO_LATENESS, Settlement
from lisa.core.transitions.base import HasWindow, text
from lisa.core.transitions.delivery import Limits, Open, Opened
from lisa.core.transitions.lease import Release

AHEAD_BYTES = 16 * 1024 * 1024
"""Maximum total of bodies that one consumer or one pull holds before handlers start on them."""

SMOOTHING = 0.2


class Average:
    """An exponential average. A value more than four times as large replaces the average."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Add a measured value."""
        average = self.value
        if average is None or value > 4 * average:
            self.value = value
        else:
            self.value = average + SMOOTHING * (value - average)


class BodySize:
    """The average size of bodies in bytes."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = Average()

    def measured(self, total: int, count: int) -> None:
        """Add `count` bodies with `total` bytes."""
        self._bytes.add(total / max(1, count))

    def fitting(self) -> int:
        """The number of average bodies that fit into `AHEAD_BYTES`, at least one."""
        return max(1, int(AHEAD_BYTES / max(self._bytes.value or 0.0, 1.0)))


log = logging.getLogger("lisa")

_new = tuple.__new__


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
        state=state,
    ), fault


def settlement_of(message: Message, entry: str, data: bytes, handed_us: int) -> Settlement:
    """The settlement of a delivery at `handed_us`, in microseconds of Redis's clock."""
    due_ms, attempt = message.due_ms, message.attempt
    late, late_ms = NO_LATENESS, 0
    if attempt == 1:
        late_us = handed_us - due_ms * 1000
        late, late_ms = letter(late_us), kept_ms(late_us)
    # tuple.__new__ takes half as long as the named tuple's constructor.
    return _new(Settlement, (message.id, entry, fence_of(data), due_ms, attempt, late, late_ms))


MARGIN_MS = 20
"""The end of a window in which nothing is handed over: a handler takes a moment to begin."""

FIRST_BYTES = 1024
"""How much of each envelope to read first; longer headers take another read."""

UNKNOWN_ZONES = "unknown_zones"
"""The counter in a topic's `stats` of deliveries whose header names no time zone."""

MOST_TOLD = 1_000
"""Maximum errors about zones that a process logs: headers are users' data."""

_told: set[tuple[str, str]] = set()

log = logging.getLogger(__name__)


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
    for one in dict.fromkeys(unknown):
        if (topic, one) not in _told and len(_told) < MOST_TOLD:
            _told.add((topic, one))
            log.warning("topic %s: %s", topic, one)


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


PLAIN_MOST = 8
"""With more entries in a call, the script is cheaper, because one command reads all bodies."""

AGAIN_S = 1.0
"""How long to open by script after plain reads did not suffice."""

DEFAULT_ACK_MS = TopicOptions().ack_timeout // timedelta(milliseconds=1)


class PlainState(NamedTuple):
    """The topic's state, for opening entries without a call. `at_us` is by the server's clock.

    ack_timeout_ms: None if only the clock was read.
    """

    at_us: int
    ack_timeout_ms: int | None


class StreamRead(NamedTuple):
    """When a read was sent and answered (`time.monotonic`), and the topic's state right before it.

    state: None if it is not known, or if entries must be opened by a call.
    is_adjacent: whether the server cannot have run other clients' commands between the two, because
        both were sent in one packet.
    state_asked_at: when the state was asked for, if that was after the read; `read_at` is the time
        of its reply then.
    """

    asked_at: float
    read_at: float
    state: PlainState | None = None
    is_adjacent: bool = True
    state_asked_at: float | None = None


_EVER_US = 10**15

_STATE = ("ack_timeout", "paused", "journal", "window")


def state_commands(keys: TopicKeys, group: str) -> Sequence[Command]:
    """The commands to send right before a read; `parse_state` takes their replies."""
    return ("TIME",), ("HEXISTS", keys.groups, group), ("HMGET", keys.options, *_STATE)


def parse_state(replies: Sequence[Any]) -> PlainState | None:
    """The state, unless a command was refused, or opening would do more than read."""
    if any(isinstance(reply, Exception) for reply in replies):
        return None
    clock, is_declared, (timeout, paused, journal, window) = replies
    if not is_declared or paused == b"1" or journal == b"1" or window:
        return None
    return PlainState(microseconds(clock), DEFAULT_ACK_MS if timeout is None else int(timeout))


def were_added_since(entries: Sequence[Entry], at_us: int) -> bool:
    """Whether `promote` added all entries, with their envelopes, after an instant."""
    return all(one.envelope and 1_000 * entry_ms(one.entry.encode()) > at_us for one in entries)


def from_entries(entries: Sequence[Entry], read: StreamRead) -> tuple[Opened, float] | None:
    """What opening would return without a call, and the earliest time at which a lease began.

    None unless all entries carry their envelopes and the topic's state at their delivery is known.
    The server delivers an entry to a blocked read in the same step in which `promote`, which checks
    the state itself, adds it. Earlier entries are delivered right after the state was read. If the
    state was read after the entries, it is what opening by a call would see.
    """
    state, was_after = read.state, read.state_asked_at is not None
    if state is None:
        return None
    asked_at = read.asked_at if read.state_asked_at is None else read.state_asked_at
    took_us = int(1e6 * (read.read_at - asked_at))
    now_us, ack_timeout_ms, first_us = state.at_us + took_us, state.ack_timeout_ms, took_us
    for entry in entries:
        if not entry.envelope or has_window(entry.envelope):
            return None
        added_us = 1_000 * entry_ms(entry.entry.encode())
        waited_us = added_us - state.at_us
        if was_after:
            # Delivered at the earliest when it was added, or, if the clock was set, with the read.
            first_us = min(first_us, waited_us if waited_us <= 0 else -_EVER_US)
        elif 0 < waited_us <= took_us:
            ack_timeout_ms = entry.ack_timeout_ms
            first_us = min(first_us, waited_us)
        elif read.is_adjacent and state.ack_timeout_ms is not None:
            first_us = 0  # it was there before, or the server's clock was set
        else:
            return None
        now_us = max(now_us, added_us)
    opened = Opened(
        now_us=now_us,
        ack_timeout_ms=ack_timeout_ms or DEFAULT_ACK_MS,
        paused=False,
        past_ttl=[False] * len(entries),
        envelopes=[entry.envelope for entry in entries],
    )
    return opened, max(read.asked_at, asked_at + first_us / 1e6)


class Opening:
    """Opens the entries of one topic or shard for one group, and remembers when reads suffice."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._script_until = 0.0
        self._windows_until = 0.0

    def open(self, call: Open) -> Flow[Opened]:
        """Open the first of the entries; see `Open`. Raises LisaError."""
        if time.monotonic() >= self._windows_until:
            try:
                return (yield from self._open(call))
            except HasWindow:
                self._windows_until = time.monotonic() + AGAIN_S
        return (yield from open_in_windows(self._store, call))

    def _open(self, call: Open) -> Flow[Opened]:
        if len(call.entries) <= PLAIN_MOST and call.ack_timeout_ms is None and not call.late:
            opened = yield from self._read(call)
            if opened is not None:
                return opened
        return (yield from self._store.run(call))

    def _read(self, call: Open) -> Flow[Opened | None]:
        """What the script would return; None if it would do more than read."""
        if time.monotonic() < self._script_until:
            return None
        keys = self._store.keys.topic(call.topic)
        entries = keys.group(call.group).entries
        most = BYTES_PER_CALL // len(call.entries)
        commands: list[Command] = [
            *state_commands(keys, call.group),
            ("EXISTS", keys.expiry),
            ("HMGET", entries, *[entry.id for entry in call.entries]),
            *_reads_of(list(call.id_keys(keys)), most),
        ]
        replies = yield from self._store.transaction(keys.waiting, commands)
        opened = None if replies is None else self._opened(call, replies, most)
        if opened is None:
            self._script_until = time.monotonic() + AGAIN_S
        return opened

    def _opened(self, call: Open, replies: Sequence[Any], most: int) -> Opened | None:
        clock, is_declared, (timeout, paused, journal, window), has_ttls, indexed, *bodies = replies
        if (window or any(map(has_window, bodies))) and paused != b"1":
            raise HasWindow(f"a message of topic {call.topic!r} has a window")
        if has_ttls or journal == b"1" or paused == b"1" or not is_declared:
            return None
        n = len(call.entries)
        for entry, known, body in zip(call.entries, indexed, bodies, strict=True):
            if known != entry.entry.encode() or not body or (n > 1 and len(body) > most):
                return None
        ack_ms = DEFAULT_ACK_MS if timeout is None else int(timeout)
        return Opened(
            microseconds(clock), ack_ms, paused=False, past_ttl=[False] * n, envelopes=bodies
        )


def _reads_of(bodies: Sequence[str], most: int) -> list[Command]:
    """GET for one body; for several, GETRANGE of `most` + 1 bytes, to detect longer bodies."""
    if len(bodies) == 1:
        return [("GET", bodies[0])]
    return [("GETRANGE", body, 0, most) for body in bodies]
