"""Who is alive: what consumers and managers write about themselves, and when they count as gone.

A record is JSON in a hash, its field the unique name. Times are by Redis's clock.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec

from lisa.core.flow import Flow
from lisa.core.store import Store, pairs

__all__ = [
    "BEAT",
    "GONE_AFTER",
    "ConsumerPresence",
    "ManagerPresence",
    "announce_consumer",
    "announce_manager",
    "consumers",
    "consumers_in",
    "leave_consumer",
    "leave_manager",
    "managers",
    "managers_in",
    "unique_name",
    "whole",
]

BEAT = timedelta(seconds=5)
"""How often a role renews its record."""

GONE_AFTER = timedelta(seconds=30)
"""A role that was silent for so long counts as gone."""


class ConsumerPresence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One consumer on one topic. `group` is empty while it waits for one to be declared."""

    name: str
    topic: str
    group: str = ""
    host: str = ""
    pid: int = 0
    started_ms: int = 0
    seen_ms: int = 0
    concurrency: int = 1
    running: int = 0
    held: int = 0
    handled: int = 0
    state: str = "running"
    """running, waiting (for a group), paused, degraded or stopping."""


class ManagerPresence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One manager."""

    name: str
    host: str = ""
    pid: int = 0
    started_ms: int = 0
    seen_ms: int = 0
    topics: int = 0


_P = TypeVar("_P", ConsumerPresence, ManagerPresence)

_encoder = msgspec.json.Encoder()
_consumer_decoder = msgspec.json.Decoder(ConsumerPresence)
_manager_decoder = msgspec.json.Decoder(ManagerPresence)


def unique_name(configured: str | None) -> str:
    """The configured name with host, pid and a random part: no two live roles share one."""
    base = configured or "lisa"
    return f"{base}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def announce_consumer(
    store: Store, presence: ConsumerPresence, place: str | None = None
) -> Flow[bool]:
    """Write or renew a consumer's record; `seen_ms` becomes Redis's present time.

    `place`: which one of the topic's it reads, where that is split. Whether there was no record.
    """
    seen = msgspec.structs.replace(presence, seen_ms=(yield from store.server_time_us()) // 1000)
    keys = store.keys.topic(place or presence.topic)
    record = _encoder.encode(seen)
    return bool((yield from store.command("HSET", keys.consumers, presence.name, record)))


def leave_consumer(store: Store, topic: str, name: str) -> Flow[None]:
    """Take a consumer's record away."""
    yield from store.command("HDEL", store.keys.topic(topic).consumers, name)


def consumers(store: Store, topic: str) -> Flow[list[ConsumerPresence]]:
    """All consumers' records of a topic, gone ones included, in order of name."""
    reply = yield from store.command("HGETALL", store.keys.topic(topic).consumers)
    return consumers_in(reply)


def consumers_in(reply: Sequence[bytes] | dict[bytes, bytes]) -> list[ConsumerPresence]:
    """The same, out of the reply to an HGETALL."""
    return _decoded(_consumer_decoder, pairs(reply))


def whole(parts: Sequence[ConsumerPresence]) -> ConsumerPresence:
    """One consumer's records at several places of a topic as one."""
    if len(parts) == 1:
        return parts[0]
    latest = max(parts, key=lambda one: one.seen_ms)
    states = [one.state for one in parts if one.state != "running"]
    return msgspec.structs.replace(
        latest, running=sum(one.running for one in parts), held=sum(one.held for one in parts),
        handled=sum(one.handled for one in parts), state=states[0] if states else latest.state,
    )  # fmt: skip


def announce_manager(store: Store, presence: ManagerPresence) -> Flow[None]:
    """Write or renew a manager's record; `seen_ms` becomes Redis's present time."""
    seen = msgspec.structs.replace(presence, seen_ms=(yield from store.server_time_us()) // 1000)
    yield from store.command("HSET", store.keys.managers, presence.name, _encoder.encode(seen))


def leave_manager(store: Store, name: str) -> Flow[None]:
    """Take a manager's record away."""
    yield from store.command("HDEL", store.keys.managers, name)


def managers(store: Store) -> Flow[list[ManagerPresence]]:
    """All managers' records, gone ones included, in order of name."""
    reply = yield from store.command("HGETALL", store.keys.managers)
    return managers_in(reply)


def managers_in(reply: Sequence[bytes] | dict[bytes, bytes]) -> list[ManagerPresence]:
    """The same, out of the reply to an HGETALL."""
    return _decoded(_manager_decoder, pairs(reply))


def _decoded(decoder: msgspec.json.Decoder[_P], records: dict[bytes, bytes]) -> list[_P]:
    found = []
    for _, record in sorted(records.items()):
        try:
            found.append(decoder.decode(record))
        except (msgspec.DecodeError, msgspec.ValidationError):
            continue
    return found
